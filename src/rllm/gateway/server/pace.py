"""The number of requests that begin in one turn of the event loop, when thousands arrive together.

    request ──take──► begins in this turn, or waits for one of the next, in the order of arrival

Without it a burst is worked off in one turn of several seconds, in which no answer is passed on and no
connection is seen to be made: whoever waits for one gives up although it is there.
"""

import asyncio
from collections import deque

REQUESTS_PER_TURN = 64


class Pace:
    """For one event loop."""

    def __init__(self, per_turn: int = REQUESTS_PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turn_is_due = False

    async def take(self) -> None:
        """Returns when it is the request's turn."""
        if self._left > 0:
            self._left -= 1
            self._end_turn_soon()
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._end_turn_soon()
        await waiter

    def _end_turn_soon(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_is_due = False
        self._left = self._per_turn
        while self._waiting and self._left > 0:
            waiter = self._waiting.popleft()
            if not waiter.done():  # a client that went away has given its turn up
                waiter.set_result(None)
                self._left -= 1
        if self._waiting:
            self._end_turn_soon()
