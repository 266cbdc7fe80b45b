"""Attempts on their way: how many there are, which are wanted, how old they are, which failures are told."""

import gc
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rllm.engine.agent_workflow import AgentWorkflowEngine, _client
from rllm.engine.attempt_state import Vitals, live_of
from rllm.engine.attempts import EpisodeCounts, Finished, Quota, attempts_at
from rllm.engine.failures import WINDOW, FailureBudget
from rllm.engine.garbage_collection import rare_full_collections
from rllm.engine.published_client import PublishedClient
from rllm.engine.supervision import ProgressWatchdog
from rllm.errors import ConfigError, CountError, InferenceError, RllmError
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Episode, Outcome, TerminationReason, Trajectory
from rllm.types.messages import ModelOutput, SamplingParams
from rllm.types.task import EpisodeId
from rllm.workflows.workflow import Workflow

sys.path.insert(0, str(Path(__file__).parent))
from bad_tasks import play, tasks, workflow_engine


class Nothing(Workflow):
    async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
        return None


def ids(pending: list[tuple[EpisodeId, Any]]) -> list[tuple[str, int]]:
    return [(identity.task_id, identity.attempt) for identity, _ in reversed(pending)]


def test_counts_begin_with_nothing_and_lose_no_episode() -> None:
    counts = EpisodeCounts()
    numbers = (counts.submitted, counts.in_flight, counts.turns, counts.retries, counts.call_retries)
    assert (*numbers, counts.cancelled_tokens, counts.settled) == (0,) * 7
    counts.submitted = counts.in_flight = 3
    counts.settle(Outcome.SCORED)
    counts.settle(Outcome.CANCELLED, 2)
    assert (counts.in_flight, counts.settled, counts.by_outcome[Outcome.CANCELLED]) == (0, 3, 2)
    counts.in_flight = 1
    with pytest.raises(CountError, match=r"3 .*submitted.* 3 .*settled"):
        counts.check()


def test_attempts_are_made_in_order_the_spare_ones_last_and_those_made_before_not_again() -> None:
    tasks = [{"task_id": "a"}, {"task_id": "b"}]
    every = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert ids(attempts_at(tasks, 2)) == every
    assert ids(attempts_at(tasks, 2, 1.5)) == [*every, ("a", 2), ("b", 2)]
    assert ids(attempts_at(tasks, 2, 1.01)) == [*every, ("a", 2), ("b", 2)]
    skip = {EpisodeId(task_id="a", attempt=1), EpisodeId(task_id="b", attempt=0)}
    assert ids(attempts_at(tasks, 2, skip=skip)) == [("a", 0), ("b", 1)]
    for bad_tasks, group_size, says in (
        (tasks, 0, "`group_size` is 0"),
        ([*tasks, {"task_id": "a"}], 1, "same `task_id`"),
        ([{"task_id": "\ud83e"}], 1, "surrogate"),
    ):
        with pytest.raises(ConfigError, match=says):
            attempts_at(bad_tasks, group_size)
    assert ids(attempts_at(tasks, 1)) == [("a", 0), ("b", 0)]


def test_so_many_attempts_as_are_wanted_count_and_failures_take_no_place() -> None:
    stopped: list[str] = []
    quota = Quota(2, stopped.append)
    finished = Finished(quota)
    failed, scored, cancelled = Outcome.INFRASTRUCTURE_FAILURE, Outcome.SCORED, Outcome.CANCELLED
    arrivals = [failed, scored, cancelled, scored, scored, failed]
    for outcome in arrivals:
        finished.put_nowait(Episode(task_id="a", outcome=outcome))
    finished.put_nowait(Episode(task_id="b", outcome=scored))
    outcomes = [finished.get_nowait().outcome for _ in range(7)]  # type: ignore[union-attr]
    assert outcomes == [failed, scored, cancelled, scored, cancelled, cancelled, scored]
    assert stopped == ["a"]
    assert (quota.is_full("a"), quota.is_full("b"), quota.is_full("c")) == (True, False, False)
    assert not quota.takes(Episode(task_id="b", outcome=cancelled))


