"""Sessions with MCP servers, leased to rollouts.

    MCPServer ──► MCPPool ──lease()──► MCPLease ──► its tools, for one rollout ──release()──► the pool
                    │                     │
                    │ stateful: a session of its own, closed at release; `warm` ones wait ready
                    └ shared:   the session with the fewest leases, at most `max_sessions` of them

A session whose server died fails the call that it died under, as an MCPServerError; the next call of that
lease, and every other lease, gets a new one. Nothing is shared between leases of a stateful server.
"""

import asyncio
import atexit
import contextlib
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Self

from rllm.tools import mcp_loop
from rllm.tools.mcp_connection import CallRefused, CallTimeout, Connection
from rllm.tools.mcp_server import MCPServer, MCPServerError

__all__ = [
    "CallRefused",
    "CallTimeout",
    "MCPLease",
    "MCPPool",
    "MCPServer",
    "MCPServerError",
    "close_shared_pools",
    "shared_pool",
]

_EXIT_TIMEOUT_S = 4.0


class MCPLease:
    """One rollout's use of a server, from `MCPPool.lease` to `release`; a context manager.

    Its methods come in two forms: plain for threads, `async_` for any event loop.
    """

    def __init__(self, pool: "MCPPool", connection: Connection) -> None:
        self._pool = pool
        self._connection = connection
        self._reopening = asyncio.Lock()
        self._is_over = False

    @property
    def server(self) -> MCPServer:
        return self._pool.server

    @property
    def pid(self) -> int | None:
        """Id of the server's process that this lease speaks to; None for other kinds of server."""
        return self._connection.pid

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call the tool that the server calls `name`; returns the SDK's `CallToolResult`.

        Raises CallTimeout, CallRefused, or MCPServerError when the server is gone: what it remembered for
        this lease is lost then, and the next call has a new session.
        """
        return mcp_loop.run(self._call(name, arguments))

    async def async_call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return await mcp_loop.hand_over(self._call(name, arguments))

    def listed(self) -> list[Any]:
        """The tools that the server offers, as the SDK's objects: asked once for the whole pool."""
        return mcp_loop.run(self._pool._list_tools(self._connection))

    async def async_listed(self) -> list[Any]:
        return await mcp_loop.hand_over(self._pool._list_tools(self._connection))

    def release(self) -> None:
        """Give the session back; a stateful one is closed. May be called twice."""
        mcp_loop.run(self._release())

    async def async_release(self) -> None:
        await mcp_loop.hand_over(self._release())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        """A lease that nobody holds any more, as after a cancelled `async_lease`, is given back."""
        if not self._is_over and not sys.is_finalizing():
            mcp_loop.start(self._pool._given_back(self._connection))

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if self._is_over:
            raise MCPServerError(
                f"The lease on the MCP server {self.server.title} was given back before this call."
            )
        # Several calls of one lease may find the session dead at the same time. One of them replaces it.
        async with self._reopening:
            if not self._connection.is_usable:
                self._connection = await self._pool._replace(self._connection)
        try:
            return await self._connection.call(name, arguments)
        except CallTimeout:
            self._pool._retire(self._connection)
            raise

    async def _release(self) -> None:
        if not self._is_over:
            self._is_over = True
            await self._pool._given_back(self._connection)


