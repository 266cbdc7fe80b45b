"""The module from which published programs import the nouns and BaseAgent.

Their homes are `rllm.types` and `rllm.agents.base`.
"""

from rllm.agents.base import BaseAgent
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

__all__ = [
    "Action",
    "BaseAgent",
    "Episode",
    "Outcome",
    "Step",
    "TerminationEvent",
    "TerminationReason",
    "Trajectory",
    "TrajectoryGroup",
]