def test_those_that_play_are_told_with_their_age_the_oldest_first() -> None:
    now = time.monotonic()
    vitals = [
        Vitals(EpisodeId(task_id=name), started_at=now - age) for name, age in (("new", 1), ("old", 60))
    ]
    live = live_of(vitals)
    assert [each.episode.task_id for each in live] == ["old", "new"]
    assert [60 <= each.age_s < 1000 or 1 <= each.age_s < 60 for each in live] == [True, True]
    assert (live[0].turn, live[0].waits_for, vitals[0].call_retries) == (0, "its turn", 0)


def test_who_is_stopped_twice_counts_as_what_it_was_stopped_for_first() -> None:
    calls: list[int] = []
    vitals = Vitals(EpisodeId(task_id="t"), interrupt=lambda: calls.append(1))
    vitals.stop(Outcome.CANCELLED)
    vitals.stop(Outcome.TRUNCATED)
    assert (vitals.stop_outcome, calls) == (Outcome.CANCELLED, [1])


def test_collections_are_rarer_by_a_known_factor_and_as_before_when_the_engine_is_done() -> None:
    before = gc.get_threshold()
    try:
        for own, rare in (
            ((701, 11, 13), (10_000, 11, 91)),  # a full one after 100 times as many objects
            ((20_000, 11, 13), (20_000, 11, 1300)),
            ((0, 11, 13), (0, 11, 13)),
            ((700, 10, 0), (10_000, 10, 0)),
            ((1, 10, 1), (10_000, 10, 1)),
        ):
            gc.set_threshold(*own)
            with rare_full_collections():
                assert gc.get_threshold() == rare
            assert gc.get_threshold() == own
    finally:
        gc.set_threshold(*before)


def failed(message: str) -> Episode:
    return Episode(id=message, outcome=Outcome.INFRASTRUCTURE_FAILURE)


def test_so_many_kinds_of_failures_are_warned_of_and_each_once(caplog: pytest.LogCaptureFixture) -> None:
    budget = FailureBudget(1.0)
    with caplog.at_level(logging.WARNING, "rllm.engine.failures"):
        for number in range(WINDOW + 5):
            for _ in range(2):
                budget.settle(failed("e"), InferenceError(f"kind {number}"), 1000)
    assert len(caplog.records) == WINDOW == 64


