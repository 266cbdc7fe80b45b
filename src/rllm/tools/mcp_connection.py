"""One session with one MCP server, alive in one task of the event loop of `mcp_loop`.

    open ──► task: start or reach the server, handshake ──► is_alive ──► calls ──► close, or the server dies
                          │                                                │
                          └── stderr and the guard's notes ──► the tail that errors quote

A process is started through `mcp_guard`, which ends it and all that it started when it is closed, and when we
die. Everything here runs on that loop.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rllm.errors import MissingExtraError, RllmError
from rllm.tools import mcp_guard
from rllm.tools.mcp_server import MCPServer, MCPServerError

_TAIL_BYTES = 4096
_CLOSE_TIMEOUT_S = 10.0
"""More than all of the SDK's and the guard's graces together."""
_MAX_PAGES = 1000
"""The pages of a list of tools: a server whose cursor never ends is cut off here, or by the time limit
before."""


class CallTimeout(Exception):
    """Raised when a call took too long; the session goes on."""


class CallRefused(Exception):
    """Raised when the server answered a call with a protocol error: it lives, and did not like the call."""


class Connection:
    """A session from `open` to `close`. `is_alive` turns False as soon as the end of it is known."""

    def __init__(self, server: MCPServer) -> None:
        self.server = server
        self.is_alive = False
        self.is_retired = False
        """It may live, but a call on it took too long: nobody begins another."""
        self.pid: int | None = None
        """The number of the server's process; None where it is no process of ours."""
        self._stderr = b""
        self._ended = ""
        self._client: Any = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_usable(self) -> bool:
        return self.is_alive and not self.is_retired

    async def open(self) -> None:
        """Start or reach the server. Raises MCPServerError within `connect_timeout_s`, naming the cause."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready))
        try:
            await ready
        except BaseException:
            await self.close()  # the caller may have been cancelled: nothing half-open stays behind
            raise

    async def tools(self) -> list[Any]:
        """All pages of the server's tools, as the SDK's objects. Raises MCPServerError."""
        listing: list[Any] = []
        try:
            async with asyncio.timeout(self.server.list_timeout_s):
                cursor: str | None = None
                for _ in range(_MAX_PAGES):
                    page = await self._client.list_tools(cursor=cursor)
                    listing += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        return listing
        except TimeoutError as error:
            raise self._error(f"did not list its tools within {self.server.list_timeout_s:g} s") from error
        except Exception as error:  # whatever the SDK raises, the list did not come
            raise self._error(f"did not list its tools: {_error_text(error)}") from error
        raise self._error(f"lists its tools on more than {_MAX_PAGES} pages")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The `CallToolResult` of one call.

        Raises CallTimeout, CallRefused, or MCPServerError when the server is gone.
        """
        from mcp import MCPError

        if not self.is_alive:
            raise self._error("is gone")
        try:
            async with asyncio.timeout(self.server.call_timeout_s):
                return await self._client.call_tool(name, dict(arguments))
        except TimeoutError as error:
            raise CallTimeout(f"No answer within {self.server.call_timeout_s:g} s.") from error
        except MCPError as error:
            if await self._is_the_end(error):
                self.is_alive = False
                raise self._error(f"died during a call of `{name}`") from error
            raise CallRefused(str(error)) from error
        except Exception as error:
            self.is_alive = False
            raise self._error(f"broke off a call of `{name}`: {_error_text(error)}") from error

    async def close(self) -> None:
        """End the session, and the process where there is one. May be called twice; never raises."""
        self.is_alive = False
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_CLOSE_TIMEOUT_S)
            self._task.cancel()  # nothing happens when it has ended, as it has

    async def _live(self, ready: "asyncio.Future[None]") -> None:
        """Holds the SDK's context managers open: they must be left in the task that entered them."""
        import anyio

        try:
            with anyio.CancelScope() as scope:
                scope.deadline = anyio.current_time() + self.server.connect_timeout_s
                watch = asyncio.create_task(self._cancel_on_stop(scope))
                try:
                    async with self._sdk_client() as self._client:
                        watch.cancel()
                        scope.deadline = float("inf")
                        self.is_alive = not self._ended
                        _settle(ready)
                        await self._stop.wait()
                finally:
                    watch.cancel()
            if scope.cancelled_caught:
                _settle(ready, self._error(f"did not answer within {self.server.connect_timeout_s:g} s"))
        except Exception as error:  # noqa: BLE001 - an ExceptionGroup of anything: the session is over
            await self._hear_the_end()
            _settle(ready, error if isinstance(error, RllmError) else self._error(_error_text(error)))
        finally:
            self.is_alive = False
            _settle(ready, self._error("was closed while it started"))

    async def _cancel_on_stop(self, scope: Any) -> None:
        """`close` during the handshake ends it."""
        await self._stop.wait()
        scope.cancel()

    @asynccontextmanager
    async def _sdk_client(self) -> AsyncGenerator[Any, None]:
        try:
            import mcp
        except ModuleNotFoundError as error:
            raise MissingExtraError("mcp", "mcp") from error
        server = self.server
        if server.command:
            async with self._process() as transport, mcp.Client(transport) as client:
                yield client
        elif server.url:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            patience = httpx2.Timeout(server.connect_timeout_s, read=server.call_timeout_s + _CLOSE_TIMEOUT_S)
            async with (
                httpx2.AsyncClient(headers=server.http_headers(), timeout=patience) as http,
                mcp.Client(streamable_http_client(server.url, http_client=http)) as client,
            ):
                yield client
        else:
            async with mcp.Client(server.make_target()) as client:
                yield client

    @asynccontextmanager
    async def _process(self) -> AsyncGenerator[Any, None]:
        """The transport of a guarded process, while its stderr is read."""
        from mcp.client.stdio import StdioServerParameters, stdio_client

        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-I", "-S", mcp_guard.__file__, str(os.getpid()), *self.server.words],
            env=self.server.environment(),
            cwd=self.server.cwd or None,
        )
        loop = asyncio.get_running_loop()
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        loop.add_reader(reading, self._read_stderr, reading)
        try:
            # This writing end stays open as long as the reader does. At an
            # end of file the loop would call the reader again and again.
            with os.fdopen(writing, "w") as errlog:
                yield stdio_client(parameters, errlog=errlog)
        finally:
            self._read_stderr(reading)
            loop.remove_reader(reading)
            os.close(reading)

    def _read_stderr(self, reading: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._stderr += os.read(reading, 1 << 16)
        *lines, rest = self._stderr.split(b"\n")
        chunks: list[bytes] = []
        for line in lines:
            before, mark, note = line.partition(mcp_guard.MARK.encode())
            if mark:
                self._note(note.decode())
            if before or not mark:
                chunks.append(before)
        self._stderr = b"\n".join([*chunks, rest])[-_TAIL_BYTES:]

    def _note(self, note: str) -> None:
        """The guard's note on its server."""
        word, _, rest = note.partition(" ")
        if word == "started":
            self.pid = int(rest)
        elif word in ("failed", "ended"):
            self._ended = f"could not start: {rest}" if word == "failed" else f"ended with status {rest}"
            self.is_alive = False

    async def _is_the_end(self, error: Any) -> bool:
        """Whether a protocol error says that the connection is gone. Its code alone does not: servers use it
        for errors of their own as well."""
        from mcp_types import CONNECTION_CLOSED

        if self.server.url and error.message == "Session terminated":  # it was restarted and knows us no more
            return True
        if error.code != CONNECTION_CLOSED or self.server.target is not None:
            return False
        await self._hear_the_end()
        return bool(self.server.url or self._ended) or error.message == "Connection closed"

    async def _hear_the_end(self) -> None:
        """Leave the guard's last note a moment to arrive, so that an error can say how the server ended."""
        for _ in range(20):
            if self._ended or not self.server.command:
                return
            await asyncio.sleep(0.01)

    def _error(self, what: str) -> MCPServerError:
        ending = f" (it {self._ended})" if self._ended else ""
        tail = self._stderr.decode(errors="replace").strip()
        wrote = f"\nIt wrote last:\n{tail}" if tail else ""
        return MCPServerError(f"The MCP server {self.server.title} {what}{ending}.{wrote}")


def _settle(ready: "asyncio.Future[None]", error: Exception | None = None) -> None:
    """Answer whoever waits, once."""
    if ready.done():
        return
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(error)


def _error_text(error: BaseException) -> str:
    """The causes inside groups of exceptions, in one line."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(_error_text(each) for each in error.exceptions))
    text = str(error) or type(error).__name__
    return f"failed with {type(error).__name__}: {text}" if type(error).__name__ not in text else text
