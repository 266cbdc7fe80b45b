"""The one thread that writes runs: what many requests ask for at a time is synced to the disk once.

runtimes ──call(work)──► queue ──all that is there──► RunStore.commit ──► each caller its own outcome
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rllm.worker.store import RunStore

_T = TypeVar("_T")
_MAX_TOGETHER = 512


@dataclass(slots=True, frozen=True)
class _Order:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[Any]"


class StoreThread:
    """Owns `store` until it is closed."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="worker-store")
        self._thread.start()

    async def call(self, work: Callable[[], _T]) -> _T:
        """The return value of `work`, or its exception, once it is on disk. Raises StorageError where the
        disk refuses."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()
        self._orders.put(_Order(work, loop, done))
        return await done

    async def try_to_write(self) -> None:
        """Raises StorageError where no run could be kept now. Waits for the disk, twice."""
        # Two transactions: pages that are freed in the one that takes them are never written.
        await self.call(self.store.fill)
        await self.call(self.store.empty)

    def close(self) -> None:
        """Finish what was ordered, then close the store."""
        self._orders.put(None)
        self._thread.join()
        self.store.close()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            orders = [order]
            while len(orders) < _MAX_TOGETHER and not self._orders.empty():
                following = self._orders.get()
                if following is None:
                    # Put back, so that the thread ends after the orders that came before it.
                    self._orders.put(None)
                    break
                orders.append(following)
            try:
                outcomes = self.store.commit([each.work for each in orders])
            except Exception as error:  # noqa: BLE001  every caller gets it
                outcomes = [error] * len(orders)
            pairs = list(zip(orders, outcomes, strict=True))
            for loop in {each.loop for each in orders}:
                own = [(each.done, outcome) for each, outcome in pairs if each.loop is loop]
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_settle, own)


def _settle(outcomes: list[tuple["asyncio.Future[Any]", Any]]) -> None:
    for done, outcome in outcomes:
        if done.done():  # its caller was cancelled
            continue
        if isinstance(outcome, BaseException):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)
