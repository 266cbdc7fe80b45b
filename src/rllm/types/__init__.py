"""The nouns of rLLM: what is asked, what was said, what happened, what is learned from. No I/O, no engine.

`TrainingSample` and `TrainingBatch` hold arrays; they are looked up when first used, so that a program which
only speaks of tasks and episodes does not wait for numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rllm.types.episode import (
    Action,
    Episode,
    Outcome,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    TrajectoryGroup,
)
from rllm.types.evaluation import EvalOutput, Signal
from rllm.types.messages import FinishReason, LogprobMeaning, Message, ModelOutput, SamplingParams, ToolCall
from rllm.types.prefix import Prefix
from rllm.types.task import AgentConfig, EpisodeId, Task

if TYPE_CHECKING:
    from rllm.types.sample import NOT_SAMPLED, TrainingBatch, TrainingSample

__all__ = [
    "NOT_SAMPLED",
    "Action",
    "AgentConfig",
    "Episode",
    "EpisodeId",
    "EvalOutput",
    "FinishReason",
    "LogprobMeaning",
    "Message",
    "ModelOutput",
    "Outcome",
    "Prefix",
    "SamplingParams",
    "Signal",
    "Step",
    "Task",
    "TerminationEvent",
    "TerminationReason",
    "ToolCall",
    "TrainingBatch",
    "TrainingSample",
    "Trajectory",
    "TrajectoryGroup",
]

_IN_SAMPLE = ("NOT_SAMPLED", "TrainingBatch", "TrainingSample")


def __getattr__(name: str) -> Any:
    if name not in _IN_SAMPLE:
        raise AttributeError(f"module `rllm.types` has no attribute `{name}`")
    return getattr(importlib.import_module("rllm.types.sample"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_IN_SAMPLE})
