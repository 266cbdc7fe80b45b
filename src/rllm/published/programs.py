"""Protocols of published programs: what runs a task, and what judges the episode."""

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rllm.agents.flow import as_flow, require_result
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
