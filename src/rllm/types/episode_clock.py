"""The one clock of every engine: how long an episode works, and how long it waits for the model.

    begin ──► works: `work_s` runs ──open_call──► waits: `work_s` stands still ──close_call──► works
                                                   `silence_s` runs

    work_s      the episode's own time: environments, agents, programs      ──► its time is up
    wall_s      all of its time, waiting included                           ──► its time is up
    silence_s   the model answers no call of any episode, and one is open   ──► the model has failed

Calls may overlap: the episode waits while at least one is open. All times are of the event loop's clock.
"""

import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rllm.errors import ConfigError, InferenceError

if TYPE_CHECKING:
    from collections.abc import Generator

MODEL_TIMEOUT_S = 480.0
"""Default of `silence_s`: below the 600 s after which clients give a call up, so that a server that hangs is
found before a program takes the end of its call for its own."""

_NEVER = float("inf")


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeLimits:
    """Time limits of one episode; None is no limit."""

    work_s: float | None = None
    wall_s: float | None = None
    silence_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("episode_timeout_s", self.work_s),
            ("wall_timeout_s", self.wall_s),
            ("model_timeout_s", self.silence_s),
        ):
            if value is not None and not value > 0.0:
                raise ConfigError(f"`{name}` is {value}; it must be a number of seconds above 0.")


@dataclass(slots=True)
class ModelPulse:
    """Signs of life of the model of one engine, shared by the clocks of its episodes."""

    answered_at: float = float("-inf")
    """When it last answered, or gave a part of an answer, to any caller."""


class ClockEnd(StrEnum):
    """The limit that was reached."""

    WORK = "work"
    WALL = "wall"
    SILENCE = "silence"


class EpisodeClock:
    """The clock of one try of one episode. It rings once, in the event loop that `begin` was called in."""

    def __init__(
        self,
        limits: EpisodeLimits,
        pulse: ModelPulse | None = None,
        *,
        deadline_at: float | None = None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """`deadline_at`, by the loop's clock, is one more limit of its wall time. `on_answer` hears of every
        answered call."""
        self.limits = limits
        self.end: ClockEnd | None = None
        """The limit that was reached first."""
        self._pulse = pulse or ModelPulse()
        self._deadline_at = _NEVER if deadline_at is None else deadline_at
        self._left_s = _NEVER if limits.work_s is None else limits.work_s
        self._on_answer = on_answer
        self._calls = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ring: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        """When it last began to work, or to wait."""

    def begin(self, ring: Callable[[], None]) -> None:
        """Start; `ring` is called when a limit is reached, unless `stop` comes first."""
        self._ring = ring
        self._since = self._loop.time()
        if self.limits.wall_s is not None:
            self._deadline_at = min(self._deadline_at, self._since + self.limits.wall_s)
        self._arm(self._since)

    def promise(self, wall_s: float) -> None:
        """One more limit of its wall time, from now on. To be called before `begin`."""
        self._deadline_at = min(self._deadline_at, self._loop.time() + wall_s)

    def stop(self) -> None:
        """End without ringing."""
        self._ring = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def open_call(self) -> None:
        """A model call begins, its queueing included: the episode's own time stands still."""
        self._calls += 1
        if self._calls == 1:
            now = self._loop.time()
            self._left_s -= now - self._since
            self._since = now

    def close_call(self) -> None:
        """A model call is over, however it ended."""
        self._calls -= 1
        if self._calls == 0:
            self._since = self._loop.time()
            # The timer may stand at a later moment: while a call is open it looks for silence alone.
            if self._timer is None or self._timer.when() > self._since + self._left_s:
                self._arm(self._since)

    def note_part(self) -> None:
        """A part of an answer has come."""
        self._pulse.answered_at = self._loop.time()

    def note_answer(self) -> None:
        """A call was answered."""
        self.note_part()
        self._on_answer()

    @contextmanager
    def call(self) -> "Generator[None]":
        """One model call; leaving it without an error means that it was answered."""
        self.open_call()
        try:
            yield
            self.note_answer()
        finally:
            self.close_call()

    def is_over(self) -> bool:
        """Whether a limit is reached, also where the loop was too busy for the clock to ring."""
        return self.end is not None or self._find_end(self._loop.time()) is not None

    @property
    def limit_text(self) -> str:
        """The limit that was reached, such as `300 s, model calls not counted`."""
        match self.end:
            case ClockEnd.WORK:
                return f"{self.limits.work_s:g} s, model calls not counted"
            case ClockEnd.SILENCE:
                return f"{self.limits.silence_s:g} s without an answer of the model"
            case _:
                return f"{self.limits.wall_s:g} s"

    def silence_error(self) -> InferenceError | None:
        """The failure of the model, where its silence is what ended the episode.

        It is final: the same call would wait as long again.
        """
        if self.end is not ClockEnd.SILENCE:
            return None
        return InferenceError(
            f"The model has answered no call for {self.limits.silence_s:g} s (`inference.model_timeout_s`; "
            "--model-timeout of `rllm eval`): its server hangs, or is too slow for that limit.",
            is_final=True,
        )

    def _find_end(self, now: float) -> ClockEnd | None:
        if now >= self._deadline_at:
            return ClockEnd.WALL
        if self._calls == 0:
            return ClockEnd.WORK if now >= self._since + self._left_s else None
        return ClockEnd.SILENCE if now >= self._silent_at else None

    @property
    def _silent_at(self) -> float:
        silence_s = self.limits.silence_s
        return _NEVER if silence_s is None else max(self._since, self._pulse.answered_at) + silence_s

    def _arm(self, now: float) -> None:
        """Set the timer for the first moment at which a limit may be reached."""
        if self._ring is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        # A call that begins later than now cannot be met by silence earlier than this.
        silent_at = _NEVER if self.limits.silence_s is None else now + self.limits.silence_s
        at = min(
            self._deadline_at, self._silent_at if self._calls else min(self._since + self._left_s, silent_at)
        )
        self._timer = None if at == _NEVER else self._loop.call_at(at, self._look, at)

    def _look(self, due_at: float) -> None:
        # A loop may call a little early, by the resolution of its clock.
        now = max(due_at, self._loop.time())
        self._timer = None
        self.end = self._find_end(now)
        if self.end is None:
            self._arm(now)
        elif self._ring is not None:
            self._ring()
