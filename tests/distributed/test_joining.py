"""A process is a rank of a run only where its environment says so in whole, and all of the others come."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from rllm.config.distributed import DistributedConfig
from rllm.distributed import ALONE, open_ranks, rank_from_environment, torch_ranks
from rllm.distributed import launch as launch_module
from rllm.distributed.launch import launch, require_processes
from rllm.errors import ConfigError, RankError

Environment = Callable[..., None]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Sets what is given of the variables that a launcher sets, and nothing else of them."""

    def set_variables(**variables: str) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def opened() -> Any:
    with open_ranks(DistributedConfig()) as ranks:
        return ranks


@pytest.mark.parametrize("variables", [{}, {"RANK": "3"}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_a_process_by_itself_has_nobody_to_wait_for(
    environment: Environment, variables: dict[str, str]
) -> None:
    environment(**variables)
    assert opened() is ALONE
    assert rank_from_environment() == 0
    assert ALONE.is_writer
    assert ALONE.gather("me") == ["me"]
    assert ALONE.share([1, 2, 3]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    ],
)
def test_an_environment_that_is_set_by_halves_is_refused(
    environment: Environment, variables: dict[str, str], why: str
) -> None:
    environment(**variables)
    with pytest.raises(ConfigError, match=why):
        opened()


def test_ranks_that_never_come_are_not_waited_for_without_end(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_ranks, "START_S", 1.0)
    environment(WORLD_SIZE="2", RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    with pytest.raises(RankError, match=r"ranks.* 1 s"):
        opened()


@pytest.mark.parametrize("when", ["while it imports", "while it waits for others"])
def test_a_rank_whose_starter_is_killed_ends_as_well(tmp_path: Path, when: str) -> None:
    """Also one that has never seen its starter."""
    rank = (
        "from rllm.config.distributed import DistributedConfig\n"
        "from rllm.distributed import open_ranks\n"
        "print('here', flush=True)\n"
        "with open_ranks(DistributedConfig()): pass\n"
    )
    starter = (
        "import os, subprocess, sys, time\n"
        "os.environ['RLLM_RANK_STARTED_BY'] = str(os.getpid())\n"
        "print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", starter, rank],
            env={**os.environ, **place},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    process_of_rank = psutil.Process(int(process.stdout.readline()))
    if when == "while it waits for others":
        assert process.stdout.readline() == "here\n"
    process.kill()
    assert psutil.wait_procs([process_of_rank], timeout=900.0)[1] == []
    process.communicate()
    assert re.search(r"process that started .* gone", (tmp_path / "errors").read_text())


def test_sigterm_before_there_are_ranks_ends_the_command_and_what_it_has_begun(
    environment: Environment, tmp_path: Path
) -> None:
    environment()
    ended = list[str]()

    @contextmanager
    def start(words: Sequence[str], outputs: Sequence[IO[bytes] | None]) -> Iterator[Any]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            yield []
        finally:
            ended.append("all of them")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        launch(["train"], 2, tmp_path, start=start)
    assert stopped.value.code == 130
    assert ended == ["all of them"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_rank_starts_no_ranks(environment: Environment) -> None:
    environment(WORLD_SIZE="2")
    with pytest.raises(ConfigError, match=r"--nproc.*torchrun"):
        require_processes(2)
    with pytest.raises(ConfigError, match="--nproc is 0"):
        require_processes(0)


def test_what_all_ranks_refuse_is_said_once(
    environment: Environment, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    environment()
    assert launch(["no-such-command"], 2, tmp_path) == 2
    assert capfd.readouterr().err.count("There is no command") == 1
    assert not list(tmp_path.iterdir()), "there is no run to keep what was printed"


def test_all_ranks_start_again_where_one_was_killed_and_as_often_as_they_may(
    environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    environment()
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n[ $RANK = 1 ] || exit 0\necho >> $STARTS\n[ $(wc -l < $STARTS) -gt 2 ] || kill -9 $$\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for restarts, code in ((0, 1), (1, 1), (2, 0)):
        starts = tmp_path / f"starts-{restarts}"
        monkeypatch.setenv("STARTS", str(starts))
        assert launch(["train"], 2, tmp_path / "run", restarts=restarts) == code
        assert starts.read_text().count("\n") == restarts + 1
        assert capfd.readouterr().err.count("All 2 ranks start again") == restarts


def test_restarts_are_refused_where_nobody_would_start_anything(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLLM_NPROC", raising=False)
    for variables, why in (
        ({}, "there is one process, which nobody starts again"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "give --max-restarts to torchrun"),
    ):
        environment(**variables)
        with pytest.raises(ConfigError, match=why), open_ranks(DistributedConfig(restarts=1)):
            pass


def test_what_other_ranks_print_stays_in_the_run_without_keys(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment()
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "print(os.environ['RANK'], os.environ['SOME_API_KEY'], 'ö', file=sys.stderr)\n"
        "print('the end', end='', file=sys.stderr)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789abcdef")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    for times in (1, 2):
        assert launch(["--version"], 3, run) == 0
        for rank in (1, 2):
            text = (run / f"rank-{rank}.log").read_text()
            assert text.count(f"{rank} ") == text.count("ö") == text.count("the end") == times
            assert "0123456789abcdef" not in text
    assert not (run / "rank-0.log").exists(), "rank 0 has the terminal"


def test_no_line_of_a_rank_is_lost_while_others_look_at_what_it_prints(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment()
    monkeypatch.setattr(launch_module, "POLL_S", 0.0)
    python, run = tmp_path / "python", tmp_path / "run"
    python.write_text(
        "#!/bin/sh\n[ $RANK = 1 ] || exit 0\ni=0\nwhile [ $i -lt 20000 ]; do i=$((i+1)); echo $i; done\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    run.mkdir()
    (run / "config.json").write_text("{}")
    assert launch(["train"], 2, run) == 0
    assert (run / "rank-1.log").read_text().split() == [str(number) for number in range(1, 20_001)]
