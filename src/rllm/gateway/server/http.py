"""aiohttp's server, whose own refusals speak as the gateway does.

bytes ──parsed──► a request ──► the gateway's handler
      ├─not HTTP──► 400 in the shape of OpenAI's errors, and the connection is closed
      └─too slow──► 408 where a part of a head came, and the connection is closed
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rllm.errors import RequestRefused
from rllm.gateway.dialects.registry import DIALECTS
from rllm.gateway.server.delivery import error_response
from rllm.types.wire import Dialect

_MAX_CHARS = 200
_SILENT_TIMES = 4
_HEAD_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpServer(web.Server):
    """One handler for all that is HTTP. `how` is what aiohttp's connections are told.

    `head_timeout_s`: how long the head of a request may take. A new connection may wait some times longer for
    its first one, and between requests it may be idle.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        head_timeout_s: float,
        request_factory: Any = None,
        handler_cancellation: bool = True,
        **how: Any,
    ) -> None:
        # aiohttp lets handlers run on by default; in the gateway a client that leaves has to stop its call.
        super().__init__(
            handler, request_factory=request_factory, handler_cancellation=handler_cancellation, **how
        )
        self.head_timeout_s = head_timeout_s
        self._how = how

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._how)


class _Connection(web.RequestHandler):
    """`_request_count` and `_waiter` are aiohttp's own: what was parsed, and what waits for a next one."""

    __slots__ = ("_has_begun", "_head_timeout_s", "_head_timer")

    def __init__(self, server: HttpServer, **how: Any) -> None:
        super().__init__(server, **how)
        self._head_timeout_s = server.head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        """A part of a head is here."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._start_head_timer(_SILENT_TIMES * self._head_timeout_s)

    def data_received(self, data: bytes) -> None:
        num_requests = self._request_count
        super().data_received(data)
        if self._request_count != num_requests:
            self._stop_head_timer()
        # uvloop hands over what came with a connection before anything waits for it.
        elif not self._has_begun and (self._waiter is not None or num_requests == 0):
            self._has_begun = True
            self._start_head_timer(self._head_timeout_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self, timeout_s: float) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self._loop.call_later(timeout_s, self._give_up)

    def _stop_head_timer(self) -> None:
        self._has_begun = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport is not None and self._has_begun:
            self.transport.write(_HEAD_TIMED_OUT)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that could not be parsed. It has no path, so nobody knows which protocol its
        client speaks."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        why = " ".join((message or "it is malformed").split())[:_MAX_CHARS]
        refusal = RequestRefused(f"This is no HTTP request that can be read: {why}", code="invalid_http")
        response = error_response(DIALECTS[Dialect.CHAT], refusal)
        response.force_close()
        return response
