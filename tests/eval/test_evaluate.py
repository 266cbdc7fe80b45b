import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.eval.evaluate import evaluate, report_on
from rllm.eval.report import EvaluationReport
from rllm.eval.statistics import wilson_interval
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.messages import Message, SamplingParams

_NUMBERS = itertools.count()


def _episode(outcome: Outcome, reward: float | None, turns: int = 1) -> Episode:
    return Episode(
        task_id=str(next(_NUMBERS)),
        trajectories=[Trajectory(reward=reward, steps=[Step() for _ in range(turns)])],
        outcome=outcome,
        is_correct=outcome is Outcome.SCORED and bool(reward),
    )


def test_a_report_keeps_failures_in_the_denominator_and_says_what_leaving_them_out_would_give() -> None:
    report = report_on(
        [
            _episode(Outcome.SCORED, 1.0, turns=4),
            _episode(Outcome.SCORED, 0.0, turns=2),
            _episode(Outcome.TRUNCATED, 0.5, turns=8),
            _episode(Outcome.INFRASTRUCTURE_FAILURE, None),
            _episode(Outcome.POLICY_FAILURE, None),
        ]
    )
    assert (report.attempted, report.scored, report.truncated, report.failed) == (5, 2, 1, 2)
    assert (report.successes, report.success, report.success_without_failed) == (1, 0.2, 1 / 3)
    assert report.mean_reward == 0.5
    assert report.mean_turns == 3.2
    assert report.success_without_failed_interval == wilson_interval(1, 3)
    assert report.success_interval == wilson_interval(1, 5)


def test_a_report_of_failures_alone_has_no_reward_to_speak_of() -> None:
    report = report_on([_episode(Outcome.INFRASTRUCTURE_FAILURE, None)])
    assert (report.success, report.success_without_failed, report.mean_reward) == (0.0, None, None)
    assert report_on([]).attempted == 0
    assert report_on([]).success_interval == (0.0, 1.0)


@given(st.lists(st.sampled_from(list(Outcome)), max_size=30))
def test_whatever_happened_the_counts_of_a_report_add_up(outcomes: list[Outcome]) -> None:
    report = report_on([_episode(outcome, 1.0) for outcome in outcomes])
    assert report.attempted == report.scored + report.truncated + report.failed == len(outcomes)
    low, high = report.success_interval
    assert 0.0 <= low <= report.success <= high <= 1.0
    assert EvaluationReport(**report.to_dict()) == report


@pytest.mark.parametrize(
    ("successes", "attempts", "low", "high"),
    [  # Newcombe 1998, table I, method 3, and the ends
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_the_interval_is_wilsons(successes: int, attempts: int, low: float, high: float) -> None:
    assert wilson_interval(successes, attempts) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500), st.data())
def test_the_ends_of_the_interval_are_where_the_score_test_turns(attempts: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(1, attempts))
    share = successes / attempts
    for end in wilson_interval(successes, attempts):
        if end not in (0.0, 1.0):
            z = abs(share - end) / math.sqrt(end * (1 - end) / attempts)
            assert z == pytest.approx(1.959963984540054, rel=1e-6)


async def test_every_task_is_attempted_once_and_comes_back_in_its_place() -> None:
    def answer(messages: Sequence[Message]) -> str:
        return "Right" if len(messages) == 2 else "Down"

    engine = AgentExecutionEngine(
        FrozenLakeAgent, FrozenLakeEnv, rollout_engine=ScriptedClient(answer), max_steps=2
    )
    maps = [["SF", "HG"], ["SH", "FG"], ["SF", "HG"]]
    tasks = [{"task_id": f"lake-{index}", "desc": desc} for index, desc in enumerate(maps)]
    heard: list[str] = []
    report, episodes = await evaluate(
        engine, tasks, SamplingParams(), "test", on_episode=lambda episode: heard.append(episode.task_id)
    )
    assert [episode.task_id for episode in episodes] == ["lake-0", "lake-1", "lake-2"]
    assert sorted(heard) == ["lake-0", "lake-1", "lake-2"]
    assert (report.attempted, report.successes) == (3, 2)
