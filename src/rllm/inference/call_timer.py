"""Time limits of very many calls that all may take equally long.

    begin ──► deque, in the order in which they run out ──► one timer of the loop, for the first
    end   ──► taken out when it is first in line

`asyncio.timeout` sets a timer for each call, which with thousands of calls a second is a good part of what a
call costs. The meaning is the same: the task is cancelled, and what it was in raises TimeoutError.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary


@dataclass(slots=True, eq=False)
class TimedCall:
    """One call under way."""

    task: "asyncio.Task[Any] | None"
    ends_at: float
    cancelling: int
    """The task's cancellation count when the call began."""
    ran_out: bool = False


class CallTimer:
    """All calls of one event loop that may take `limit_s`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self.limit_s = limit_s
        self._loop = loop
        self._calls: deque[TimedCall] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> TimedCall:
        """A call of the current task begins."""
        task = asyncio.current_task(self._loop)
        assert task is not None, "a coroutine runs in a task"
        call = TimedCall(task, self._loop.time() + self.limit_s, task.cancelling())
        self._calls.append(call)
        if self._timer is None:
            self._timer = self._loop.call_at(call.ends_at, self._ring)
        return call

    def end(self, call: TimedCall) -> None:
        """The call is over, however it ended."""
        # The cancellation was the timer's own: left in the count, it would be taken for one from outside.
        if call.ran_out and call.task is not None:
            call.task.uncancel()
        call.task = None
        calls = self._calls
        while calls and calls[0].task is None:
            calls.popleft()

    def turns_into_timeout(self, call: TimedCall) -> bool:
        """Whether a CancelledError in the call came from its time being up, and from nothing else. Asked
        before `end`."""
        return call.ran_out and call.task is not None and call.task.cancelling() <= call.cancelling + 1

    def _ring(self) -> None:
        calls, now = self._calls, self._loop.time()
        while calls and (calls[0].task is None or calls[0].ends_at <= now):
            call = calls.popleft()
            if call.task is not None:
                call.ran_out = True
                call.task.cancel()
        self._timer = self._loop.call_at(calls[0].ends_at, self._ring) if calls else None


_TIMERS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, CallTimer]] = WeakKeyDictionary()


def call_timer(limit_s: float) -> CallTimer:
    """The running loop's timer for calls that may take so long."""
    loop = asyncio.get_running_loop()
    timers = _TIMERS.get(loop)
    if timers is None:
        timers = _TIMERS[loop] = {}
    timer = timers.get(limit_s)
    if timer is None:
        timer = timers[limit_s] = CallTimer(loop, limit_s)
    return timer
