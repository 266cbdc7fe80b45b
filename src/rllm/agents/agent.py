"""The module from which published programs import the nouns; their home is `rllm.types`."""

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
    "Episode",
    "Outcome",
    "Step",
    "TerminationEvent",
    "TerminationReason",
    "Trajectory",
    "TrajectoryGroup",
]
