"""What the tests of the workflow engine play: a workflow of one call, and engines that play it."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.inference import ScriptedClient
from rllm.types.episode import Episode, Step, Trajectory
from rllm.types.messages import Message
from rllm.workflows import Workflow

TASKS = [{"task_id": f"t{number}", "question": f"{number}+1?"} for number in range(4)]


def four(messages: Sequence[Message]) -> str:
    return "4"


def engine_of(
    workflow: type[Workflow], client: Any = None, args: dict[str, Any] | None = None, **options: Any
) -> AgentWorkflowEngine:
    return AgentWorkflowEngine(
        workflow, args or {}, client or ScriptedClient(four), retry_wait_s=0.0, **options
    )


async def episodes_of(engine: AgentWorkflowEngine, tasks: Any = TASKS, **how: Any) -> list[Episode]:
    async with aclosing(engine.run(tasks, **how)) as episodes:
        return [episode async for episode in episodes]


class Asks(Workflow):
    """One call; `trouble` is done afterwards."""

    def __init__(self, rollout_engine: Any, trouble: Any = None, **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.trouble = trouble

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        messages: list[Message] = [{"role": "user", "content": task["question"]}]
        output = await self.rollout_engine.get_model_response(messages)
        step = Step.from_model_output(output, messages, reward=1.0)
        self.commit(name="solver", trajectory=Trajectory(steps=[step]))
        if self.trouble is not None:
            result = self.trouble(task)
            if asyncio.iscoroutine(result):
                await result
        return None


def raising(error: Exception) -> Callable[[Any], None]:
    def trouble(task: Any) -> None:
        raise error

    return trouble