def test_a_budget_is_used_up_by_one_failure_more_than_its_share_of_the_window() -> None:
    for num_attempts, window in ((1, 64), (64, 64), (100, 100)):
        budget = FailureBudget(0.25)
        for number in range(window // 4):
            budget.settle(failed(str(number)), InferenceError("x"), num_attempts)
        for _ in range(window):
            budget.settle(Episode(outcome=Outcome.SCORED), None, num_attempts)
        for number in range(window // 4):  # those before are of no window any more
            budget.settle(failed(str(number)), InferenceError("x"), num_attempts)
        budget.settle(Episode(outcome=Outcome.CANCELLED), None, num_attempts)
        with pytest.raises(InferenceError, match=f"{window // 4 + 1} of .*{window} .* of {window};"):
            budget.settle(failed("last"), InferenceError("x"), num_attempts)


def test_a_stall_names_what_stands_still_the_oldest_three_and_where_the_stacks_are(tmp_path: Any) -> None:
    engine = SimpleNamespace(counts=SimpleNamespace(in_flight=5))
    live = live_of([Vitals(EpisodeId(task_id=f"t{number}")) for number in range(5)])
    for path, where in ((None, ""), (tmp_path / "stall.txt", " The stacks are in ")):
        watchdog = ProgressWatchdog(engine, limit_s=1.0, report_path=path)  # type: ignore[arg-type]
        message = watchdog._message(live, 90.0)
        assert "for 90 s: 5 episodes" in message
        assert [f"t{number}" in message for number in range(5)] == [True] * 3 + [False] * 2
        assert (where or "The stacks") in message if where else "The stacks" not in message
        assert "nobody knows which" in watchdog._message([], 90.0)


def test_what_a_workflow_engine_cannot_honour_is_refused_by_name() -> None:
    def engine(**options: Any) -> AgentWorkflowEngine:
        return AgentWorkflowEngine(Nothing, {}, **{"rollout_engine": ScriptedClient([])} | options)

    for options, says in (
        ({"n_parallel_tasks": 0}, "`n_parallel_tasks` is 0"),
        ({"retry_limit": 0}, "`retry_limit` is 0"),
        ({"max_workers": 0}, "`max_workers` is 0"),
        ({"oversampling": 0.5}, "`oversampling` is 0.5"),
        ({"deadline_s": 0.0}, "`deadline_s` is 0"),
        ({"config": {"a": 1}}, "`config`"),
        ({"step_timeout_s": 0.0}, "`step_timeout_s` is 0"),
        ({"episode_timeout_s": 0.0}, "`episode_timeout_s` is 0"),
        ({"call_timeout_s": 0.0}, "`call_timeout_s` is 0"),
        ({"rollout_engine": None}, "`rollout_engine`"),
        ({"clients": {"p": ScriptedClient([])}}, "`rollout_engine`"),
    ):
        with pytest.raises(RllmError, match=says):
            engine(**options)
    engine(n_parallel_tasks=1, retry_limit=1, max_workers=1, oversampling=1.0, deadline_s=0.1)


async def test_tasks_that_are_none_are_refused_before_anything_is_played() -> None:
    engine = AgentWorkflowEngine(Nothing, {}, ScriptedClient([]))
    for no_tasks in ("a", [1], {"task_id": "a"}):
        with pytest.raises(ConfigError):
            [episode async for episode in engine.run(no_tasks)]  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            await engine.execute_tasks(no_tasks)  # type: ignore[arg-type]


def test_a_client_is_taken_as_it_is_where_it_is_asked_by_ids_or_by_messages() -> None:
    by_messages = SimpleNamespace(session=lambda order: None)
    by_ids = SimpleNamespace(generate_ids=lambda: None, renderer=None)

    async def get_model_response(messages: Any) -> None:
        return None

    published = SimpleNamespace(get_model_response=get_model_response)
    for client in (by_messages, by_ids, ScriptedClient([])):
        assert _client(client) is client
    assert isinstance(_client(published), PublishedClient)


async def test_an_engine_of_published_style_is_given_what_was_set_and_nothing_else() -> None:
    given: list[dict[str, Any]] = []

    class Published:
        async def get_model_response(self, messages: list[Any], **settings: Any) -> ModelOutput:
            given.append(settings)
            return ModelOutput(text="go")

    client = PublishedClient(Published())
    always = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 7, "seed": 0}
    for more in ({}, {"top_k": 5}, {"stop": ["."]}):
        await client.get_model_response([], SamplingParams(max_tokens=7, **more))
        assert given.pop() == always | more
    await client.get_model_response([], SamplingParams(max_tokens=7), tools=[{"type": "function"}])
    assert given == [always | {"tools": [{"type": "function"}]}]


async def test_what_failed_or_was_cut_off_is_not_right_whatever_a_workflow_says() -> None:
    for reason, is_correct in ((TerminationReason.ENV_DONE, True), (TerminationReason.ERROR, False)):
        returned = Episode(is_correct=True, termination_reason=reason, trajectories=[Trajectory(reward=1.0)])
        engine = workflow_engine(lambda flow, result=returned: result)
        episode = (await play(engine, tasks(1, bad=lambda number: True)))["t0"]
        assert episode.is_correct is is_correct, episode.outcome
        assert [each.reward for each in episode.trajectories] == [1.0 if is_correct else None]
