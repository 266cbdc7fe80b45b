"""The treatment of trajectories that a limit cut off: kept, paid otherwise, or left out. A pure function.

Its reward says what had been earned until then, so how much it says about the policy depends on the limit:
out of turns is often a failure of its own, out of time often none. `rollout.truncation` decides, limit by
limit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rllm.config.policies import TruncationConfig
from rllm.types.episode import LEARNABLE, Episode, TerminationReason

_LIMIT_OF = {
    TerminationReason.MAX_TURNS_EXCEEDED: "max_turns",
    TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED: "prompt_length",
    TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED: "response_length",
    TerminationReason.TIMEOUT: "timeout",
    TerminationReason.MAX_COST_EXCEEDED: "cost",
}
"""Reason -> key of `rollout.truncation`. What ended for another reason ended by itself: it is kept."""


@dataclass(kw_only=True, slots=True)
class Treated:
    """The differences between the episodes as recorded and as trained on."""

    masked: set[str] = field(default_factory=set[str])
    """Uids of trajectories that are neither compared nor learned from."""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Trajectory uid -> what it is paid instead of its own reward."""


def treat_truncated(episodes: Iterable[Episode], treatment: TruncationConfig) -> Treated:
    """Treatment of the truncated trajectories of the learnable episodes. Changes none of them.

    A trajectory that does not say itself why it ended, ended with its episode.
    """
    result = Treated()
    for episode in episodes:
        if episode.outcome not in LEARNABLE:
            continue
        for trajectory in episode.trajectories:
            own = trajectory.termination_reason is not TerminationReason.UNKNOWN
            limit = _LIMIT_OF.get((trajectory if own else episode).termination_reason)
            match getattr(treatment, limit) if limit else "keep":
                case "mask":
                    result.masked.add(trajectory.uid)
                case "zero":
                    result.rewards[trajectory.uid] = 0.0
                case "penalise" if isinstance(trajectory.reward, int | float):
                    result.rewards[trajectory.uid] = trajectory.reward - treatment.penalty
                case _:  # kept; a reward that is no number is named by whoever compares it
                    pass
    return result
