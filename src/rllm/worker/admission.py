"""Admission of runs: some start now, some wait, and some are refused at once.

    arrive ──► room: start            more than `max_queue` wait, or it would end after its deadline:
           ──► none: wait in line     refused, with the seconds after which it is worth asking again

The expected wait is that of a queue served by `max_parallel` at the mean duration of the last runs.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_WEIGHT_OF_LAST = 0.1
"""The weight of the last run in the mean duration."""


class AdmissionRefused(Exception):
    """There is no room in time."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(kw_only=True, slots=True)
class Admission:
    """Bounds on what runs and waits at the same time. For one event loop."""

    max_parallel: int = 64
    max_queue: int = 1024
    num_running: int = 0
    num_waiting: int = 0
    num_refused: int = 0
    mean_duration_s: float = 0.0
    _room: asyncio.Semaphore = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.max_parallel)

    @property
    def expected_wait_s(self) -> float:
        """For one who comes now."""
        if self.num_running < self.max_parallel:
            return 0.0
        return (self.num_waiting + 1) / self.max_parallel * self.mean_duration_s

    def require_room(self, time_left_s: float) -> None:
        """Raises AdmissionRefused for who would have to wait and not be done in time."""
        wait_s = self.expected_wait_s
        if self.num_running < self.max_parallel or (
            self.num_waiting < self.max_queue and wait_s + self.mean_duration_s < time_left_s
        ):
            return
        self.num_refused += 1
        reason = (
            f"{self.num_waiting} runs wait already, and at most {self.max_queue} may"
            if self.num_waiting >= self.max_queue
            else f"a wait of {wait_s:.3g} s is expected and a run of {self.mean_duration_s:.3g} s, and "
            f"{time_left_s:.3g} s are left"
        )
        raise AdmissionRefused(f"Refused without an attempt: {reason}.", max(1.0, wait_s))

    @asynccontextmanager
    async def place(self, deadline_s: float) -> AsyncIterator[None]:
        """Room to run. `deadline_s` is on the loop's clock; raises TimeoutError when it comes first."""
        loop = asyncio.get_running_loop()
        self.num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._room.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        started_s = loop.time()
        try:
            yield
        finally:
            duration_s = loop.time() - started_s
            weight = _WEIGHT_OF_LAST if self.mean_duration_s else 1.0
            self.mean_duration_s += weight * (duration_s - self.mean_duration_s)
            self.num_running -= 1
            self._room.release()
