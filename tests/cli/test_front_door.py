import errno
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

from rllm.cli.command import Group
from rllm.cli.main import COMMANDS, FrontDoor, exit_code_of, rllm
from rllm.errors import CanaryError, ModelDirectoryError, RunInUseError, StorageError

Rllm = Callable[..., Result]


def commands(group: click.Group = rllm, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that does something."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_has_help_with_an_example_and_json(words: tuple[str, ...], rllm: Rllm) -> None:
    result = rllm(*words, "--help")
    assert result.exit_code == 0
    assert f"rllm {' '.join(words)}" in result.stdout.partition("Example:")[2]
    assert "--json" in result.stdout


def test_the_line_of_help_at_the_front_door_is_the_one_of_the_command(subtests: pytest.Subtests) -> None:
    for name in COMMANDS:
        with subtests.test(name=name):
            command = rllm.get_command(click.Context(rllm), name)
            assert command is not None
            assert (command.help or "").partition("\n")[0] == COMMANDS[name][1]
            assert command.name == name


def test_help_lists_the_commands_in_the_order_of_use(rllm: Rllm) -> None:
    listed = rllm("--help").stdout.partition("Commands:")[2]
    assert [listed.index(f"  {name} ") for name in COMMANDS] == sorted(
        listed.index(f"  {name} ") for name in COMMANDS
    )


def test_the_version_is_printed(rllm: Rllm) -> None:
    assert rllm("--version").stdout.startswith("rllm ")


@pytest.mark.parametrize("words", [(), ("runs",), ("model",)], ids=["rllm", "runs", "model"])
def test_a_group_without_a_command_shows_its_help_as_bad_usage(words: tuple[str, ...], rllm: Rllm) -> None:
    result = rllm(*words)
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("trian", "frozenlake"), "`rllm train`"),
        (("runs", "shwo"), "`rllm runs show`"),
        (("model", "inof"), "`rllm model info`"),
    ],
)
def test_a_misspelt_command_is_answered_with_the_nearest(
    words: tuple[str, ...], meant: str, rllm: Rllm
) -> None:
    result = rllm(*words)
    assert result.exit_code == 2
    assert f"did you mean {meant}?" in result.stderr
    assert result.stdout == ""


def test_a_command_like_no_other_is_answered_with_all(rllm: Rllm) -> None:
    assert f"there are: {', '.join(COMMANDS)}." in rllm("zzzz").stderr


def test_an_unknown_option_is_bad_usage(rllm: Rllm) -> None:
    result = rllm("eval", "frozenlake", "--modle", "x")
    assert result.exit_code == 2
    assert "--model" in result.stderr
    assert "rllm eval --help" in result.stderr


def test_with_json_an_error_is_one_json_object_on_stderr(rllm: Rllm) -> None:
    result = rllm("eval", "frozenlaek", "--model", "x", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    error = json.loads(result.stderr)["error"]
    assert error["type"] == "ConfigError"
    assert "did you mean `frozenlake`?" in error["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunInUseError("held"), 2),
        (StorageError("full"), 2),
        (CanaryError("stale"), 1),
        (click.UsageError("which?"), 2),
        (click.Abort(), 130),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_the_exit_code_follows_from_the_error(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert exit_code_of(fail, as_json=False) == code
    printed = capsys.readouterr()
    assert printed.err.startswith("error: " if code < 130 else "Interrupted.")
    assert printed.out == ""


def test_a_missing_extra_is_answered_with_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'safetensors.torch'", name="safetensors.torch")

    exit_code_of(fail, as_json=False)
    assert "pip install 'rllm[train]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        (MemoryError(), "There is no memory left"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
            "memory",
        ),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (OSError(errno.EMFILE, "Too many open files", "/x/y"), "ulimit -n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y could not be written"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "/x/y is closed to you"),
        (PermissionError(errno.EPERM, "Operation not permitted", "/x/y"), "/x/y is closed to you"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/x/y"), "/x/y cannot be"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "/x/y"), "/x/y cannot be"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/x/y"), "/x/y cannot be"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/x/.y.tmp-1", None, "/x/y"), "/x/y cannot be"),
    ],
    ids=str,
)
def test_what_the_machine_runs_out_of_is_a_sentence(
    error: Exception, mend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert exit_code_of(fail, as_json=False) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert mend in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "list", "n" * 5000),
        ("runs", "show", "n" * 5000),
        ("model", "info", "n" * 5000),
        ("model", "create", "a-file/model"),
        ("train", "n" * 5000),
        ("eval", "frozenlake", "--model", "n" * 5000),
        ("dataset", "register", "name", "n" * 5000 + ".jsonl"),
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_a_path_that_cannot_be_is_refused_in_a_sentence(
    words: tuple[str, ...], rllm: Rllm, tmp_path: Path
) -> None:
    (tmp_path / "a-file").touch()
    result = rllm(*words, "--json")
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert json.loads(result.stderr)["error"]["message"]


