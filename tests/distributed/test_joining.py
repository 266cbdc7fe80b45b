"""A process is a rank of a run only where its environment says so in whole, and all of the others come."""

from collections.abc import Callable
from typing import Any

import pytest

from rllm.config.distributed import DistributedConfig
from rllm.distributed import ALONE, open_ranks, rank_from_environment, torch_ranks
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
    with pytest.raises(RankError, match="Not all ranks came within 1 s"):
        opened()


def test_a_rank_starts_no_ranks(environment: Environment) -> None:
    environment(WORLD_SIZE="2")
    with pytest.raises(ConfigError, match="leave --nproc out under torchrun"):
        require_processes(2)
    with pytest.raises(ConfigError, match="--nproc is 0"):
        require_processes(0)


def test_what_all_ranks_refuse_is_said_once(
    environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    environment()
    assert launch(["no-such-command"], 2) == 2
    assert capfd.readouterr().err.count("There is no command") == 1
