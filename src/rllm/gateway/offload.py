"""Work of size, kept off the event loop: everybody else is answered meanwhile.

    await large.run(size, work, *arguments)    small: here and now      large: in a thread, one after another

One after another bounds the memory: never more than one large piece of work is under way.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

_R = TypeVar("_R")
_A = TypeVarTuple("_A")


class LargeWork:
    """One thread for pieces of work larger than `inline_size`, in whatever unit `run` is given."""

    def __init__(self, name: str, *, inline_size: int) -> None:
        self.inline_size = inline_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rllm-{name}")

    async def run(self, size: int, work: Callable[[*_A], _R], *arguments: *_A) -> _R:
        """Cancelled while it waits for the thread, the work is never begun."""
        if size <= self.inline_size:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """What is under way ends by itself; nobody waits for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
