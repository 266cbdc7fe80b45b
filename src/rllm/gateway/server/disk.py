"""Whether calls or runs can be recorded, as `/health` and `/ready` tell it: the store tries to write.

Many may ask at the same time; the disk is asked once a second at most.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_TIMEOUT_S = 5.0


class DiskCheck:
    """One store, in one event loop."""

    def __init__(self, try_to_write: Callable[[], Awaitable[object]]) -> None:
        """`try_to_write` raises where nothing could be recorded now."""
        self._try_to_write = try_to_write
        self._checking: asyncio.Task[bool] | None = None
        self._checked_at = -_INTERVAL_S
        self._is_writable = True

    async def is_writable(self) -> bool:
        """False also when the disk does not answer in time."""
        if time.monotonic() - self._checked_at < _INTERVAL_S:
            return self._is_writable
        if self._checking is None:
            self._checking = asyncio.create_task(self._check())
        try:
            # Shielded, because others wait for the same check, and a thread that writes cannot be cancelled.
            return await asyncio.wait_for(asyncio.shield(self._checking), _TIMEOUT_S)
        except TimeoutError:
            return False

    async def close(self) -> None:
        if self._checking is not None:
            await asyncio.wait({self._checking})

    async def _check(self) -> bool:
        try:
            await self._try_to_write()
        except Exception as error:  # noqa: BLE001  whatever it is, nothing can be recorded
            if self._is_writable:
                _log.warning("What comes in cannot be recorded, so it is not answered: %s", error)
            self._is_writable = False
        else:
            self._is_writable = True
        self._checked_at = time.monotonic()
        self._checking = None
        return self._is_writable
