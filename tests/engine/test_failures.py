"""One bad answer of a user's class fails one episode, with its cause and place; only a budget ends a run."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm.engine.failures import MAX_INITIAL_FAILURES, WINDOW, FailureBudget
from rllm.errors import MAX_SHOWN_CHARS, AgentError, ConfigError, InferenceError, RewardError, RllmError
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.workflows.workflow import Workflow

sys.path.insert(0, str(Path(__file__).parent))
from bad_tasks import (
    BAD,
    NAN,
    Agent,
    agent_engine,
    play,
    program_engine,
    raises,
    tasks,
    workflow_engine,
)


def add_step(agent: Agent) -> None:
    agent.trajectory.steps.append(Step())


def returned(step: Any) -> dict[str, Any]:
    return {"env": {"on_step": lambda: step}}


BROKEN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "reward None": (
        lambda: agent_engine(**returned(("o", None, True, {}))),
        "environment",
        "Env.step returned None",
    ),
    "reward NaN": (
        lambda: agent_engine(**returned(("o", NAN, True, {}))),
        "environment",
        "Env.step returned nan",
    ),
    "reward inf": (lambda: agent_engine(**returned(("o", 1e999, True, {}))), "environment", "inf"),
    "reward text": (lambda: agent_engine(**returned(("o", "1", True, {}))), "environment", "'1' (a str)"),
    "no tuple": (lambda: agent_engine(**returned(None)), "environment", "Env.step returned None"),
    "done": (lambda: agent_engine(**returned(("o", 1.0, "yes", {}))), "environment", "`done`"),
    "info": (lambda: agent_engine(**returned(("o", 1.0, True, None))), "environment", "`info`"),
    "observation": (lambda: agent_engine(**returned((NAN, 1.0, False, {}))), "environment", "observation"),
    "reset": (lambda: agent_engine({"on_reset": lambda: "o"}), "environment", "Env.reset returned 'o'"),
    "task": (
        lambda: agent_engine({"on_make": raises(ConfigError("no such key"))}),
        "environment",
        "no such key",
    ),
    "two steps": (lambda: agent_engine(agent={"on_answer": add_step}), "agent", "added 2 steps"),
    "workflow returns": (lambda: workflow_engine(lambda flow: 3), "workflow", "Bad.run returned 3 (a int)"),
    "workflow raises": (lambda: workflow_engine(raises_in(RewardError("nan"))), "workflow", "nan"),
    "workflow's trajectory": (
        lambda: workflow_engine(lambda flow: Episode(trajectories=[{"steps": []}])),  # type: ignore[list-item]
        "workflow",
        "trajectory 0 is {'steps': []} (a dict)",
    ),
    "workflow's steps": (
        lambda: workflow_engine(lambda flow: Episode(trajectories=[Trajectory(steps=["x"])])),  # type: ignore[list-item]
        "workflow",
        "step 0 is 'x'",
    ),
    "workflow's reward": (
        lambda: workflow_engine(lambda flow: Episode(trajectories=[Trajectory(reward=NAN)])),
        "workflow",
        "nan",
    ),
    "program returns": (lambda: program_engine(lambda: 3), "program", "solve returned 3 (a int)"),
    "program raises": (lambda: program_engine(raises(ConfigError("no key"))), "program", "no key"),
    "program's trajectory": (
        lambda: program_engine(lambda: Episode(trajectories=[{"steps": []}])),  # type: ignore[list-item]
        "program",
        "trajectory 0 is {'steps': []} (a dict)",
    ),
    "judgement": (lambda: program_engine(lambda: None, lambda: NAN), "evaluator", "score returned nan"),
    "judge raises": (
        lambda: program_engine(lambda: None, raises(KeyError("x"))),
        "evaluator",
        "bad_tasks.py",
    ),
    "judge exits": (lambda: program_engine(lambda: None, raises(SystemExit(1))), "evaluator", "SystemExit"),
}


def raises_in(error: BaseException) -> Callable[[Workflow], Any]:
    def raising(flow: Workflow) -> Any:
        raise error

    return raising


async def test_one_broken_contract_fails_one_episode_and_says_where() -> None:
    for name, (make, place, words) in BROKEN.items():
        engine = make()
        episodes = await play(engine, tasks(12))
        bad = episodes.pop(BAD)
        assert bad.outcome is Outcome.INFRASTRUCTURE_FAILURE, name
        assert (bad.is_correct, [each.reward for each in bad.trajectories if each.reward is not None]) == (
            False,
            [],
        ), name
        record = bad.info.get("error") or bad.trajectories[0].info["error"]
        assert record["place"] == place, name
        assert words in record["message"], (name, record)
        assert {each.outcome for each in episodes.values()} == {Outcome.SCORED}, name
        assert len(episodes) == 11
        assert bad.info["tries"] == 1, "what broke a contract would break it again"
        if hasattr(engine, "gateway"):
            assert [each.is_closed for each in engine.gateway.sessions] == [True] * 12, name
        engine.counts.check()


async def test_a_run_whose_first_episodes_all_break_a_contract_ends_with_that_error() -> None:
    for name, (make, _, words) in BROKEN.items():
        engine = make()
        with pytest.raises(RllmError) as raised:
            await play(engine, tasks(100, bad=lambda number: True))
        assert words in str(raised.value), name
        assert any("All 8 episodes so far failed" in note for note in raised.value.__notes__), name
        settled = engine.counts.settled - engine.counts.by_outcome[Outcome.CANCELLED]
        assert settled < 2 * MAX_INITIAL_FAILURES, name
        assert engine.counts.in_flight == 0
        with pytest.raises(RllmError):  # a run of one episode is as clear
            await play(make(), tasks(1, bad=lambda number: True))


async def test_the_first_failure_ends_a_strict_run() -> None:
    for name, (make, _, words) in BROKEN.items():
        engine = make()
        engine.failures.max_failed_fraction = 0.0
        with pytest.raises(RllmError) as raised:
            await play(engine, tasks(12))
        assert words in str(raised.value), name
        assert "Episode t3:0 failed" in raised.value.__notes__[-1]
    strict = agent_engine({"on_step": raises(KeyError("x"))}, max_failed_fraction=0.0, retry_limit=1)
    with pytest.raises(AgentError, match=r"t3:0 .*KeyError: 'x' \(Env.step .*KeyError\)"):
        await play(strict, tasks(12))


async def test_a_budget_ends_a_run_in_which_too_much_fails() -> None:
    """Counted over the latest attempts, so that neither a small batch nor a bad beginning decides alone."""
    late = tasks(200, bad=lambda number: number >= 40)
    for does, error in [(raises(KeyError("x")), InferenceError), (lambda: None, AgentError)]:
        engine = agent_engine({"on_step": does}, max_failed_fraction=0.25, retry_limit=1)
        with pytest.raises(error, match=r"`max_failed_fraction` is 0.25 of 200; .*(KeyError|None)"):
            await play(engine, late)
        failed = engine.counts.by_outcome[Outcome.INFRASTRUCTURE_FAILURE]
        assert 50 <= failed <= 50 + engine.num_parallel
    for fraction, bad in [(0.25, lambda number: number % 5 == 1), (1.0, lambda number: number > 1)]:
        engine = agent_engine({"on_step": lambda: None}, max_failed_fraction=fraction)
        episodes = await play(engine, tasks(3 * WINDOW, bad))
        assert len(episodes) == 3 * WINDOW


async def test_small_batches_add_up() -> None:
    """Three of four fail in every batch: no batch is large enough to say so alone."""
    engine = agent_engine({"on_step": lambda: None}, max_failed_fraction=0.5)

    async def batches() -> None:
        for _ in range(WINDOW):
            await play(engine, tasks(4, bad=lambda number: number > 0))

    with pytest.raises(AgentError, match="max_failed_fraction"):
        await batches()
    assert engine.counts.settled <= WINDOW


async def test_what_the_policy_fails_at_is_no_matter_of_the_budget() -> None:
    def stumble(agent: Agent) -> None:
        raise ValueError("cannot read this")

    engine = agent_engine(agent={"on_answer": stumble}, max_failed_fraction=0.0)
    episodes = await play(engine, tasks(20, bad=lambda number: True))
    assert {each.outcome for each in episodes.values()} == {Outcome.POLICY_FAILURE}


@pytest.mark.parametrize("fraction", [-0.1, 1.1, NAN])
def test_a_budget_is_a_share(fraction: float) -> None:
    with pytest.raises(ConfigError, match="`max_failed_fraction` is"):
        agent_engine(max_failed_fraction=fraction)


async def test_a_page_long_message_is_bounded_on_record() -> None:
    page = "x" * 5_000_000
    for engine in (
        agent_engine({"on_step": raises(ValueError(page))}, retry_limit=1),
        agent_engine(agent={"on_answer": lambda agent: raises(ValueError(page))()}),
        workflow_engine(raises_in(ValueError(page))),
        workflow_engine(lambda flow: page),
        program_engine(raises(ValueError(page))),
        program_engine(lambda: page),
        program_engine(lambda: None, raises(ValueError(page))),
    ):
        bad = (await play(engine, tasks(12)))[BAD]
        record = bad.info.get("error") or bad.trajectories[0].info["error"]
        assert len(record["message"]) < MAX_SHOWN_CHARS + 100
        assert sys.getsizeof(str(bad.to_dict())) < 200_000
        assert "xxx" in record["message"]


def test_each_kind_of_failure_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    budget = FailureBudget(1.0)
    failed = Episode(task_id="t", outcome=Outcome.INFRASTRUCTURE_FAILURE)
    for error in (OSError("the disk is full"), OSError("the disk is full"), InferenceError("no server")):
        budget.settle(failed, error, num_attempts=64)
    budget.settle(Episode(task_id="t", outcome=Outcome.SCORED), None, num_attempts=64)
    disk, server = (record.getMessage() for record in caplog.records)
    assert disk == f"Episode {failed.id} failed and is left out: OSError: the disk is full"
    assert server.endswith("InferenceError: no server")
