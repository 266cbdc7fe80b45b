"""Where a run's numbers go.

trainer ──log(step, phase, metrics)──► Trackers ──► JsonlTracker   the record, metrics.jsonl
                                               └──► LiveView       the screen
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from rllm.errors import ConfigError

Metric = float | int | str


class Counted(Protocol):
    """Episodes of an engine."""

    in_flight: int

    @property
    def settled(self) -> int: ...


class ProgressSource(Protocol):
    """An engine, as far as a screen shows it."""

    @property
    def counts(self) -> Counted: ...

    def live(self) -> Sequence[object]:
        """The rollouts being played, the oldest first; `str` says who, how old, and what it waits for."""
        ...


class Tracker(Protocol):
    """One place that numbers go to."""

    def begin(self, phase: str) -> None:
        """A phase begins; its first numbers may take a while."""
        ...

    def advance(self, done: int, total: int) -> None:
        """So much of the phase is done, whose numbers come at its end: for whoever watches."""
        ...

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        """Take the numbers of one finished step; `step` counts within `phase`, from 0."""
        ...

    def close(self) -> None:
        """Let go of files and screens. Nothing is logged afterwards."""
        ...


def require_tracker(tracker: Tracker | None) -> None:
    """Raises ConfigError, before any work, for an object without `log`, which alone is enough."""
    if tracker is not None and not callable(getattr(tracker, "log", None)):
        raise ConfigError(
            f"The tracker {type(tracker).__name__} has no method `log`; it is given (step, phase, metrics), "
            "as rllm.tracking.base.Tracker says."
        )


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def begin(self, phase: str) -> None:
        for tracker in self._trackers:
            tracker.begin(phase)

    def watch(self, engine: ProgressSource) -> None:
        """Let those that show more than numbers look at who plays."""
        for tracker in self._trackers:
            look = getattr(tracker, "watch", None)
            if look is not None:
                look(engine)

    def note(self, line: str) -> None:
        """Let those that show more than numbers show a line."""
        for tracker in self._trackers:
            show = getattr(tracker, "note", None)
            if show is not None:
                show(line)

    def advance(self, done: int, total: int) -> None:
        for tracker in self._trackers:
            tracker.advance(done, total)

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        for tracker in self._trackers:
            tracker.log(step, phase, metrics)

    def close(self) -> None:
        """Close every tracker, the last first, also when closing one of them fails."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)
