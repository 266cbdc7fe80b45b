"""Seconds that judges work while an environment makes a step.

with GradingClock() as clock: env.step(action) ──► the judge: with grading(): … ──► clock.seconds
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token

_running: ContextVar["GradingClock | None"] = ContextVar("grading clock", default=None)


class GradingClock:
    """Adds up the `grading` blocks of this thread or task, and of those that take its context over."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._token: Token[GradingClock | None] | None = None

    def __enter__(self) -> "GradingClock":
        self._token = _running.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._token is not None, "it was entered"
        _running.reset(self._token)


@contextmanager
def grading() -> Iterator[None]:
    """The time of what is inside counts as grading, where a GradingClock runs."""
    clock, started_s = _running.get(), time.perf_counter()
    try:
        yield
    finally:
        if clock is not None:
            clock.seconds += time.perf_counter() - started_s
