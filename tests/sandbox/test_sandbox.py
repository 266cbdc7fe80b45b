"""What every sandbox does, whatever it is made of: the shared tests of the protocol."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox import Limits, Sandbox, Snapshot, Status, open_sandbox
from rllm.sandbox.process import WardenProcess
from rllm.sandbox.spawner import spawn

SMALL = Limits(wall_s=10, cpu_s=8, memory_mb=128, output_kb=64, disk_mb=8, processes=16)
"""As the sandboxes of conftest.py have it."""
SECONDS = Limits(wall_s=0.5, cpu_s=4, memory_mb=128, output_kb=64, disk_mb=8, processes=16)


class TestEverySandbox:
    def test_a_command_says_what_it_said(self, sandbox: Sandbox) -> None:
        ended = sandbox.exec("echo out; echo err >&2; exit 3")
        assert (ended.status, ended.exit_code) == (Status.ERROR, 3)
        assert (ended.stdout, ended.stderr, ended.truncated) == ("out\n", "err\n", False)
        assert 0 < ended.wall_s < SMALL.wall_s

    def test_words_are_not_read_by_a_shell(self, sandbox: Sandbox) -> None:
        assert sandbox.exec(["echo", "$HOME; exit 1"]).stdout == "$HOME; exit 1\n"

    def test_stdin_env_and_cwd_reach_the_program(self, sandbox: Sandbox) -> None:
        sandbox.write("below/file", "")
        ended = sandbox.exec("cat; echo $WORD; ls", stdin="asked\n", env={"WORD": "ä b"}, cwd="below")
        assert ended.stdout == "asked\nä b\nfile\n"

    def test_the_environment_of_the_caller_stays_outside(
        self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("API_KEY", "secret-value")
        assert "secret-value" not in sandbox.exec("env; cat /proc/*/environ").stdout

    def test_a_program_that_is_not_there_is_its_error(self, sandbox: Sandbox) -> None:
        ended = sandbox.exec(["no-such-program"])
        assert (ended.status, ended.exit_code) == (Status.ERROR, 127)
        assert "no-such-program" in ended.stderr
        assert sandbox.exec("true", cwd="no/such/place").exit_code == 127

    def test_files_stay_from_one_program_to_the_next(self, sandbox: Sandbox) -> None:
        sandbox.exec("echo one > stays")
        sandbox.exec("echo two >> stays")
        assert sandbox.read("stays") == b"one\ntwo\n"

    def test_bytes_come_back_as_they_were(self, sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 300
        sandbox.write("deep/er/blob", data)
        assert sandbox.read("deep/er/blob") == data
        assert sandbox.read(f"{sandbox.workdir}/deep/er/blob") == data

    def test_output_that_is_no_text_is_still_a_string(self, sandbox: Sandbox) -> None:
        assert sandbox.exec(r"printf '\377\000x'").stdout == "\ufffd\0x"

    def test_running_too_long_is_a_timeout(self, sandbox: Sandbox) -> None:
        ended = sandbox.exec("echo begun; sleep 30", limits=SECONDS)
        assert (ended.status, ended.exit_code, ended.stdout) == (Status.TIMEOUT, None, "begun\n")

    def test_too_much_output_is_cut_and_stops_the_program(self, sandbox: Sandbox) -> None:
        ended = sandbox.exec("yes")
        assert (ended.status, ended.truncated) == (Status.OUTPUT_LIMIT, True)
        assert len(ended.stdout) == SMALL.output_kb * 1024

    def test_signals_and_faults_have_names_of_their_own(self, sandbox: Sandbox) -> None:
        assert sandbox.exec("kill -9 $$").status is Status.KILLED
        crashed = sandbox.exec("kill -SEGV $$")
        assert (crashed.status, crashed.exit_code) == (Status.CRASHED, -11)

    def test_what_a_program_leaves_running_is_ended(self, sandbox: Sandbox) -> None:
        sandbox.exec("(sleep 1; echo late > late) & setsid sleep 77 & echo bye")
        assert "sleep 77" not in sandbox.exec("cat /proc/*/cmdline | tr '\\0' ' '").stdout
        with pytest.raises(FileNotFoundError):
            sandbox.read("late")

    def test_a_link_is_not_followed_and_a_fifo_blocks_nobody(self, sandbox: Sandbox) -> None:
        sandbox.exec(
            "mkdir traps; cd traps; ln -s /etc/hosts link; ln -s / root; mkfifo fifo; echo x > plain"
        )
        for trap in ("link", "fifo", "root/etc/hosts", "missing", ".", "../traps/link"):
            with pytest.raises(OSError, match=rf"{trap}|links"):
                sandbox.read(f"traps/{trap}")
        assert sandbox.read("traps/plain") == b"x\n"

    def test_writing_to_a_link_replaces_it(self, sandbox: Sandbox) -> None:
        sandbox.exec("echo old > target; ln -s target pointer")
        sandbox.write("pointer", "new")
        assert (sandbox.read("target"), sandbox.read("pointer")) == (b"old\n", b"new")

    def test_no_path_leads_out(self, sandbox: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("mine")
        paths = (str(tmp_path / "mine"), "../" * 12 + str(tmp_path / "mine"))
        for path in paths:
            with pytest.raises(OSError, match="mine"):
                sandbox.read(path)
        for path in paths:
            with contextlib.suppress(OSError):  # a path of that name inside is the sandbox's own
                sandbox.write(path, "yours")
        assert (tmp_path / "mine").read_text() == "mine"

    def test_a_directory_goes_in_and_comes_out(self, sandbox: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "source"
        (source / "a" / "empty").mkdir(parents=True)
        (source / "a" / "Ünicode name.bin").write_bytes(b"\0\1")
        (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (source / "run.sh").chmod(0o755)
        sandbox.upload(source, "tree")
        assert sandbox.exec("./run.sh", cwd="tree").stdout == "ran\n"
        assert sandbox.download("tree", tmp_path / "back") == []
        assert _tree(tmp_path / "back") == _tree(source)
        sandbox.upload(source / "run.sh", "one.sh")
        assert sandbox.download("one.sh", tmp_path / "one.sh") == []
        assert (tmp_path / "one.sh").read_text() == "#!/bin/sh\necho ran\n"

    def test_a_download_leaves_links_and_fifos_out_and_says_so(
        self, sandbox: Sandbox, tmp_path: Path
    ) -> None:
        sandbox.exec("mkdir out; cd out; ln -s /etc hosts; mkfifo pipe; echo ok > file")
        assert sandbox.download("out", tmp_path / "out") == ["./hosts", "./pipe"]
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
        with pytest.raises(FileExistsError, match="exists already"):
            sandbox.download("out", tmp_path / "out")

    def test_a_download_names_all_that_it_leaves_out_in_any_script(
        self, sandbox: Sandbox, tmp_path: Path
    ) -> None:
        """Each letter takes six bytes or twelve on its way, and more come than a pipe holds."""
        names = ["ü" * 80 + str(number) for number in range(150)] + ["𝄞" * 60]
        script = f"import os; os.mkdir('piped')\nfor name in {names!r}: os.mkfifo('piped/' + name)"
        sandbox.exec(["python3", "-c", script])
        assert sandbox.download("piped", tmp_path / "piped") == sorted(f"./{name}" for name in names)

    def test_a_file_may_have_as_long_a_name_as_the_system_allows(self, sandbox: Sandbox) -> None:
        for name in ("ü" * 125, "ü" * 127, "x" * 255):
            sandbox.write(name, name)
            assert sandbox.read(name).decode() == name

    def test_an_upload_refuses_a_link(self, sandbox: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "linked").mkdir()
        (tmp_path / "linked" / "to").symlink_to("/etc/passwd")
        with pytest.raises(OSError, match="plain file"):
            sandbox.upload(tmp_path / "linked", "linked")
        with pytest.raises(OSError, match="symbolic links"):
            sandbox.upload(tmp_path / "linked" / "to", "passwd")

    def test_a_snapshot_starts_another_sandbox(self, sandbox: Sandbox) -> None:
        sandbox.exec("mkdir -p kept/d; echo v1 > kept/d/f; chmod 755 kept/d/f; ln -s d/f kept/l")
        snapshot = sandbox.snapshot()
        sandbox.write("kept/d/f", "v2")
        with open_sandbox(sandbox.backend, limits=SMALL, snapshot=snapshot) as other:
            assert other.exec("cat kept/l; test -x kept/d/f && echo executable").stdout == "v1\nexecutable\n"
            other.write("kept/d/f", "v3")
        assert sandbox.read("kept/d/f") == b"v2"

    def test_calls_from_many_threads_take_turns(self, sandbox: Sandbox) -> None:
        said: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: said.append(sandbox.exec(f"echo {n}").stdout))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(said) == [f"{n}\n" for n in range(8)]

    def test_the_disk_has_an_end(self, sandbox: Sandbox) -> None:
        ended = sandbox.exec("dd if=/dev/zero of=full bs=1M count=20")
        assert ended.status is not Status.OK
        with pytest.raises(OSError, match=r"space|large"):
            sandbox.write("more", b"x" * 9 * 2**20)
        sandbox.exec("rm -f full")


def test_two_sandboxes_do_not_see_each_other(sandbox: Sandbox) -> None:
    with open_sandbox(sandbox.backend, limits=SMALL) as other:
        sandbox.write("mine", "1")
        assert other.exec("cat mine").status is Status.ERROR


def test_a_closed_sandbox_says_so_and_closes_again(sandbox: Sandbox) -> None:
    other = open_sandbox(sandbox.backend, limits=SMALL)
    assert other.is_alive
    other.close()
    other.close()
    assert not other.is_alive
    with pytest.raises(SandboxError):
        other.exec("true")


def test_closing_ends_a_program_that_runs(sandbox: Sandbox) -> None:
    other = open_sandbox(sandbox.backend, limits=SMALL)
    timer = threading.Timer(0.3, other.close)
    timer.start()
    with pytest.raises(SandboxError):
        other.exec("sleep 60", limits=replace(SMALL, wall_s=60))
    timer.join()


def test_a_stop_that_comes_while_the_program_is_sent_ends_it(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sandbox.backend == "docker":
        pytest.skip("a container's programs are ended one and all")
    order = WardenProcess._order

    def order_late(warden: WardenProcess, *about: Any) -> None:
        stopper = threading.Thread(target=warden.stop)
        stopper.start()
        stopper.join(0.2)
        order(warden, *about)

    monkeypatch.setattr(WardenProcess, "_order", order_late)
    assert sandbox.exec("sleep 60").status is Status.KILLED


def test_a_broken_snapshot_is_an_error_and_leaves_no_sandbox(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError):
        open_sandbox(sandbox.backend, snapshot=Snapshot(tar=b"no tar" * 100))


def test_an_empty_command_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="empty"):
        sandbox.exec([])


def _tree(top: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(top)): path.read_bytes() if path.is_file() else None for path in top.rglob("*")
    } | {"run.sh mode": bytes([os.stat(top / "run.sh").st_mode & 0o111])}


def test_a_command_that_cannot_be_started_is_an_error_and_no_end_of_all_starts() -> None:
    def end_of(*command: str) -> int:
        with open(os.devnull, "wb") as errors:
            return spawn([*command], environment={}, descriptors=(), errors=errors.fileno()).wait()

    with ThreadPoolExecutor(1) as waiting:
        with pytest.raises(ValueError, match="null byte"):
            waiting.submit(end_of, "a\0b").result(timeout=10)
        assert waiting.submit(end_of, "/bin/true").result(timeout=10) == 0
