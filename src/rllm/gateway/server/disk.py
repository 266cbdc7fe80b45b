"""Whether calls can be recorded, as `/health` tells it: the ledger writes something of its own to see.

Many may ask at the same time; the disk is asked once a second at most.
"""

import asyncio
import logging
import time

from rllm.gateway.ledger import Ledger

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_TIMEOUT_S = 5.0


class DiskCheck:
    """Of one ledger, in one event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
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
            return await asyncio.wait_for(asyncio.shield(self._checking), _TIMEOUT_S)
        except TimeoutError:
            return False

    async def close(self) -> None:
        if self._checking is not None:
            await asyncio.wait({self._checking})

    async def _check(self) -> bool:
        try:
            await asyncio.to_thread(self._ledger.try_to_write)
        except Exception as error:  # noqa: BLE001  whatever it is, calls cannot be recorded
            if self._is_writable:
                _log.warning("Calls cannot be recorded, so none is answered: %s", error)
            self._is_writable = False
        else:
            self._is_writable = True
        self._checked_at = time.monotonic()
        self._checking = None
        return self._is_writable
