"""Thousands of answers that arrive at once are acted upon a slice at a time.

    answers ──► passed() ──► the first MOST of an iteration of the event loop go on at once
                   └────────► the others queue, and go on MOST an iteration

Between two slices the loop looks at everything else: sockets, timers, whoever watches. Without it, what
begins together stays together, and the loop is deaf for as long as all of them take.
"""

import asyncio
from collections import deque

MOST = 64
"""Rollouts that go on in one iteration; some 5 ms of work."""


class Turnstile:
    """A first-come, first-served gate of one event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._loop = asyncio.get_running_loop()
        self._most = most
        self._room = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def wait_to_pass(self) -> None:
        """Returns at once while there is room in this iteration, otherwise in a later one."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next)
        if self._room and not self._waiting:
            self._room -= 1
            return
        turn = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """A new iteration: room for so many again."""
        self._room = self._most
        while self._waiting and self._room:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled, where somebody no longer waits
                turn.set_result(None)
                self._room -= 1
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            self._loop.call_soon(self._next)
