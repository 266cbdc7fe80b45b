"""The docker backend against the API as its reference has it, and against an engine where there is one."""

import io
import json
import os
import resource
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, RllmError, SandboxError
from rllm.sandbox import Limits, Root, Sandbox, Status, open_sandbox
from rllm.sandbox.docker_api import engine
from rllm.sandbox.types import MOST, Scope

LIMITS = Limits(wall_s=20, cpu_s=4, memory_mb=128, output_kb=2, disk_mb=8, processes=16)


@pytest.fixture
def fake(fake_docker: Any) -> Any:
    return fake_docker


@pytest.fixture
def box(fake: Any) -> Iterator[Sandbox]:
    with open_sandbox("docker", limits=LIMITS) as opened:
        yield opened


def test_the_container_has_walls_and_limits(box: Sandbox, fake: Any) -> None:
    (made,) = fake.containers.values()
    host = made.body["HostConfig"]
    assert (host["NetworkMode"], host["CapDrop"], host["ReadonlyRootfs"]) == ("none", ["ALL"], True)
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["Memory"] == host["MemorySwap"] == 128 * 2**20
    assert host["PidsLimit"] == 19
    assert "size=8192k" in host["Tmpfs"]["/box"]
    assert (made.body["OpenStdin"], made.body["StdinOnce"], host["AutoRemove"]) == (True, True, True)
    assert made.running


def test_a_command_is_not_root_and_its_streams_are_told_apart(box: Sandbox, fake: Any) -> None:
    fake.on("hello", stdout=b"out" * 500, stderr=b"err", exit_code=3, echoes_stdin=True)
    ended = box.exec(["echo", "hello"], stdin="typed", env={"A": "b"})
    assert (ended.status, ended.exit_code, ended.stderr) == (Status.ERROR, 3, "err")
    assert ended.stdout == "out" * 500 + "typed"
    asked = [body for _, path, body in fake.calls if path.endswith("/exec")][-2]  # the last ends what is left
    assert (asked["User"], asked["WorkingDir"]) == ("1000:1000", "/box")
    assert "A=b" in asked["Env"]
    assert asked["Cmd"][-2:] == ["echo", "hello"]
    assert "ulimit -S -t 4;" in asked["Cmd"][2]
    assert "ulimit -d 131072;" in asked["Cmd"][2]


def test_a_disk_of_any_size_can_be_written_and_read(fake: Any) -> None:
    fake.on("exec cat --", stdout=b"text")
    with open_sandbox("docker", limits=replace(LIMITS, disk_mb=MOST), root=Root(folders=("/app",))) as large:
        large.write("/app/file", "text")
        assert large.read("/app/file") == b"text"


def test_every_program_is_followed_by_the_end_of_what_it_left(box: Sandbox, fake: Any) -> None:
    box.exec("sleep 9 &")
    assert fake.commands()[-1] == ["/bin/sh", "-c", "kill -9 -1"]


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        ({}, Status.OK, 0),
        ({"exit_code": 137}, Status.KILLED, -9),
        ({"exit_code": 139}, Status.CRASHED, -11),
        ({"exit_code": 152}, Status.TIMEOUT, None),
        ({"stdout": b"x" * 5000}, Status.OUTPUT_LIMIT, None),
        ({"hangs": True}, Status.TIMEOUT, None),
    ],
)
def test_ends_have_their_words(
    box: Sandbox, fake: Any, answer: dict[str, Any], status: Status, code: int | None
) -> None:
    fake.on("program", **answer)
    ended = box.exec(["program"], limits=replace(LIMITS, wall_s=0.5) if answer.get("hangs") else None)
    assert (ended.status, ended.exit_code) == (status, code)
    assert ended.truncated == (status is Status.OUTPUT_LIMIT)


