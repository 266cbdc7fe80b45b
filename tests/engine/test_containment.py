"""A workflow may cancel, exit, swallow, hang or lie: its own attempt ends, and every other goes on."""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest

from rllm.engine import containment
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.episode_clock import EpisodeClock, EpisodeLimits
from rllm.types.messages import Message
from rllm.workflows.workflow import Workflow

TASKS = [{"task_id": f"t{number}"} for number in range(4)]
BAD = "t1"
MESSAGES: list[Message] = [{"role": "user", "content": "go"}]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containment, "GRACE_S", 0.2)


def paid() -> Episode:
    return Episode(trajectories=[Trajectory(name="solver", reward=1.0)], is_correct=True)


async def own_cancellation(flow: Workflow) -> None:
    task = asyncio.ensure_future(asyncio.sleep(60.0))
    task.cancel()
    await task


async def exits(flow: Workflow) -> None:
    sys.exit(3)


async def exits_below(flow: Workflow) -> None:
    async def child() -> None:
        raise asyncio.CancelledError("of a scope of its own")

    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60.0))
        await child()


async def swallows_once(flow: Workflow) -> Episode:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(60.0)
    return paid()


async def swallows_and_hangs(flow: Workflow) -> Episode:
    for _ in range(3):
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            continue
    return paid()


async def swallows_always(flow: Workflow) -> None:
    while True:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            continue


async def swallows_everything(flow: Workflow) -> None:
    while True:
        try:
            await flow.rollout_engine.get_model_response(MESSAGES)
            await asyncio.sleep(60.0)
        except BaseException:  # noqa: BLE001
            continue


async def returns_late(flow: Workflow) -> Episode:
    time.sleep(0.5)  # holds up the loop, so that nobody can tell it to end before it has
    return paid()


class Odd(Workflow):
    """Commits a step, then does `does` on the bad task."""

    does: Callable[[Workflow], Any]

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        output = await self.rollout_engine.get_model_response(MESSAGES)
        step = Step.from_model_output(output, MESSAGES, reward=0.5)
        self.commit(name="solver", trajectory=Trajectory(steps=[step]))
        return await type(self).does(self) if task["task_id"] == BAD else None


def engine_of(does: Callable[[Workflow], Any], **options: Any) -> AgentWorkflowEngine:
    workflow = type("Odd", (Odd,), {"does": staticmethod(does)})
    client = ScriptedClient(lambda messages: "go")
    return AgentWorkflowEngine(
        workflow, {}, client, retry_wait_s=0.0, raise_on_error=False, episode_timeout_s=0.3, **options
    )


async def play(engine: AgentWorkflowEngine) -> dict[str, Episode]:
    async with asyncio.timeout(20.0), aclosing(engine.run(TASKS)) as running:
        episodes = {episode.task_id: episode async for episode in running}
    engine.counts.check()
    assert engine.counts.in_flight == 0
    assert len(episodes) == len(TASKS)
    return episodes


async def test_what_a_workflow_raises_fails_its_attempt_alone() -> None:
    for does, type_name in [
        (own_cancellation, "CancelledError"),
        (exits, "SystemExit"),
        (exits_below, "CancelledError"),
    ]:
        episodes = await play(engine_of(does))
        bad = episodes.pop(BAD)
        assert (bad.outcome, bad.info["error"]["type"]) == (Outcome.POLICY_FAILURE, type_name)
        assert [each.reward for each in bad.trajectories] == [None]
        assert {each.outcome for each in episodes.values()} == {Outcome.SCORED}


async def test_what_is_returned_after_the_time_was_up_does_not_count() -> None:
    for does in (swallows_once, swallows_and_hangs, returns_late):
        bad = (await play(engine_of(does)))[BAD]
        assert (bad.outcome, bad.termination_reason) == (Outcome.TRUNCATED, TerminationReason.TIMEOUT)
        assert not bad.is_correct
        assert [each.reward for each in bad.trajectories] == [0.5], "what had been committed in time"
        assert bad.metrics["abandoned_attempts"] == 0.0


# One that ignores even its own destruction is told of by the interpreter when its loop is gone.
ignored_destruction = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@ignored_destruction
@pytest.mark.parametrize("does", [swallows_always, swallows_everything])
def test_an_attempt_that_does_not_end_is_left_behind_and_counted(does: Callable[[Workflow], Any]) -> None:
    """In a loop of its own, whose end waits for every task that is known to it."""
    episodes = asyncio.run(play(engine_of(does)))
    bad = episodes.pop(BAD)
    assert (bad.outcome, bad.termination_reason) == (Outcome.TRUNCATED, TerminationReason.TIMEOUT)
    assert (bad.is_correct, bad.metrics["abandoned_attempts"]) == (False, 1.0)
    assert "left behind" in bad.info["error"]["message"]
    assert {each.outcome for each in episodes.values()} == {Outcome.SCORED}


