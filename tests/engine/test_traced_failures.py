"""Programs behind a gateway that fail, hang or are ended: a cause each, and nothing left open."""

import asyncio
import errno
import os
import sys
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rllm.engine.program_threads import ProgramRunner
from rllm.errors import BrowserError, InferenceError, SandboxError
from rllm.types.episode import Episode, Outcome, TerminationReason, Trajectory
from rllm.types.task import AgentConfig, Task

sys.path.insert(0, str(Path(__file__).parent))
from fake_gateway import CallFailed, FakeGateway, Messages, engine_for, play, tasks


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("error", [KeyError("answer"), SystemExit(1), asyncio.CancelledError()])
async def test_what_a_program_raises_is_a_policy_failure_with_cause(way: str, error: BaseException) -> None:
    gateway = FakeGateway()

    def solve(task: Task, config: AgentConfig) -> None:
        gateway.ask(config, "question")
        raise error

    async def solve_async(task: Task, config: AgentConfig) -> None:
        solve(task, config)

    engine = engine_for(solve if way == "sync" else solve_async, gateway)
    (episode,) = await play(engine, tasks(1))
    assert (episode.outcome, episode.termination_reason) == (
        Outcome.POLICY_FAILURE,
        TerminationReason.ERROR,
    )
    assert episode.info["error"]["type"] == type(error).__name__
    assert "in solve" in episode.info["error"]["traceback"]
    assert episode.trajectories[0].reward is None
    assert len(episode.trajectories[0].steps) == 1, "what was sampled is on record"
    assert episode.info["tries"] == 1


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        *(BrowserError("gone"), InferenceError("gone"), SandboxError("gone"), MemoryError("full")),
        OSError(errno.EMFILE, "Too many open files"),
        caused_by(ConnectionError("no connection"), OSError(errno.EMFILE, "Too many open files")),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_service_that_fails_under_a_program_is_tried_again(error: Exception) -> None:
    gateway, errors = FakeGateway(), iter([error])

    def solve(task: Task, config: AgentConfig) -> None:
        gateway.ask(config, "question")
        for each in errors:
            raise each

    (mended,) = await play(engine_for(solve, gateway), tasks(1))
    assert (mended.outcome, mended.info["tries"]) == (Outcome.SCORED, 2)
    errors = iter([error] * 9)
    (broken,) = await play(engine_for(solve, gateway), tasks(1))
    assert (broken.outcome, broken.info["tries"]) == (Outcome.INFRASTRUCTURE_FAILURE, 3)
    assert broken.trajectories[0].reward is None


async def test_a_failure_behind_the_gateway_is_tried_again_in_a_new_session() -> None:
    failures = iter([503, 429])

    def answer(messages: Messages) -> str | int:
        return next(failures, "at last")

    gateway = FakeGateway(answer)
    engine = engine_for(lambda task, config: gateway.ask(config, "q") and None, gateway)
    (episode,) = await play(engine, tasks(1))
    assert (episode.outcome, episode.info["tries"]) == (Outcome.SCORED, 3)
    assert len(gateway.sessions) == 3
    assert len({session.seed for session in gateway.sessions.values()}) == 1
    assert engine.counts.retries == 2
    assert [step.model_response for step in episode.trajectories[0].steps] == ["at last"]


async def test_a_failure_that_stays_is_an_infrastructure_failure_also_when_the_program_swallows_it() -> None:
    gateway = FakeGateway(lambda messages: 502)

    def solve(task: Task, config: AgentConfig) -> Trajectory:
        try:
            return Trajectory(output=gateway.ask(config, "q").text)
        except CallFailed:
            return Trajectory(output="I do not know")

    (episode,) = await play(engine_for(solve, gateway, retry_limit=2), tasks(1))
    assert (episode.outcome, episode.info["tries"]) == (Outcome.INFRASTRUCTURE_FAILURE, 2)
    assert episode.trajectories[0].reward is None
    assert "status 502" in episode.info["error"]["message"]
    assert episode.metrics["failed_calls"] == 1


async def test_a_failure_that_the_program_mended_is_none() -> None:
    failures = iter([500])
    gateway = FakeGateway(lambda messages: next(failures, "fine"))

    def solve(task: Task, config: AgentConfig) -> None:
        for _ in range(2):
            try:
                gateway.ask(config, "the same")
            except CallFailed:
                continue

    (episode,) = await play(engine_for(solve, gateway), tasks(1))
    assert (episode.outcome, episode.info["tries"]) == (Outcome.SCORED, 1)
    assert len(episode.trajectories[0].steps) == 1


