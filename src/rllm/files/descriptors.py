"""The limit of open files of this process, and the log of servers that have reached it.

A request that is under way is one or two of them.
"""

import logging
import resource
import time

QUIET_S = 60.0
"""The time between two lines of the log about the same trouble."""


def raised_file_limit() -> int:
    """The limit, once it is as high as it may be: the usual 1,024 is there for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 22 if hard == resource.RLIM_INFINITY else hard


class _SeldomRefused(logging.Filter):
    """Filter of asyncio's log: a server without descriptors writes a traceback for each connection in its
    backlog, again and again; one line a minute says as much."""

    def __init__(self) -> None:
        super().__init__()
        self._written_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("socket.accept() out of system resource"):
            return True
        if time.monotonic() - self._written_s < QUIET_S:
            return False
        self._written_s = time.monotonic()
        record.exc_info = None
        return True


_SELDOM_REFUSED = _SeldomRefused()


def quiet_refused_connections() -> None:
    """Let servers of this process write one line a minute while they have no descriptors for connections."""
    logging.getLogger("asyncio").addFilter(_SELDOM_REFUSED)
