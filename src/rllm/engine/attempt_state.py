"""The state of every rollout, which it writes itself as it goes on.

    rollout ──► Vitals: turn, what it waits for ──► live_of ──► LiveRollout: progress view, watchdogs

Writing costs a rollout an assignment; reading, which is rare, pays for the rest.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rllm.engine.attempts import EpisodeCounts
from rllm.types.episode import Outcome
from rllm.types.task import EpisodeId


@dataclass(kw_only=True, slots=True, frozen=True)
class LiveRollout:
    """One rollout at one moment."""

    episode: EpisodeId
    age_s: float
    turn: int
    """Turns that it has begun."""
    waits_for: str
    """Such as `model` or `environment.step`."""

    def __str__(self) -> str:
        return f"{self.episode}, {self.age_s:.1f} s old, in turn {self.turn}, waits for {self.waits_for}"


@dataclass(slots=True, eq=False)
class Vitals:
    """The state of one rollout, for whoever looks on."""

    episode: EpisodeId
    counts: EpisodeCounts = field(default_factory=EpisodeCounts)
    """The counts of the engine; every turn that is made is counted there."""
    started_at: float = field(default_factory=time.monotonic)
    turn: int = 0
    waits_for: str = "its turn"
    call_retries: int = 0
    """Model calls that were asked again."""
    failure: BaseException | None = None
    """The reason that its latest try failed."""
    stop_outcome: Outcome | None = None
    """The outcome that it counts as when it was told to stop."""
    interrupt: Callable[[], None] | None = None
    """Ends it wherever it waits; set while it is played."""

    def stop(self, outcome: Outcome) -> None:
        """End the rollout now: it counts as `outcome`."""
        # The first reason stays: who was told to stop may be told again for another one.
        if self.stop_outcome is None:
            self.stop_outcome = outcome
            if self.interrupt is not None:
                self.interrupt()


def live_of(rollouts: Iterable[Vitals]) -> list[LiveRollout]:
    """The states of the rollouts, the oldest first."""
    now = time.monotonic()
    live_values = [
        LiveRollout(
            episode=each.episode, age_s=now - each.started_at, turn=each.turn, waits_for=each.waits_for
        )
        for each in rollouts
    ]
    return sorted(live_values, key=lambda each: -each.age_s)
