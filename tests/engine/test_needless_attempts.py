"""Attempts that nobody needs any more: of a group that is complete, or when the time of a run is up."""

import asyncio
from collections import Counter
from typing import Any, ClassVar

import pytest

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.environments.base import BaseEnv
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Episode, Outcome, Trajectory
from rllm.workflows.workflow import Workflow

TASKS = [{"task_id": name} for name in "ab"]


class FirstWaits(Workflow):
    """The first attempt at each task never ends; with `everybody` none does."""

    everybody = False

    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode:
        if self.everybody or uid.endswith(":0"):
            await asyncio.Event().wait()
        return Episode(trajectories=[Trajectory(reward=1.0)])


class NobodyEnds(FirstWaits):
    everybody = True


class Waits(BaseEnv):
    """As the attempts above do, by the order in which they are made."""

    made: ClassVar[Counter[str]] = Counter()
    everybody = False

    def __init__(self, task_id: str) -> None:
        self.waits = not Waits.made[task_id] or self.everybody
        Waits.made[task_id] += 1

    def reset(self, seed: int | None = None) -> Any:
        return "go", {}

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        if self.waits:
            await asyncio.Event().wait()
        return "on", 1.0, True, {}

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> "Waits":  # type: ignore[override]
        return cls(info["task_id"])


class NeverEnds(Waits):
    everybody = True


def engines(*, ends: bool, most: int = 8, **options: Any) -> list[Any]:
    Waits.made.clear()
    client = ScriptedClient(lambda _: "on")
    env_class, workflow = (Waits, FirstWaits) if ends else (NeverEnds, NobodyEnds)
    return [
        AgentExecutionEngine(
            ConversationAgent, env_class, rollout_engine=client, n_parallel_agents=most, **options
        ),
        AgentWorkflowEngine(workflow, {}, client, n_parallel_tasks=most, **options),
    ]


async def outcomes_of(
    engine: Any, group_size: int, tasks: Any = TASKS
) -> dict[tuple[str, Outcome | None], int]:
    async with asyncio.timeout(10.0):
        return Counter(
            [(each.task_id, each.outcome) async for each in engine.run(tasks, group_size=group_size)]
        )


async def test_the_attempt_beyond_a_complete_group_is_cancelled_and_no_other() -> None:
    for engine in engines(ends=True, oversampling=2.0):
        assert await outcomes_of(engine, 1) == {(name, Outcome.SCORED): 1 for name in "ab"}
        assert engine.counts.by_outcome[Outcome.CANCELLED] == 2
        assert not engine.rollouts
    for engine in engines(ends=True, oversampling=2.0):
        assert await outcomes_of(engine, 1, TASKS[:1]) == {("a", Outcome.SCORED): 1}


GATE: dict[str, asyncio.Event] = {}


class Gated(FirstWaits):
    """The first attempt at a task never ends; one at a gated task waits for the gate."""

    async def run(self, task: Any, uid: str, **kwargs: Any) -> Episode:
        if not task.get("gated"):
            return await super().run(task, uid)
        await GATE["now"].wait()
        return Episode(trajectories=[Trajectory(reward=1.0)])


class GatedEnv(Waits):
    """As the attempts above do."""

    def __init__(self, task_id: str, *, gated: bool) -> None:
        self.gated = gated
        super().__init__("gated" if gated else task_id)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        if not self.gated:
            return await super().step(action)
        await GATE["now"].wait()
        return "on", 1.0, True, {}

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> "GatedEnv":  # type: ignore[override]
        return cls(info["task_id"], gated=info.get("gated", False))


async def test_a_complete_group_ends_its_own_attempts_and_nobody_elses() -> None:
    Waits.made.clear()
    client = ScriptedClient(lambda _: "on")
    for engine in (
        AgentExecutionEngine(ConversationAgent, GatedEnv, rollout_engine=client),
        AgentWorkflowEngine(Gated, {}, client),
    ):
        GATE["now"] = asyncio.Event()
        first_is_complete = asyncio.Event()

        async def outcomes(purpose: str, tasks: Any, oversampling: float) -> dict[str, int]:
            counts = Counter[str]()
            run = engine.run(tasks, purpose=purpose, oversampling=oversampling)  # noqa: B023
            async for episode in run:
                assert episode.outcome is Outcome.SCORED
                counts[episode.task_id] += 1
                first_is_complete.set()  # noqa: B023
            return counts

        async with asyncio.timeout(20.0), asyncio.TaskGroup() as group:
            train = group.create_task(outcomes("train", [TASKS[0], TASKS[1] | {"gated": True}], 2.0))
            other = group.create_task(outcomes("validate", [TASKS[0] | {"gated": True}], 1.0))
            await first_is_complete.wait()
            while len(engine.rollouts) != 3:  # two at the gated task of the one run, one of the other
                await asyncio.sleep(0)
            GATE["now"].set()
        assert (train.result(), other.result()) == ({"a": 1, "b": 1}, {"a": 1})


async def test_another_try_waits_twice_as_long_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Workflow):
        async def run(self, task: Any, uid: str, **kwargs: Any) -> None:
            raise OSError("no room")

    class FailsToo(Waits):
        def reset(self, seed: int | None = None) -> Any:
            raise OSError("no room")

    waits: list[float] = []
    sleep = asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    client = ScriptedClient(lambda _: "on")
    options: Any = {"retry_limit": 4, "retry_wait_s": 0.25}
    for engine in (
        AgentExecutionEngine(ConversationAgent, FailsToo, rollout_engine=client, **options),
        AgentWorkflowEngine(Fails, {}, client, **options),
    ):
        waits.clear()
        assert await outcomes_of(engine, 1, TASKS[:1]) == {("a", Outcome.INFRASTRUCTURE_FAILURE): 1}
        assert [each for each in waits if each] == [0.25, 0.5, 1.0]


async def test_what_has_begun_when_the_time_is_up_is_cut_off_and_the_rest_is_not_begun() -> None:
    for engine in engines(ends=False, deadline_s=0.05, most=1):
        assert await outcomes_of(engine, 2) == {("a", Outcome.TRUNCATED): 1}
        assert engine.counts.by_outcome[Outcome.CANCELLED] == 3
