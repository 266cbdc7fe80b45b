"""Answers on their way out: JSON, errors in the shape a client understands, and server-sent events.

    Piece ──► EventSink ──first one: headers, at once──► events ──ledger has it──► the end
                  └── an error before the first byte is an HTTP status; after it, an error event and a cut
                  connection

What tells a client that a streamed answer is whole is held back until the answer is on disk.
"""

import re
from typing import Any

import orjson
from aiohttp import web
from multidict import CIMultiDict

from rllm.errors import RequestRefused
from rllm.gateway.dialects.base import ClientDialect, StreamWriter
from rllm.gateway.server.paths import MethodNotAllowed
from rllm.types.call_budget import exhausted_limit
from rllm.types.wire import Answer, CallRequest, Dialect, Piece, completion_id, unix_time

KEEP_ALIVE_S = 15.0
_JSON = "application/json"
_EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_DONE = b"data: [DONE]\n\n"
_LAST_EVENTS = {
    Dialect.CHAT: (b"data: [DONE]",),
    Dialect.COMPLETIONS: (b"data: [DONE]",),
    Dialect.RESPONSES: (b"event: response.completed", b"event: response.incomplete"),
    Dialect.MESSAGES: (b"event: message_stop",),
}
"""The beginnings of the events that make an answer whole, in streams that are passed on as they come."""
_FINISHED = re.compile(rb'"finish_reason": ?"')
"""In chat and completions; within a text the quotes would be escaped."""
_LAST_TYPES = {"response.completed", "response.incomplete", "message_stop"}


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(data),
        status=status,
        headers=CIMultiDict({"Content-Type": _JSON, **(headers or {})}),
    )


def error_response(dialect: ClientDialect, error: RequestRefused) -> web.Response:
    headers: dict[str, str] = {}
    if error.retry_after is not None and error.retry_after.isprintable():
        headers["Retry-After"] = error.retry_after
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allow_header
    if exhausted_limit(error.code):
        headers["X-Should-Retry"] = "false"  # which the clients of OpenAI and Anthropic read
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = json_response(dialect.error(error), error.status, headers)
    if error.status in (408, 413):  # the rest of the body is not worth reading
        response.force_close()
    return response


async def send(http: web.BaseRequest, response: web.StreamResponse) -> web.StreamResponse:
    """Hand a whole response to the connection. Raises ConnectionError when the client is gone."""
    await response.prepare(http)
    await response.write_eof()
    return response


class _Events(web.StreamResponse):
    """Its headers leave with the first event: one packet less to wait for, and to send."""

    _send_headers_immediately = False


class EventSink:
    """One streamed answer to one client."""

    def __init__(
        self, http: web.BaseRequest, dialect: ClientDialect, request: CallRequest, model: str
    ) -> None:
        self.answer_id = completion_id(request.dialect)
        """The id that this client sees, unless an upstream's own events are passed on."""
        self._http = http
        self._dialect = dialect
        self._request = request
        self._model = model
        self._response: web.StreamResponse | None = None
        self._writer: StreamWriter | None = None
        self._end_events: list[bytes] = []
        self._passed_on = False
        """The events are an upstream's own."""
        self._is_client_gone = False

    @property
    def has_started(self) -> bool:
        return self._response is not None

    async def piece(self, piece: Piece) -> None:
        """Returns when the connection can take more. That a client is gone does not concern the policy."""
        if piece.raw is None:
            await self._write(self._begin() + self._stream().piece(piece))
            return
        self._passed_on = True
        # Nothing overtakes an event that is held back, so all behind it is held back as well.
        if self._end_events or self._is_last(piece.raw):
            self._end_events.append(piece.raw)
        else:
            await self._write(piece.raw)

    async def keep_alive(self) -> None:
        # Before the first event nothing is sent, so that an error can still be an HTTP status.
        if self._response is not None:
            await self._write(b": still working\n\n")

    def adopt(self, answer: Answer) -> None:
        """Gives the answer the id that the client has seen."""
        if not self._passed_on:
            answer.id = self.answer_id

    async def finish(self, answer: Answer) -> web.StreamResponse:
        """The end, once the answer is recorded. Raises ConnectionError when the client is gone."""
        if self._passed_on:
            rest = b"".join(self._end_events) + self._missing_end()
        else:
            rest = self._begin() + self._stream().end(answer)
        return await self._last(rest)

    async def replay(self, answer: Answer) -> web.StreamResponse:
        """An answer that was recorded before, in one go."""
        self.answer_id, self._model = answer.id, answer.model
        parts = [self._begin(answer.created)]
        parts += [self._stream().piece(piece) for piece in answer.pieces()]
        parts.append(self._stream().end(answer))
        return await self._last(b"".join(parts))

    async def failed(self, error: RequestRefused) -> web.StreamResponse:
        """An error after the first byte: whatever a client makes of the event, the connection ends before
        the stream does, so nobody takes it for a whole answer."""
        await self._write(self._stream().failed(error))
        if self._http.transport is not None:
            self._http.transport.close()
        assert self._response is not None, "an error before the first byte is an HTTP status"
        return self._response

    def _stream(self, created_at: int | None = None) -> StreamWriter:
        if self._writer is None:
            at = unix_time() if created_at is None else created_at
            self._writer = self._dialect.stream(self._request, self.answer_id, self._model, at)
        return self._writer

    def _begin(self, created_at: int | None = None) -> bytes:
        return b"" if self._writer is not None else self._stream(created_at).begin()

    async def _write(self, data: bytes) -> None:
        if self._is_client_gone or not data:
            return
        try:
            response = await self._open() if self._response is None else self._response
            await response.write(data)
        except ConnectionError:  # the call is told by the server, which cancels whoever waits for the answer
            self._is_client_gone = True

    async def _last(self, data: bytes) -> web.StreamResponse:
        response = await self._open()
        await response.write_eof(data)
        return response

    async def _open(self) -> web.StreamResponse:
        if self._response is None:
            response = _Events(headers=CIMultiDict(_EVENT_HEADERS))
            await response.prepare(self._http)
            self._response = response
        return self._response

    def _is_last(self, raw: bytes) -> bool:
        # With one choice its finish reason already tells a client that the answer is whole. With several only
        # the end of the stream does.
        if self._request.n == 1 and _FINISHED.search(raw):
            return True
        is_chat = self._request.dialect in (Dialect.CHAT, Dialect.COMPLETIONS)
        if is_chat and b"[DONE]" not in raw:  # nearly all of them
            return False
        lines = raw.split(b"\n")
        if any(line.startswith(_LAST_EVENTS[self._request.dialect]) for line in lines):
            return True
        if is_chat or raw.startswith(b"event:"):
            return False
        return any(line.startswith(b"data:") and _type_of(line[5:]) in _LAST_TYPES for line in lines)

    def _missing_end(self) -> bytes:
        """Some upstreams say that an answer is whole by its finish reasons alone."""
        if self._request.dialect not in (Dialect.CHAT, Dialect.COMPLETIONS):
            return b""
        has_end = any(raw.startswith(_DONE[:12]) or b"\n" + _DONE[:12] in raw for raw in self._end_events)
        return b"" if has_end else _DONE


def _type_of(data: bytes) -> str:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return ""
    return value.get("type", "") if isinstance(value, dict) else ""
