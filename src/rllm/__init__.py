"""Reinforcement learning for language agents: rollouts, training and serving through one interface.

The names people type most are importable from here. Each is looked up in its room when it is first used, so
that `import rllm` costs nothing: no room is imported before somebody asks for what it holds.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rllm.published.finder import install as _register_published_names

if TYPE_CHECKING:  # what an editor reads; a test holds it equal to the table below
    from rllm.agents import BaseAgent as BaseAgent
    from rllm.agents import rollout as rollout
    from rllm.engine import AgentExecutionEngine as AgentExecutionEngine
    from rllm.engine import AgentWorkflowEngine as AgentWorkflowEngine
    from rllm.engine import run as run
    from rllm.environments import BaseEnv as BaseEnv
    from rllm.inference import ScriptedClient as ScriptedClient
    from rllm.published.trainers import AgentTrainer as AgentTrainer
    from rllm.rewards.evaluator import evaluator as evaluator
    from rllm.types import Action as Action
    from rllm.types import AgentConfig as AgentConfig
    from rllm.types import Episode as Episode
    from rllm.types import EvalOutput as EvalOutput
    from rllm.types import SamplingParams as SamplingParams
    from rllm.types import Signal as Signal
    from rllm.types import Step as Step
    from rllm.types import Task as Task
    from rllm.types import TerminationReason as TerminationReason
    from rllm.types import Trajectory as Trajectory
    from rllm.types import TrajectoryGroup as TrajectoryGroup
    from rllm.workflows import Workflow as Workflow

_HOME_OF = {
    "Action": "rllm.types",
    "AgentConfig": "rllm.types",
    "AgentExecutionEngine": "rllm.engine",
    "AgentTrainer": "rllm.published.trainers",
    "AgentWorkflowEngine": "rllm.engine",
    "BaseAgent": "rllm.agents",
    "BaseEnv": "rllm.environments",
    "Episode": "rllm.types",
    "EvalOutput": "rllm.types",
    "SamplingParams": "rllm.types",
    "ScriptedClient": "rllm.inference",
    "Signal": "rllm.types",
    "Step": "rllm.types",
    "Task": "rllm.types",
    "TerminationReason": "rllm.types",
    "Trajectory": "rllm.types",
    "TrajectoryGroup": "rllm.types",
    "Workflow": "rllm.workflows",
    "evaluator": "rllm.rewards.evaluator",
    "rollout": "rllm.agents",
    "run": "rllm.engine",
}


_register_published_names()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _installed_version()
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module `rllm` has no attribute `{name}`")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, "__version__"})


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # brings a mail parser: not for every import

    try:
        return version("rllm")
    except PackageNotFoundError:
        return "0+checkout"  # run from a source tree that was put on the path without being installed