class MCPPool:
    """The sessions with one server; a context manager. Thread-safe, and of use from any event loop."""

    def __init__(self, server: MCPServer) -> None:
        """Nothing is started until the first lease, or `prepare`."""
        self.server = server
        self._leases: dict[Connection, int] = {}
        """Sessions in use -> how many leases use each."""
        self._warm: list[Connection] = []
        self._num_opening = 0
        self._changed: asyncio.Condition = asyncio.Condition()
        self._tools: list[Any] | None = None
        self._chores: set[asyncio.Task[None]] = set()
        self._is_closed = False
        _pools.add(self)

    def lease(self) -> MCPLease:
        """A session for one rollout.

        Raises MCPServerError when the server does not start, or when none of `max_sessions` came free within
        `lease_timeout_s`.
        """
        return mcp_loop.run(self._lease())

    async def async_lease(self) -> MCPLease:
        return await mcp_loop.hand_over(self._lease())

    def prepare(self) -> None:
        """Open the warm sessions now, and wait for them. Raises MCPServerError for a server that fails."""
        mcp_loop.run(self._fill())

    def close(self) -> None:
        """Close all sessions, those on lease too. May be called twice."""
        mcp_loop.run(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_sessions(self) -> int:
        """Sessions that are open now."""
        return len(self._leases) + len(self._warm)

    async def _lease(self) -> MCPLease:
        connection = await self._take()
        self._keep_warm()
        return MCPLease(self, connection)

    async def _take(self) -> Connection:
        """A live session with one more lease on it."""
        server = self.server
        try:
            async with asyncio.timeout(server.lease_timeout_s), self._changed:
                while not self._may_take():
                    await self._changed.wait()
                if self._warm:
                    connection = self._warm.pop()
                elif server.shared and (busy := self._least_busy()) and not self._may_open():
                    connection = busy
                else:
                    connection = None
                    # Counted before the session is open, because
                    # others count places while its handshake goes on.
                    self._num_opening += 1
                if connection is not None:
                    self._leases[connection] = self._leases.get(connection, 0) + 1
                    return connection
        except TimeoutError as error:
            raise MCPServerError(
                f"None of the {server.most_sessions} sessions with the MCP server {server.title} came free "
                f"within {server.lease_timeout_s:g} s; raise `max_sessions`, or set `shared` if it keeps no "
                "state."
            ) from error
        return await self._open_connection(leases=1)

    async def _open_connection(self, leases: int) -> Connection:
        """Open a session whose place is counted in `_num_opening` already."""
        connection = Connection(self.server)
        try:
            await connection.open()
            if self._is_closed:
                await connection.close()
                raise self._closed_error()
            if leases:
                self._leases[connection] = leases
            else:
                self._warm.append(connection)
        finally:
            self._num_opening -= 1
            # Not awaited: a lease that is cancelled just then has a session already, and nobody to return it.
            self._chore(self._notify())
        return connection

    def _may_take(self) -> bool:
        if self._is_closed:
            raise self._closed_error()
        self._drop_dead()
        if self._warm or self._may_open():
            return True
        return self.server.shared and self._least_busy() is not None

    def _may_open(self) -> bool:
        """Shared sessions are opened while all that there are have leases."""
        if self.num_sessions + self._num_opening >= self.server.most_sessions:
            return False
        return not self.server.shared or all(self._leases.values())

    def _least_busy(self) -> Connection | None:
        usable = [each for each in self._leases if each.is_usable]
        return min(usable, key=lambda each: self._leases[each], default=None)

    def _drop_dead(self) -> None:
        """Idle sessions whose server died are closed, and their places free."""
        for connection in [each for each in self._warm if not each.is_alive]:
            self._warm.remove(connection)
            self._chore(connection.close())
        for connection in [
            each for each, leases in self._leases.items() if not leases and not each.is_usable
        ]:
            del self._leases[connection]
            self._chore(connection.close())

    async def _replace(self, dead: Connection) -> Connection:
        """Another session for a lease whose server is gone."""
        await self._given_back(dead)
        return await self._take()

    async def _given_back(self, connection: Connection) -> None:
        left = self._leases.get(connection, 0) - 1
        if left >= 0:
            self._leases[connection] = left
        if left <= 0 and not (self.server.shared and connection.is_usable):
            await connection.close()  # before its place is free: never more than `max_sessions` processes
            self._leases.pop(connection, None)
        self._chore(self._notify())
        self._keep_warm()

    def _retire(self, connection: Connection) -> None:
        """After a call that timed out: no new lease of others goes to a shared session that may hang."""
        if self.server.shared and connection in self._leases:
            connection.is_retired = True

    async def _list_tools(self, connection: Connection) -> list[Any]:
        if self._tools is None:
            self._tools = _allowed_tools(await connection.tools(), self.server)
        return self._tools

    def _keep_warm(self) -> None:
        if self.server.warm and not self.server.shared and not self._is_closed:
            self._chore(self._refill())

    async def _refill(self) -> None:
        with contextlib.suppress(MCPServerError):  # the lease that needs the session will say it
            await self._fill()

    async def _fill(self) -> None:
        num_missing = self.server.warm - len(self._warm) - self._num_opening
        free = self.server.most_sessions - self.num_sessions - self._num_opening
        count = max(0, min(num_missing, free))
        # No await lies between the count of what is missing and
        # this line, so two refills do not open the same places.
        self._num_opening += count
        connections = await asyncio.gather(
            *(self._open_connection(leases=0) for _ in range(count)), return_exceptions=True
        )
        for each in connections:
            if isinstance(each, BaseException):
                raise each

    async def _close(self) -> None:
        self._is_closed = True
        connections = [*self._leases, *self._warm]
        self._leases.clear()
        self._warm.clear()
        await asyncio.gather(*(each.close() for each in connections), *self._chores, return_exceptions=True)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _chore(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    def _closed_error(self) -> MCPServerError:
        return MCPServerError(f"The pool of the MCP server {self.server.title} is closed.")


def shared_pool(server: MCPServer) -> MCPPool:
    """The pool of this process for that server: environments of one task share it. Closed at exit."""
    with _lock:
        if server.key not in _shared or _shared[server.key]._is_closed:
            _shared[server.key] = MCPPool(server)
        return _shared[server.key]


def close_shared_pools() -> None:
    """Close them all; who asks for one afterwards gets a new one."""
    with _lock:
        pools = list(_shared.values())
        _shared.clear()
    for each in pools:
        each.close()


def _allowed_tools(tools: list[Any], server: MCPServer) -> list[Any]:
    """The tools that `only` leaves. Raises MCPServerError when it names a tool that the server does not
    have."""
    names = [each.name for each in tools]
    if missing := [name for name in server.only if name not in names]:
        raise MCPServerError(
            f"`only` names {missing[0]!r}, which the MCP server {server.title} does not have; it has "
            f"{', '.join(names) or 'no tools'}."
        )
    return [each for each in tools if not server.only or each.name in server.only]


_pools: "weakref.WeakSet[MCPPool]" = weakref.WeakSet()
_shared: dict[str, MCPPool] = {}
_lock = threading.Lock()


@atexit.register
def _close_all() -> None:
    """All sessions at once, for a few seconds at most: what is left then, the guards end."""

    async def close_all() -> None:
        await asyncio.gather(*(each._close() for each in list(_pools)), return_exceptions=True)

    if any(each.num_sessions for each in _pools):
        with contextlib.suppress(TimeoutError):
            mcp_loop.run(close_all(), _EXIT_TIMEOUT_S)