def test_a_kill_by_the_kernel_for_memory_is_told_from_others(box: Sandbox, fake: Any) -> None:
    fake.on("memory.events", stdout=b"low 0\noom 1\noom_kill 1\n")
    fake.on("program", exit_code=137)
    assert box.exec(["program"]).status is Status.OUT_OF_MEMORY
    assert box.exec(["program"]).status is Status.KILLED


def test_other_limits_are_given_to_the_container(box: Sandbox, fake: Any) -> None:
    box.exec("true", limits=Limits(memory_mb=256, processes=5))
    update = next(body for _, path, body in fake.calls if path.endswith("/update"))
    assert update == {"Memory": 256 * 2**20, "MemorySwap": 256 * 2**20, "PidsLimit": 8}


def test_files_go_through_programs_inside(box: Sandbox, fake: Any, tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, kind in (
            (".", tarfile.DIRTYPE),
            ("./f", tarfile.REGTYPE),
            ("./l", tarfile.SYMTYPE),
            ("../up", tarfile.REGTYPE),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd" * (kind == tarfile.SYMTYPE)
            tar.addfile(entry)
    fake.on("tar -cf", stdout=archive.getvalue())
    fake.on("exec cat --", stdout=b"\0content")
    box.write("a/b", b"\1\2")
    assert fake.stdin["/box/a/b"] == b"\1\2"
    assert box.read("a/b") == b"\0content"
    assert box.download("out", tmp_path / "out") == ["../up", "./l"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["f"]
    assert not (tmp_path / "up").exists()


def test_a_process_with_a_thousand_open_files_can_run_programs(box: Sandbox, fake: Any) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("this process may not open so many")
    fake.on("hello", stdout=b"out")
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert box.exec(["echo", "hello"]).stdout == "out"
    finally:
        for each in files:
            os.close(each)


def archive_of_names() -> bytes:
    """A file of two names, a link of two names, and a second name of nothing: as a container may have it."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, kind, target in (
            ("./a/f", tarfile.REGTYPE, ""),
            ("./a/g", tarfile.LNKTYPE, "./a/f"),
            ("./a/l", tarfile.SYMTYPE, "/nowhere"),
            ("./a/m", tarfile.LNKTYPE, "./a/l"),
            ("./a/n", tarfile.LNKTYPE, "./a/none"),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, target, 7 * (kind == tarfile.REGTYPE)
            tar.addfile(entry, io.BytesIO(b"content"))
    return archive.getvalue()


def test_a_download_has_a_file_under_each_of_its_names(box: Sandbox, fake: Any, tmp_path: Path) -> None:
    fake.on("tar -cf", stdout=archive_of_names())
    assert box.download("out", tmp_path / "out") == ["./a/l", "./a/m", "./a/n"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out/a").iterdir()} == {
        "f": b"content",
        "g": b"content",
    }


def test_a_snapshot_has_a_file_under_each_of_its_names(fake: Any) -> None:
    fake.on("ls -A", stdout=b"a\n")
    fake.on("tar -cf", stdout=archive_of_names())
    with open_sandbox("docker", limits=LIMITS, root=Root(folders=("/a",))) as box:
        kept = box.snapshot(Scope(link_homes=("/usr",)))
    assert kept.left_out == ("./a/l", "./a/m", "./a/n")
    with tarfile.open(fileobj=io.BytesIO(kept.tar)) as tar:
        assert [(each.name, each.size) for each in tar] == [("./a/f", 7), ("./a/g", 7)]


def test_what_a_file_script_refuses_is_an_os_error(box: Sandbox, fake: Any) -> None:
    fake.on("link", exit_code=10)
    fake.on("gone", exit_code=12)
    with pytest.raises(OSError, match="link"):
        box.read("link")
    with pytest.raises(FileNotFoundError):
        box.read("gone")


def test_an_engine_that_does_not_hold_a_container_to_its_limits_is_refused(fake: Any) -> None:
    fake.holds_limits = False
    with pytest.raises(SandboxError, match="limits"):
        open_sandbox("docker")
    assert fake.containers == {}


def test_an_image_whose_shell_sets_no_limits_is_refused(fake: Any) -> None:
    fake.on("ulimit", stderr=b"ulimit: too many arguments")
    with pytest.raises(SandboxError, match="limits: ulimit: too many arguments"):
        open_sandbox("docker")


def test_a_missing_image_says_how_to_get_it(fake: Any) -> None:
    with pytest.raises(ConfigError, match="docker pull nobody/nothing"):
        open_sandbox("docker", image="nobody/nothing")
    assert fake.containers == {}


def test_a_dead_owner_s_containers_are_removed_and_others_stay(fake: Any) -> None:
    with open_sandbox("docker", limits=LIMITS):
        (mine,) = fake.containers.values()
        owner = json.loads(mine.body["Labels"]["rllm.sandbox.owner"])
        for key, change in (("dead", {"started": "1"}), ("elsewhere", {"started": "1", "boot": "other"})):
            labels = {"rllm.sandbox.owner": json.dumps(owner | change)}
            fake.containers[key] = type(mine)(body={"Labels": labels})
        with open_sandbox("docker", limits=LIMITS):
            assert "dead" not in fake.containers
            assert "elsewhere" in fake.containers


def test_closing_removes_the_container(fake: Any) -> None:
    box = open_sandbox("docker", limits=LIMITS)
    assert box.is_alive
    box.close()
    box.close()
    assert (fake.containers, box.is_alive) == ({}, False)


def test_an_engine_that_goes_away_is_the_sandbox_s_failure(fake: Any) -> None:
    box = open_sandbox("docker", limits=LIMITS)
    fake.path.unlink()
    with pytest.raises(SandboxError, match="did not answer"):
        box.exec("true")
    with pytest.raises(SandboxError, match="did not answer"):
        box.close()
    box.close()


def test_no_engine_is_an_error_that_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(ConfigError, match=r"docs\.docker\.com/engine/install"):
        open_sandbox("docker")
    monkeypatch.setenv("DOCKER_HOST", "tcp://1.2.3.4:2375")
    with pytest.raises(ConfigError, match="unix"):
        open_sandbox("docker")


def test_a_real_engine_runs_a_program_and_keeps_nothing() -> None:
    try:
        engine()
        box = open_sandbox("docker", limits=Limits(wall_s=30))
    except RllmError as error:
        pytest.skip(f"docker: {error}")
    with box:
        box.write("in/file", "1")
        ended = box.exec("cat in/file; id -u; sleep 99 & exit 4")
        assert (ended.stdout, ended.exit_code) == ("11000\n", 4)
        assert box.read("in/file") == b"1"
        assert box.exec("sleep 60", limits=Limits(wall_s=2)).status is Status.TIMEOUT
        assert "sleep" not in box.exec("cat /proc/[0-9]*/cmdline").stdout


def test_a_real_engine_holds_programs_to_their_limits() -> None:
    """Memory, processes, processor time and size of files: each is seen to bite."""
    limits = Limits(wall_s=20, cpu_s=2, memory_mb=128, disk_mb=8, processes=16)
    try:
        engine()
        box = open_sandbox("docker", limits=limits, root=Root(folders=("/app",)))
    except RllmError as error:
        pytest.skip(f"docker: {error}")
    with box:
        held = box.exec(["python3", "-c", FOUR_TIMES_60_MB])
        assert held.status is not Status.OK or "9" in held.stdout, "240 MB were held in 128"
        assert box.exec("while :; do :; done").status is Status.TIMEOUT
        assert box.exec("head -c 20M /dev/zero > /app/f").status is not Status.OK
        assert box.exec("echo x > /app/g; cat /app/g").stdout == "x\n"
        crowd = box.exec("for i in $(seq 40); do sleep 1 & done; echo all")
        assert (crowd.status, crowd.stdout) != (Status.OK, "all\n")


FOUR_TIMES_60_MB = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(60 << 20)
        time.sleep(1)
        os._exit(0)
print([os.wait()[1] for _ in range(4)])
"""