async def test_a_conversation_that_outgrows_the_context_says_so() -> None:
    gateway = FakeGateway(lambda messages: 400)
    engine = engine_for(lambda task, config: gateway.ask(config, "long") and None, gateway)
    (episode,) = await play(engine, tasks(1))
    assert (episode.outcome, episode.termination_reason) == (
        Outcome.POLICY_FAILURE,
        TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
    )


async def test_an_answer_that_broke_off_is_counted_and_no_step() -> None:
    gateway = FakeGateway()

    def solve(task: Task, config: AgentConfig) -> None:
        with pytest.raises(CallFailed):
            gateway.ask(config, "first", breaks_off=True)
        gateway.ask(config, "second")

    (episode,) = await play(engine_for(solve, gateway), tasks(1))
    assert (episode.metrics["calls"], episode.metrics["partial_calls"]) == (1, 1)
    assert len(episode.trajectories[0].steps) == 1


async def test_a_program_whose_time_is_up_has_its_session_closed_and_ends_by_itself() -> None:
    gateway = FakeGateway()

    def solve(task: Task, config: AgentConfig) -> None:
        gateway.ask(config, "q")
        gateway.sessions[config.session_uid].closed.wait()
        gateway.ask(config, "too late")

    engine = engine_for(solve, gateway, episode_timeout_s=0.5)
    (episode,) = await play(engine, tasks(1))
    assert (episode.outcome, episode.termination_reason) == (
        Outcome.POLICY_FAILURE,
        TerminationReason.TIMEOUT,
    )
    assert engine.abandoned_threads == episode.metrics["abandoned_threads"] == 0
    assert f"{os.path.basename(__file__)}" in episode.info["error"]["message"]
    assert "in solve" in episode.info["error"]["message"]
    assert len(episode.trajectories[0].steps) == 1


@pytest.mark.parametrize("way", ["sync", "async that blocks", "async that will not be cancelled"])
async def test_a_program_that_hangs_is_left_behind_and_the_next_one_runs(
    way: str, release: threading.Event
) -> None:
    def hang(task: Task, config: AgentConfig) -> None:
        if task.id == "t1":
            release.wait()

    async def block(task: Task, config: AgentConfig) -> None:
        hang(task, config)

    async def resist(task: Task, config: AgentConfig) -> None:
        while task.id == "t1" and not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    program = {"sync": hang, "async that blocks": block, "async that will not be cancelled": resist}[way]
    engine = engine_for(program, FakeGateway(), n_parallel_tasks=1, episode_timeout_s=1.5)
    engine._runner = ProgramRunner(grace_s=0.05)
    async with asyncio.timeout(20.0):
        episodes = await play(engine, tasks(4))
    outcomes = [episode.outcome for episode in episodes]
    assert outcomes == [Outcome.SCORED, Outcome.POLICY_FAILURE, Outcome.SCORED, Outcome.SCORED]
    assert engine.abandoned_threads == episodes[1].metrics["abandoned_threads"] == 1
    place = episodes[1].info["error"]["message"]
    assert os.path.basename(__file__) in place, place


async def test_breaking_out_cancels_what_is_in_flight_and_closes_its_sessions(
    settled: Callable[..., Any],
) -> None:
    gateway = FakeGateway()
    cancelled: list[str] = []

    async def solve(task: Task, config: AgentConfig) -> None:
        if task.id != "t0":
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(task.id)

    engine = engine_for(solve, gateway, n_parallel_tasks=5)
    async with engine, aclosing(engine.run(tasks(8))) as running:
        async for episode in running:
            assert episode.task_id == "t0"
            break
    assert engine.counts.by_outcome[Outcome.SCORED] == 1
    assert engine.counts.by_outcome[Outcome.CANCELLED] == 7
    assert all(session.closed.is_set() for session in gateway.sessions.values())
    assert 1 <= len(cancelled) <= 5
    await settled(lambda: not [each for each in threading.enumerate() if each.name == "rllm-programs"])


async def test_a_judge_that_is_down_is_an_infrastructure_failure(
    release: threading.Event,
) -> None:
    said: list[Any] = [SandboxError("the judge is down"), TimeoutError("slow"), None, 1.0]

    def score(task: dict[str, Any], episode: Episode) -> float:
        fate = said.pop(0)
        if isinstance(fate, Exception):
            raise fate
        if fate is None:
            release.wait()
        return fate

    engine = engine_for(
        lambda task, config: None, FakeGateway(), score, evaluator_timeout_s=0.5, retry_limit=4
    )
    engine._runner = ProgramRunner(grace_s=0.05)
    (episode,) = await play(engine, tasks(1))
    assert (episode.outcome, episode.info["tries"]) == (Outcome.SCORED, 4)
    assert engine.abandoned_threads == 1
