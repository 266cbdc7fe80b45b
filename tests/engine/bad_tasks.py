"""Engines of agents, workflows and programs, in which a user's class does something odd on the bad task."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.engine.traced import TracedEngine
from rllm.environments.base import BaseEnv
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Action, Episode, Step, Trajectory
from rllm.types.messages import Message
from rllm.types.task import AgentConfig, Task
from rllm.workflows.workflow import Workflow

NAN = float("nan")
BAD = "t3"
Does = Callable[[], Any]
"""What a user's class does on the bad task: it raises, or returns something odd."""


def go(messages: Sequence[Message]) -> str:
    return "go"


def raises(error: BaseException) -> Does:
    def raising() -> Any:
        raise error

    return raising


def tasks(
    count: int, bad: Callable[[int], bool] = lambda number: f"t{number}" == BAD
) -> list[dict[str, Any]]:
    return [{"task_id": f"t{number}", "is_bad": bad(number)} for number in range(count)]


async def play(engine: Any, rows: list[dict[str, Any]]) -> dict[str, Episode]:
    async with asyncio.timeout(30.0), aclosing(engine.run(rows)) as running:
        return {episode.task_id: episode async for episode in running}


class Agent(ConversationAgent):
    """`is_bad` where the environment says so."""

    on_answer: Does | None = None
    is_bad = False

    def update_from_env(self, observation: Any, reward: float, done: bool, info: Any, **kwargs: Any) -> None:
        self.is_bad = self.is_bad or info.get("is_bad", False)
        super().update_from_env(observation, reward, done, info)

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        action = super().update_from_model(response, **kwargs)
        if self.is_bad and type(self).on_answer is not None:
            type(self).on_answer(self)  # type: ignore[call-arg, misc]
        return action


class Env(BaseEnv):
    on_reset: Does | None = None
    on_step: Does | None = None
    on_make: Does | None = None

    def __init__(self, task: dict[str, Any]) -> None:
        self.is_bad = task["is_bad"]
        if self.is_bad and type(self).on_make is not None:
            type(self).on_make()

    def reset(self, seed: int | None = None) -> Any:
        if self.is_bad and type(self).on_reset is not None:
            return type(self).on_reset()
        return "go", {"is_bad": self.is_bad}

    def step(self, action: Any) -> Any:
        if self.is_bad and type(self).on_step is not None:
            return type(self).on_step()
        return "over", 1.0, True, {}

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> BaseEnv:  # type: ignore[override]
        return cls(info)


def agent_engine(
    env: dict[str, Any] | None = None, agent: dict[str, Any] | None = None, **options: Any
) -> AgentExecutionEngine:
    envs = {name: staticmethod(does) for name, does in (env or {}).items()}
    return AgentExecutionEngine(
        type("Agent", (Agent,), agent or {}),
        type("Env", (Env,), envs),
        rollout_engine=ScriptedClient(go),
        n_parallel_agents=4,
        retry_wait_s=0.0,
        stored=True,
        **options,
    )


def workflow_engine(does: Callable[[Workflow], Any], **options: Any) -> AgentWorkflowEngine:
    class Bad(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
            messages: list[Message] = [{"role": "user", "content": "go"}]
            output = await self.rollout_engine.get_model_response(messages)
            step = Step.from_model_output(output, messages, reward=1.0)
            if not task["is_bad"]:
                return Episode(trajectories=[Trajectory(steps=[step])], is_correct=True)
            result = does(self)
            return await result if asyncio.iscoroutine(result) else result

    return AgentWorkflowEngine(
        Bad, {}, ScriptedClient(go), retry_wait_s=0.0, n_parallel_tasks=4, stored=True, **options
    )


class Session:
    id, base_url = "s", "http://fake/v1"
    is_closed = False

    def traces(self) -> list[Any]:
        return []

    async def close(self) -> None:
        self.is_closed = True


class Gateway:
    def __init__(self) -> None:
        self.sessions: list[Session] = []

    def open_session(self, session: str, **options: Any) -> Session:
        self.sessions.append(Session())
        return self.sessions[-1]


def program_engine(program: Does, evaluator: Does = lambda: 1.0, **options: Any) -> TracedEngine:
    def solve(task: Task, config: AgentConfig) -> Any:
        return program() if task.metadata["is_bad"] else None

    def score(task: dict[str, Any], episode: Episode) -> Any:
        return evaluator() if task["is_bad"] else 1.0

    return TracedEngine(solve, score, Gateway(), model="m", n_parallel_tasks=4, stored=True, **options)
