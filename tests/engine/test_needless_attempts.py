"""Attempts that nobody needs any more: of a group that is complete, or when the time of a run is up."""

import asyncio
from collections import Counter
from typing import Any, ClassVar

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


async def test_what_has_begun_when_the_time_is_up_is_cut_off_and_the_rest_is_not_begun() -> None:
    for engine in engines(ends=False, deadline_s=0.05, most=1):
        assert await outcomes_of(engine, 2) == {("a", Outcome.TRUNCATED): 1}
        assert engine.counts.by_outcome[Outcome.CANCELLED] == 3
