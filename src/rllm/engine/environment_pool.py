"""Synchronous environments on a bounded set of threads, off the event loop.

    call(fn, *args) ──► waiting ──► one awake thread ──► done list ──► one wake-up of the loop for all of them
                           │
    tick, every few ms     ├─ the threads that are awake are all busy for long: more are woken
    while any call is out  └─ one runs for longer than it may: another takes its place

Most environments answer in microseconds, and then every thread that wakes up costs more than the work: so
there is one, and jobs queue in front of it. Where environments block, there are as many as are needed. A
thread wakes the loop only when no wake-up is on its way, and what has arrived is handed over in slices, so
that thousands at once hold up nobody.
"""

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rllm.errors import error_text

T = TypeVar("T")

MOST_A_SLICE = 128
"""Results that are handed over between two looks at what else the loop has to do."""
TICK_S = 0.01
"""The interval at which threads are checked, and the precision of time limits."""
SLOW_S = 0.005
"""Jobs that take longer than this on average block, so each gets a thread at once."""


@dataclass(slots=True, eq=False)
class _Job:
    context: Context
    """The context of the caller: the next environment does not see what this one sets in it."""
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    future: "asyncio.Future[Any]"
    timeout_s: float


@dataclass(slots=True, eq=False)
class _Worker:
    job: _Job | None = None
    started_at: float = field(init=False)
    """When it took the job, by `time.monotonic`."""
    is_replaced: bool = False
    """It is stuck in its job, and another one has taken its place."""
    wake: threading.Lock = field(default_factory=threading.Lock)
    """Held while there is nothing for it to do."""


class EnvironmentPool:
    """Runs blocking calls for one event loop. A call that never returns keeps one daemon thread."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        """At most so many calls at the same time. Threads start when they are needed."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Around what says who is awake and what waits: `_waiting`, `_busy`, `_idle`, `closed`."""
        self._waiting: deque[_Job] = deque()
        self._busy: set[_Worker] = set()
        """Awake."""
        self._idle: list[_Worker] = []
        self._closed = False
        self._done: deque[tuple[_Job, Any, BaseException | None]] = deque()
        self._wake_up_sent = False
        self._mean_s = 0.0
        """The mean duration of jobs, the newest counting most."""
        self._out: set[_Job] = set()
        """Calls that have been made and not settled. A set and no number: one that `_tick` refuses as its
        thread ends it is settled twice."""
        self._timer: asyncio.TimerHandle | None = None

    def call(self, fn: Callable[..., T], *args: Any, timeout_s: float) -> "asyncio.Future[T]":
        """`fn(*args)` in a thread. TimeoutError when it runs for `timeout_s`; waiting for a thread is free.

        A thread that is stuck is then replaced, also when the caller was cancelled and no longer waits.
        Raises RuntimeError where the system lets no thread start and none is there.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        job = _Job(copy_context(), fn, args, future, timeout_s)
        with self._lock:
            self._waiting.append(job)
            if not self._busy or self._mean_s > SLOW_S:
                try:
                    self._wake_one()
                except RuntimeError:
                    self._waiting.remove(job)
                    raise
        self._out.add(job)
        # No tick while nothing is out: an idle pool takes nothing of the loop's time.
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._tick)
        return future

    def _wake_one(self) -> None:
        """Under the lock: another thread for what waits, if there may be one. RuntimeError where there can be
        none at all; what waits is done by the others where only this one could not start."""
        if self._idle:
            worker = self._idle.pop()
            self._busy.add(worker)
            worker.wake.release()
        elif len(self._busy) < self.num_workers:
            worker = _Worker()
            worker.wake.acquire()
            self._busy.add(worker)
            thread = threading.Thread(target=self._work, args=(worker,), name="rllm-environment", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._busy.remove(worker)
                if not self._busy:
                    raise

    def _tick(self) -> None:
        now = time.monotonic()
        late: list[_Job] = []
        with self._lock:
            for worker in self._busy.copy():
                job = worker.job
                if job is not None and now >= worker.started_at + job.timeout_s:
                    worker.is_replaced = True
                    self._busy.remove(worker)
                    late.append(job)
            all_are_slow = all(worker.job and now > worker.started_at + SLOW_S for worker in self._busy)
            if self._waiting and all_are_slow:
                try:
                    # As many again as are awake: slow environments have all their threads within a few ticks,
                    # and one slow moment does not start them all.
                    for _ in range(min(len(self._waiting), max(1, len(self._busy)))):
                        self._wake_one()
                except RuntimeError as error:
                    self._refuse(self._waiting, error)
                    self._waiting.clear()
        for job in late:
            self._refuse([job], TimeoutError(f"The environment did not answer within {job.timeout_s:g} s."))
        self._timer = self._loop.call_later(TICK_S, self._tick) if self._out else None

    def _refuse(self, jobs: Iterable[_Job], error: Exception) -> None:
        for job in jobs:
            self._out.discard(job)
            if not job.future.done():
                job.future.set_exception(error)

    def _next(self, worker: _Worker) -> _Job | None:
        """The next job for a thread, which sleeps until there is one; None when it is to end."""
        while True:
            with self._lock:
                worker.job = None
                if worker.is_replaced:
                    return None
                if self._waiting:
                    worker.started_at = time.monotonic()
                    worker.job = self._waiting.popleft()
                    return worker.job
                self._busy.discard(worker)
                if self._closed:
                    return None
                self._idle.append(worker)
            worker.wake.acquire()

    def _work(self, worker: _Worker) -> None:
        while (job := self._next(worker)) is not None:
            result: Any = None
            error: BaseException | None = None
            # A caller that was cancelled while its job waited needs no call any more.
            if not job.future.done():
                try:
                    result = job.context.run(job.fn, *job.args)
                except Exception as user_error:  # noqa: BLE001  handed to whoever awaits the call
                    error = user_error
                except BaseException as user_error:  # noqa: BLE001  sys.exit() ends a rollout, not the run
                    error = RuntimeError(
                        f"The environment raised {type(user_error).__name__}({error_text(user_error)})."
                    )
                    error.__cause__ = user_error
                # Without the lock: an update that is lost only changes when threads are woken.
                self._mean_s += 0.1 * (time.monotonic() - worker.started_at - self._mean_s)
            self._done.append((job, result, error))
            if self._wake_up_sent:
                continue
            self._wake_up_sent = True
            try:
                self._loop.call_soon_threadsafe(self._settle)
            except RuntimeError:  # the loop was closed while an abandoned call was still running
                return

    def _settle(self) -> None:
        # First, so that what arrives from here on sends a wake-up of its own.
        self._wake_up_sent = False
        for _ in range(MOST_A_SLICE):
            if not self._done:
                return
            job, result, error = self._done.popleft()
            self._out.discard(job)
            if job.future.done():
                if inspect.iscoroutine(result):  # of an async method, which nobody waits for any more
                    result.close()
            elif error is None:
                job.future.set_result(result)
            elif isinstance(error, StopIteration):  # a future takes it for its own end
                job.future.set_exception(RuntimeError("The environment raised StopIteration()."))
            else:
                job.future.set_exception(error)
        if self._done and not self._wake_up_sent:
            self._wake_up_sent = True
            self._loop.call_soon(self._settle)

    def close(self) -> None:
        """Threads end after what they are doing."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for worker in idle:
                worker.wake.release()