@pytest.mark.parametrize("place", ["absent/file.jsonl", "directory"])
@pytest.mark.parametrize(
    "words",
    [
        ("worker", "init", "name", "--out"),
        ("worker", "batch", "worker.md", "rows.jsonl", "--out"),
        ("dataset", "from-runs", ".", "--out"),
        ("dataset", "from-eval", ".", "--out"),
        ("dataset", "export", "name"),
        ("runs", "compare", ".", ".", "--picture"),
        ("view", ".", "--export"),
    ],
    ids=" ".join,
)
def test_a_file_that_no_directory_holds_is_refused_before_anything_is_read(
    words: tuple[str, ...], place: str, rllm: Rllm, tmp_path: Path
) -> None:
    (tmp_path / "directory").mkdir()
    result = rllm(*words, place, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stderr)["error"]
    assert error["type"] == "UsageError"
    assert place in error["message"]


def test_an_error_of_ours_that_a_lack_of_memory_caused_says_that(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise ModelDirectoryError("The tokenizer cannot be read: ") from error

    assert exit_code_of(fail, as_json=False) == 2
    assert "no memory" in capsys.readouterr().err


def test_what_nobody_foresaw_keeps_its_traceback() -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'my_typo'", name="my_typo")

    with pytest.raises(ModuleNotFoundError, match="my_typo"):
        exit_code_of(fail, as_json=False)
    for unforeseen in (RuntimeError("of ours"), FileNotFoundError(errno.ENOENT, "No such file", "x")):
        with pytest.raises(type(unforeseen)):
            exit_code_of(partial(_raise, unforeseen), as_json=False)


def _raise(error: Exception) -> None:
    raise error


def test_what_ends_well_or_with_its_own_code_says_so() -> None:
    assert exit_code_of(lambda: None, as_json=False) == 0
    assert exit_code_of(lambda: 1, as_json=True) == 1


def test_the_command_runs_as_a_module(
    start_rllm: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start_rllm("runs", "list", "--json", cwd=tmp_path)
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")
    assert json.loads(stdout) == {"runs": [], "unreadable": []}


def test_the_front_door_finds_its_commands_like_any_group() -> None:
    assert isinstance(rllm, FrontDoor)
    assert isinstance(rllm, Group)
    assert rllm.get_command(click.Context(rllm), "nonsense") is None


def test_python_m_rllm_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rllm", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("rllm")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_letters_of_ours_gets_them_escaped(
    encoding: str, monkeypatch: pytest.MonkeyPatch, start_rllm: Callable[..., Any], tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    process = start_rllm("model", "create", "\N{SNOWMAN}", cwd=tmp_path)
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")
    assert "\\u2603" in stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_without_standard_streams_works_and_writes_into_no_file_of_ours(
    tmp_path: Path, closed: str
) -> None:
    """A file that got the number of a closed stream would hold what anybody prints."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from rllm.cli import main as door\n"
        "sys.argv = ['rllm', '--version']\n"
        "try:\n"
        "    door.main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "with open('record', 'w') as record:\n"
        "    os.system('echo out; echo error >&2')\n"
        "    print('more', file=sys.stderr, flush=True)\n"
        "    record.write(str(record.fileno() > 2))\n"
    )
    subprocess.run(["bash", "-c", f'"{sys.executable}" program.py {closed}'], cwd=tmp_path, check=True,
                   capture_output=True)  # fmt: skip
    assert (tmp_path / "record").read_text() == "True"


@pytest.mark.parametrize(
    "words", [("dataset", "list"), ("model", "list"), ("eval", "arithmetic", "--model", "x")]
)
def test_a_home_that_is_a_file_is_refused_in_a_sentence(
    rllm: Rllm, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    Path("file").touch()
    monkeypatch.setenv("RLLM_HOME", "file/home")
    refused = rllm(*words)
    assert refused.exit_code == 2
    assert "no directory" in refused.stderr
