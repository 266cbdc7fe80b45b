"""Calls pass while it is open; whoever closes it waits until nobody is inside.

    call ──► passing() ──► inside ──► out
                 └ closed: waits                 closed() ──► waits for those inside ──► alone ──► opens

Of one event loop at a time: a call from another one goes by its own.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """Between the calls of a client and what must not happen during any of them."""

    def __init__(self) -> None:
        self._num_inside = 0
        self._condition = asyncio.Condition()
        self._is_closed = False

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        while self._is_closed:
            async with self._condition:
                await self._condition.wait_for(lambda: not self._is_closed)
        # Nothing is awaited since the gate was found open, so nobody has closed it in between.
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._is_closed:
                async with self._condition:
                    self._condition.notify_all()

    @asynccontextmanager
    async def closed(self, hurry: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Alone, once those inside are out; `hurry` may make them go. Raises RuntimeError when somebody else
        is."""
        if self._is_closed:
            raise RuntimeError("The gate is closed already; two publishes at once have no order.")
        self._is_closed = True
        try:
            hurry()
            async with self._condition:
                await self._condition.wait_for(lambda: self._num_inside == 0)
            yield
        finally:
            self._is_closed = False
            async with self._condition:
                self._condition.notify_all()
