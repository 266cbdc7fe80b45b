"""`--agent` and programs by name ──► who acts.

math, frozenlake, …        ──► a built-in agent            file.py:MyAgent     ──► an agent's class
file.py:solve, an entry point ──► a program                file.py:MyWorkflow  ──► a workflow
harness:codex, harness:my.toml ──► a command-line agent in the sandbox of its task, which is a program
verifiers:NAME, inspect:FILE@task ──► a program of another library, which brings its tasks and its judge
"""

import inspect
import os
from dataclasses import dataclass
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.agents.flow import AgentFlow, agent_object, as_flow
from rllm.agents.named import AGENTS, agent_named
from rllm.environments.harness.program import Harness
from rllm.environments.harness.spec import PREFIX, harness_named
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_names
from rllm.integrations.task_program import TaskProgram
from rllm.integrations.task_programs import is_task_program, task_program
from rllm.workflows.workflow import Workflow

MOST_AT_ONCE = 4 * (os.cpu_count() or 1)
"""Harnesses that run at a time: each is a program with hundreds of megabytes."""
SETTING_UP_S = 300.0
"""The part of an episode's time before and after the harness: for its world and its patch."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Actor:
    """Exactly one of the three is there."""

    name: str
    """The name of the class or program itself, without its module."""
    agent: type[BaseAgent] | None = None
    flow: AgentFlow | None = None
    workflow: type[Workflow] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The values that its hash covers beside its source: for a harness all of its file, for a program of
        another library its version and source."""
        owner = getattr(self.flow.function, "__self__", None) if self.flow is not None else None
        if isinstance(owner, TaskProgram):
            return owner.content()
        return owner.spec.content() if isinstance(owner, Harness) else {}

    @property
    def source(self) -> object:
        """The object whose source is hashed."""
        return self.flow.function if self.flow is not None else self.agent or self.workflow


def actor_named(name: str) -> Actor:
    """Raises ConfigError with the nearest name for one that is not there."""
    if name in AGENTS:
        return Actor(name=name, agent=agent_named(name))
    if name.startswith(PREFIX):
        return _harness(name)
    if is_task_program(name):
        raise ConfigError(f"`{name}` brings its own tasks: name it instead of a benchmark, without --agent.")
    try:
        return _actor(agent_object(name, "agent"))
    except ConfigError:
        if is_place(name):
            raise
        return Actor(name=name, agent=agent_named(name))  # which names the nearest of the built-in ones


def agent_class_named(name: str) -> type[BaseAgent]:
    """An agent that plays in an environment. Raises ConfigError for a program or workflow."""
    actor = actor_named(name)
    if actor.agent is None:
        raise ConfigError(
            f"`{name}` is no agent of an environment but a program or workflow; train it with "
            f"rllm train BENCHMARK --agent {name}."
        )
    return actor.agent


def program_named(name: str) -> Actor:
    """A program or workflow that brings its own tasks. Raises ConfigError for an agent: it needs a world."""
    if not is_place(name) and name in benchmark_names():
        raise ConfigError(
            f"`{name}` is a benchmark, which brings its own tasks; leave --dataset out, or name a program, "
            "such as my_flow.py:solve."
        )
    if name.startswith(PREFIX):
        return _harness(name)
    if is_task_program(name):
        flow = task_program(name).flow
        return Actor(name=flow.name, flow=flow)
    actor = _actor(agent_object(name, "program"))
    if actor.agent is not None:
        raise ConfigError(
            f"`{name}` is an agent, which acts in a world: name a benchmark, and it with --agent {name}."
        )
    return actor


def is_place(name: str) -> bool:
    """Whether it says where something is, as `package.module:name` and `file.py` do."""
    return ":" in name or name.endswith(".py")


def _harness(name: str) -> Actor:
    harness = Harness(harness_named(name.removeprefix(PREFIX)))
    flow = AgentFlow(
        harness.run,
        harness.name,
        max_concurrent=MOST_AT_ONCE,
        prepare=harness.install,
        timeout_s=harness.spec.wall_s + SETTING_UP_S,
        budget=harness.spec.call_budget,
    )
    return Actor(name=flow.name, flow=flow)


def _actor(target: object) -> Actor:
    if inspect.isclass(target) and issubclass(target, BaseAgent):
        return Actor(name=target.__name__, agent=target)
    if inspect.isclass(target) and issubclass(target, Workflow):
        return Actor(name=target.__name__, workflow=target)
    flow = as_flow(target)
    return Actor(name=flow.name, flow=flow)
