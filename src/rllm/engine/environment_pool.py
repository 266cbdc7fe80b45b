"""Synchronous environments on a bounded set of threads, off the event loop.

    call(fn, *args) ──► queue ──► worker thread ──► done list ──► one wake-up of the loop for all of them

asyncio's own executor wakes the loop once per call; 128 rollouts that move at the same moment would pay for
128 wake-ups. Here a worker wakes the loop only when no wake-up is on its way, so short steps travel
together and a slow one delays nobody.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    future: "asyncio.Future[Any]"
    timeout_s: float
    timer: asyncio.TimerHandle | None = None
    started_at: float | None = None
    """When a worker took it, by `time.monotonic`; None while it waits for one."""
    finished: bool = False
    abandoned: bool = False
    """It took too long: another worker took the place of the one that is stuck in it."""


class EnvironmentPool:
    """Runs blocking calls for one event loop. A call that never returns keeps one daemon thread."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[_Job, Any, BaseException | None]] = deque()
        self._wake_up_sent = False
        self._lock = threading.Lock()
        for _ in range(num_workers):
            self._start_worker()

    def _start_worker(self) -> None:
        threading.Thread(target=self._work, name="rllm-environment", daemon=True).start()

    async def call(self, fn: Callable[..., T], *args: Any, timeout_s: float) -> T:
        """`fn(*args)` in a worker. TimeoutError when it runs for `timeout_s`; waiting for a worker is free.

        A stuck worker is then replaced, also when the caller was cancelled and no longer waits.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        job = _Job(fn, args, future, timeout_s)
        job.timer = self._loop.call_later(timeout_s, self._give_up, job)
        self._jobs.put(job)
        return await future

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            if job.finished or (job.started_at is None and job.future.done()):
                return
            began_s = time.monotonic() if job.started_at is None else job.started_at
            left_s = began_s + job.timeout_s - time.monotonic()
            if left_s > 0.0:
                job.timer = self._loop.call_later(left_s, self._give_up, job)
                return
            job.abandoned = True
        self._start_worker()
        if not job.future.done():
            job.future.set_exception(
                TimeoutError(f"The environment did not answer within {job.timeout_s:g} s.")
            )

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.future.done():
                continue
            job.started_at = time.monotonic()
            try:
                result, error = job.fn(*job.args), None
            except Exception as caught:  # noqa: BLE001  handed to whoever awaits the call
                result, error = None, caught
            with self._lock:
                job.finished = True
                if job.abandoned:
                    return
                self._done.append((job, result, error))
                if self._wake_up_sent:
                    continue
                self._wake_up_sent = True
            try:
                self._loop.call_soon_threadsafe(self._settle)
            except RuntimeError:  # the loop was closed while an abandoned call was still running
                return

    def _settle(self) -> None:
        with self._lock:
            self._wake_up_sent = False
        while self._done:
            job, result, error = self._done.popleft()
            assert job.timer is not None, "`call` set it"
            job.timer.cancel()
            if job.future.done():
                continue
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def close(self) -> None:
        """Workers end after what they are doing."""
        for _ in range(self.num_workers):
            self._jobs.put(None)
