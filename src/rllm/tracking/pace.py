"""The time that is left, and a line now and then while nothing happens.

StepPace       step(done) ──► intervals, the longest left out ──► left_s(total)
Reminder       thread ──looks──► nothing was said for a minute? ──► speak()
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Self

REMIND_EVERY_S = 60.0
_WINDOW = 256
"""Steps that an estimate looks back at."""
_LEFT_OUT = 0.05
"""Share of the longest intervals that do not count, one at least: a single very long answer says nothing of
the others."""


class StepPace:
    """The pace of what is done step by step, from the first `step` on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        """(time, steps done by then)"""

    def step(self, done: int) -> None:
        """So many steps are done now."""
        if not self._moments or done > self._moments[-1][1]:
            self._moments.append((self._clock(), done))

    def left_s(self, total: int) -> float | None:
        """Seconds until `total` steps are done; None while nothing tells."""
        intervals = sorted(
            ((later_s - earlier_s) / (later - earlier), later - earlier)
            for (earlier_s, earlier), (later_s, later) in pairwise(self._moments)
        )
        if not intervals:
            return None
        num_left_out = max(1, round(_LEFT_OUT * len(intervals))) if len(intervals) > 2 else 0
        counted = intervals[: len(intervals) - num_left_out]
        steps = sum(number for _, number in counted)
        pace_s = sum(step_s * number for step_s, number in counted) / steps
        return pace_s * max(0, total - self._moments[-1][1])


class Reminder:
    """Calls `speak` in a thread of its own when nothing was said for `every_s`. A context manager."""

    def __init__(
        self,
        speak: Callable[[], None],
        *,
        every_s: float = REMIND_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._speak = speak
        self._every_s = every_s
        self._clock = clock
        self._said_at = clock()
        self._over = threading.Event()

    def note(self) -> None:
        """Something was said."""
        self._said_at = self._clock()

    def is_due(self) -> bool:
        return self._clock() - self._said_at >= self._every_s

    def look(self) -> None:
        """Speak, if it is time."""
        if self.is_due():
            self.note()
            self._speak()

    def __enter__(self) -> Self:
        self.note()
        threading.Thread(target=self._watch, name="rllm-reminder", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s / 20):
            self.look()
