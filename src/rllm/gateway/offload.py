"""Work that takes long, kept off the event loop: everybody else is answered meanwhile.

    await off_loop.run(work, *arguments)    in a thread, one piece of work after another

One after another bounds the memory: never more than one large piece is under way in a thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

_R = TypeVar("_R")
_A = TypeVarTuple("_A")


class OffLoop:
    """One thread, from its first piece of work on; closed, it begins anew with the next."""

    def __init__(self, name: str) -> None:
        self._name = f"rllm-{name}"
        self._thread: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[*_A], _R], *arguments: *_A) -> _R:
        """Cancelled while it waits for the thread, the work is never begun; later, its end is waited for, so
        that a lock around it is held while it runs."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        under_way = self._thread.submit(work, *arguments)
        outcome = asyncio.wrap_future(under_way)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if not under_way.cancel():
                await asyncio.wait({outcome})
            raise

    def close(self) -> None:
        """Begin nothing more. The work under way ends by itself; nobody waits for it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
