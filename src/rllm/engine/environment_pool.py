"""Synchronous environments on a bounded set of threads, off the event loop.

    call(fn, *args) ──► queue ──► worker thread ──► done list ──► one wake-up of the loop for all that is done

asyncio's own executor wakes the loop once per call; a batch of 128 rollouts that move at the same moment would pay for 128
wake-ups. Here a worker wakes the loop only when no wake-up is on its way, so short steps travel together and a slow one
delays nobody.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]"]


class EnvironmentPool:
    """Runs blocking calls for one event loop. A call that never returns keeps one daemon thread and nothing else."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._wake_up_sent = False
        self._lock = threading.Lock()
        for _ in range(num_workers):
            self._start_worker()

    def _start_worker(self) -> None:
        threading.Thread(target=self._work, name="rllm-environment", daemon=True).start()

    async def call(self, fn: Callable[..., T], *args: Any, timeout_s: float) -> T:
        """`fn(*args)` in a worker. Raises TimeoutError after `timeout_s`; the stuck worker is then replaced."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((fn, args, future))
        timer = self._loop.call_later(timeout_s, self._give_up, future, timeout_s)
        try:
            return await future
        finally:
            timer.cancel()

    def _give_up(self, future: "asyncio.Future[Any]", timeout_s: float) -> None:
        if not future.done():
            self._start_worker()
            future.set_exception(TimeoutError(f"The environment did not answer within {timeout_s:g} s."))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            fn, args, future = job
            if future.cancelled():
                continue
            try:
                result, error = fn(*args), None
            except Exception as caught:  # noqa: BLE001  handed to whoever awaits the call
                result, error = None, caught
            self._done.append((future, result, error))
            with self._lock:
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
            future, result, error = self._done.popleft()
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def close(self) -> None:
        """Workers end after what they are doing."""
        for _ in range(self.num_workers):
            self._jobs.put(None)
