"""A shell in a sandbox: what stays from call to call, and what does not."""

from collections.abc import Iterator

import pytest

from rllm.errors import ConfigError
from rllm.sandbox import Limits, open_sandbox
from rllm.tools import tool_named
from rllm.tools.shell import Shell


@pytest.fixture
def shell(backend: str) -> Iterator[Shell]:
    tool = Shell(backend, limits=Limits(wall_s=20.0))
    yield tool
    tool.close()


def test_files_the_directory_and_exported_variables_stay(shell: Shell) -> None:
    shell(command="mkdir -p a/b && cd a/b\nexport X='1 2\n3' Y=é\nZ=unseen\necho hi > f")
    assert shell(command='pwd; cat f; echo "$X$Y$Z"').text == f"{shell.sandbox.workdir}/a/b\nhi\n1 2\n3é"
    shell(command="cd /; rm -r ~/a; unset X")
    assert shell(command='pwd; echo "[$X]"').text == "/\n[]"


def test_a_directory_that_is_gone_is_left_for_home(shell: Shell) -> None:
    shell(command="mkdir d; cd d; rmdir ../d")
    assert shell(command="pwd").text == shell.sandbox.workdir


def test_output_of_both_kinds_comes_in_its_order_with_the_exit_code(shell: Shell) -> None:
    assert shell(command="echo a; echo b >&2; echo c; exit 3").text == "a\nb\nc\n[exit code 3]"
    assert shell(command="false").text == "[exit code 1]"
    assert shell(command="true").text == "(no output)"
    assert shell(command="printf 'no end'").text == "no end"
    assert "syntax error" in shell(command="if").text


def test_a_command_that_takes_too_long_is_stopped_and_the_shell_goes_on(backend: str) -> None:
    shell = Shell(backend, limits=Limits(wall_s=2.0))
    shell(command="cd /tmp; export X=1")
    output = shell(command="echo begun; cd /; sleep 60")
    assert output.text.startswith("begun\nError: Stopped: it ran longer than 2 s")
    assert shell(command="pwd; echo $X").text == "/tmp\n1"
    shell.close()


def test_what_is_left_in_the_background_ends_with_the_call(shell: Shell) -> None:
    assert shell(command="sleep 77 & echo begun").text == "begun"
    assert "sleep 77" not in shell(command="cat /proc/[0-9]*/cmdline | tr '\\0' ' '").text.replace("tr", "")


def test_a_command_that_would_spoil_the_session_does_not(shell: Shell) -> None:
    shell(command="trap - EXIT; cd /")
    assert shell(command="pwd").text == shell.sandbox.workdir
    shell(command="exec 1>&-; cd /tmp")
    shell(command="yes | head -c 3000000")
    assert shell(command="echo fine").text == "fine"


@pytest.mark.parametrize("command", ["", " \n", "echo \0"])
def test_an_empty_command_is_refused(shell: Shell, command: str) -> None:
    assert "empty" in str(shell(command=command).error)


def test_a_command_that_is_too_long_is_refused(shell: Shell) -> None:
    assert "at most 100,000" in str(shell(command="x" * 100_001).error)


def test_a_sandbox_of_ones_own_is_used_and_stays_open(backend: str) -> None:
    with open_sandbox(backend) as sandbox:
        tool = Shell(sandbox=sandbox)
        assert tool(command="echo hi | tee f").text == "hi"
        tool.close()
        assert sandbox.read("f") == b"hi\n"


def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no-such-backend"):
        tool_named("shell", backend="no-such-backend")


@pytest.mark.parametrize("name", ["shell", "python"])
def test_a_backend_without_walls_is_refused_to_root_and_warned_of(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(ConfigError, match=r"root.*allow_root=True"):
        tool_named(name, backend="subprocess")
    assert not caplog.records
    tool_named(name, backend="subprocess", allow_root=True).close()
    assert "whatever root can" in caplog.text
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    caplog.clear()
    tool_named(name, backend="subprocess").close()
    assert "UNSAFE" in caplog.text
    assert "whatever you can" in caplog.text
