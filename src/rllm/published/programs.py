"""Programs of published style: what runs a task, what judges the episode, and tasks of spring 2026."""

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rllm.agents.flow import AgentFlow, as_flow, load_flow, require_result
from rllm.agents.named import agent_named, published_agent_successor
from rllm.errors import ConfigError
from rllm.types.episode import Episode, Trajectory
from rllm.types.evaluation import EvalOutput
from rllm.types.task import AgentConfig, Task


@runtime_checkable
class AgentProgram(Protocol):
    """`rllm.types.AgentFlow`: anything with `run(task, config)`."""

    def run(self, task: Task, config: AgentConfig) -> Any: ...


@runtime_checkable
class EpisodeJudge(Protocol):
    """`rllm.types.Evaluator`: anything with `evaluate(task, episode)`."""

    def evaluate(self, task: Mapping[str, Any], episode: Episode) -> EvalOutput: ...


async def run_agent_flow(program: Any, task: Task, config: AgentConfig) -> Episode:
    """One run of a program, whatever it returns: without a result, an episode with one empty trajectory."""
    flow = as_flow(program)
    result = flow.run(task, config) if flow.is_async else await asyncio.to_thread(flow.run, task, config)
    result = require_result(flow, await result if inspect.isawaitable(result) else result)
    if isinstance(result, Episode):
        return result
    trajectory = Trajectory(name=flow.name) if result is None else result
    return Episode(task=task, trajectories=[trajectory])


def load_agent(name: str) -> AgentFlow:
    """`rllm.eval.load_agent`: the program of a name, an entry point, `package.module:name` or `file.py:name`.

    Raises ConfigError for a published name of another kind of agent, with how that is asked for here.
    """
    try:
        return load_flow(name)
    except ConfigError as error:
        if ":" in name or published_agent_successor(name):
            raise
        try:
            agent = agent_named(name)
        except ConfigError:
            raise error from None
        raise ConfigError(
            f"`{name}` is no program but a class of agents, `{agent.__module__}:{agent.__name__}`: give it "
            f"to AgentExecutionEngine, or type `--agent {name}`."
        ) from error


class DataTask(Task):
    """`rllm.experimental.eval.types.Task(data, spec)`: a row, whose question is the instruction."""

    def __init__(self, data: Mapping[str, Any], spec: Any = None) -> None:
        text = data.get("instruction") or data.get("question") or data.get("prompt") or ""
        super().__init__(id=str(data.get("task_id") or data.get("id") or ""), instruction=text)
        self.metadata = dict(data)
        self.spec = spec
