"""aiohttp's server, whose own refusals speak as the gateway does.

bytes ──parsed──► a request ──► the gateway's handler
      └─not HTTP──► 400 in the shape of OpenAI's errors, and the connection is closed
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rllm.errors import RequestRefused
from rllm.gateway.dialects.registry import DIALECTS
from rllm.gateway.server.delivery import error_response
from rllm.gateway.wire import Dialect

_MAX_CHARS = 200


class HttpServer(web.Server):
    """One handler for all that is HTTP. `how` is what aiohttp's connections are told."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], **how: Any
    ) -> None:
        super().__init__(handler, handler_cancellation=True, **how)
        self._how = how

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._how)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What could not be parsed has no path, so nobody knows which protocol its client speaks."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        why = " ".join((message or "it is malformed").split())[:_MAX_CHARS]
        refused = RequestRefused(f"This is no HTTP request that can be read: {why}", code="invalid_http")
        response = error_response(DIALECTS[Dialect.CHAT], refused)
        response.force_close()
        return response