@ignored_destruction
@pytest.mark.parametrize("does", [swallows_once, swallows_always, swallows_everything])
def test_whoever_leaves_early_waits_for_nobody(does: Callable[[Workflow], Any]) -> None:
    async def leave() -> AgentWorkflowEngine:
        engine = engine_of(does, n_parallel_tasks=1)
        engine.settings.workflow_args["timeout"] = 60.0
        async with asyncio.timeout(20.0), aclosing(engine.run(TASKS)) as running:
            async for _ in running:
                break
        return engine

    engine = asyncio.run(leave())
    assert engine.counts.in_flight == 0
    assert engine.counts.by_outcome[Outcome.CANCELLED] == 3


async def test_the_deadline_of_a_run_holds_against_one_that_swallows() -> None:
    engine = engine_of(swallows_always, deadline_s=0.3)
    engine.settings.workflow_args["timeout"] = 60.0
    bad = (await play(engine))[BAD]
    assert bad.termination_reason is TerminationReason.TIMEOUT


async def test_a_workflow_that_exits_does_not_end_execute_tasks_with_the_program() -> None:
    engine = engine_of(exits)
    engine.raise_on_error = True
    with pytest.raises(Exception, match="SystemExit: 3"):
        await engine.execute_tasks(TASKS)


async def test_hooks_and_constructors_are_contained_as_well() -> None:
    def leave(*args: Any, **kwargs: Any) -> Any:
        sys.exit(4)

    for hook in (
        "postprocess_episode",
        "collect_trajectories",
        "compute_trajectory_reward",
        "collect_metrics",
    ):

        class Leaves(Odd):
            def __getattribute__(self, name: str) -> Any:
                if name == hook and self.uid_of_task == BAD:  # noqa: B023
                    return leave
                return super().__getattribute__(name)

            uid_of_task = ""

            async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
                self.uid_of_task = task["task_id"]
                return await super().run(task | {"task_id": "t0"}, uid)

        engine = AgentWorkflowEngine(Leaves, {}, ScriptedClient(lambda messages: "go"), retry_wait_s=0.0)
        episodes = await play(engine)
        bad = episodes.pop(BAD)
        assert bad.outcome is Outcome.INFRASTRUCTURE_FAILURE, hook
        assert "SystemExit" in bad.info["error"]["message"]
        assert bad.trajectories[0].steps[0].response_ids, "what was sampled is on record"
        assert {each.outcome for each in episodes.values()} == {Outcome.SCORED}


async def test_nothing_is_left_running(settled: Callable[..., Any]) -> None:
    threads = threading.active_count()
    before = len(asyncio.all_tasks())
    for does in (own_cancellation, exits, swallows_once, swallows_always):
        await play(engine_of(does))
    assert len(asyncio.all_tasks()) == before
    await settled(lambda: threading.active_count() <= threads)


async def contained(
    coroutine: Any, *, in_s: float = 20.0, on_start: Callable[[Any], None] = lambda stop: None
) -> containment.ContainedEnd:
    return await containment.contain(coroutine, EpisodeClock(EpisodeLimits(wall_s=in_s)), on_start)


async def test_the_end_of_a_coroutine_is_its_own_or_that_of_its_time() -> None:
    events: list[str] = []
    tasks: list[asyncio.Task[Any] | None] = []

    async def returns() -> str:
        return "value"

    async def leaves() -> None:
        sys.exit(3)

    async def waits(num_swallowed: int = 0) -> str:
        tasks.append(asyncio.current_task())
        for _ in range(num_swallowed + 1):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                events.append("told")
        return "late"

    end = await contained(returns())
    assert (end.value, end.error, end.timed_out, end.is_abandoned) == ("value", None, False, False)
    end = await contained(leaves())
    assert (end.value, type(end.error), end.timed_out) == (None, SystemExit, False)
    for num_swallowed in (0, 1):
        events.clear()
        end = await contained(waits(num_swallowed), in_s=0.01)
        assert (end.value, end.timed_out, end.is_abandoned) == (None, True, False)
        assert events == ["told"] * (num_swallowed + 1)
    end = await contained(waits(100), in_s=0.01)
    assert (end.timed_out, end.is_abandoned) == (True, True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert all(task is not None and task.done() for task in tasks), "what is left behind waits for nothing"


@ignored_destruction
async def test_what_is_left_behind_is_waited_for_and_told_of_by_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()

    async def swallows_its_end() -> None:
        for _ in range(100):
            with suppress(BaseException):
                await loop.create_future()

    num_before = len(asyncio.all_tasks())
    end = await contained(swallows_its_end(), in_s=0.01)
    num_after = len(asyncio.all_tasks())
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert (end.is_abandoned, num_after) == (True, num_before)
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []


async def test_whoever_stops_a_coroutine_or_waits_for_it_and_is_cancelled_ends_it() -> None:
    events: list[str] = []

    stops: list[Callable[[], None]] = []

    async def waits() -> None:
        events.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            events.append("told")

    stopped = asyncio.ensure_future(contained(waits(), on_start=stops.append))
    while events != ["begun"]:
        await asyncio.sleep(0)
    for _ in range(2):
        stops[0]()
    end = await stopped
    assert (end.timed_out, end.is_abandoned, events) == (True, False, ["begun", "told"])
    waiting = asyncio.ensure_future(contained(waits()))
    while events[-1] != "begun":
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert events == ["begun", "told"] * 2
