"""One try at one call on one server.

    CallRequest ──body──► server ──┬─ reply ──read──────────────────────────► Answer
                                   └─ events ──reader──► pieces ──emit──► ──► Answer
    Failed         nothing was passed on yet, and another try may do better
    PartialAnswer  something was passed on, and no more will come
    RequestRefused the server's own error

Sampling has no side effects, so a call may be tried again although a server has worked on it: at worst an
answer is computed that nobody reads.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from rllm.errors import PartialAnswer, RequestRefused
from rllm.errors.redaction import bytes_without_keys, hints_at_key
from rllm.gateway.dialects.base import StreamReader, UpstreamDialect
from rllm.gateway.upstream.connections import Response
from rllm.gateway.upstream.http import Dropped, HttpClient, SlowToConnect, TooLarge, Unreachable
from rllm.gateway.upstream.seeds import SeedDraw
from rllm.inference.sse import EventSplitter
from rllm.types.messages import FinishReason
from rllm.types.wire import Answer, CallRequest, Emit, Piece

RETRIED = frozenset({429, 502, 503, 504, 529})
"""Statuses that another try may change. 529 is Anthropic's 503."""
BAD_REPLY = "bad_upstream_reply"
_REST_OF_STREAM_S = 10.0
"""The time to wait for the events behind the last one, such as the usage."""
_CUT_OFF = (FinishReason.CANCELLED, FinishReason.ERROR)


class Failed(Exception):
    """A try that failed before anything was passed on."""

    def __init__(
        self, error: RequestRefused, *, is_reached: bool = True, slow: bool = False, stale: bool = False
    ) -> None:
        super().__init__(error.message)
        self.error = error
        """The client's error when there are no more tries."""
        self.is_reached = is_reached
        self.slow = slow
        """It was not reached in time, which says less than a connection that was refused."""
        self.stale = stale
        """A kept connection had been closed by the server: no fault of anyone."""


@dataclass(kw_only=True, slots=True)
class UpstreamCall:
    """One call, over all its tries."""

    request: CallRequest
    dialect: UpstreamDialect
    extras: Mapping[str, Any]
    """Fields of the body that are set for the session and that `CallRequest` does not know."""
    emit: Emit | None
    draw: SeedDraw | None = None
    """For a request that names no seed; its own is sent to servers that take one."""
    sent_seed: int | None = None
    """The last one that was sent, whoever chose it."""
    policy_version: int = 0
    """The version of the weights that the last try began with."""
    started_at: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    has_answered: bool = False
    """A server has answered something: what is refused from then on, it refused."""

    @property
    def passed_on(self) -> bool:
        return self.first_token_s is not None

    def body(self, capture: frozenset[str]) -> bytes:
        body = self.dialect.body(self.request, capture=capture)
        if "seed" in capture and self.draw is not None:
            body = {**body, "seed": self.draw.seed}
        self.sent_seed = body.get("seed")
        try:
            return orjson.dumps({**body, **self.extras} if self.extras else body)
        except orjson.JSONEncodeError as error:
            raise RequestRefused(f"The request cannot be written as JSON ({error}).") from error

    async def pass_on(self, piece: Piece) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.started_at
        if self.emit is not None:
            await self.emit(piece)


@dataclass(slots=True)
class Reply:
    """The result of one try."""

    answer: Answer
    policy_version: int | None
    """The version of the weights that answered, where the server told."""


async def ask(call: UpstreamCall, http: HttpClient, url: str, capture: frozenset[str]) -> Reply:
    """Raises Failed, PartialAnswer or RequestRefused."""
    body = call.body(capture)
    try:
        async with http.post(url + call.dialect.path, body) as response:
            call.has_answered = True
            if not 200 <= response.status < 300:
                raise await _error(call, http, response, url)
            version = _Version(_version_of(response.headers.get("X-Policy-Version")))
            if call.request.stream and "json" not in response.content_type:
                answer = await _hear(call, http, response, url, version)
            else:
                answer = await _read(call, http, response, url, version)
    except Unreachable as error:
        refusal = _server_error(url, error, 503, "upstream_unreachable")
        raise Failed(refusal, is_reached=False, slow=isinstance(error, SlowToConnect)) from error
    except Dropped as error:
        refusal = _server_error(url, error, 502, "upstream_dropped")
        raise Failed(refusal, stale=error.before_answer) from error
    except TimeoutError as error:
        raise _server_error(url, error, 504, "upstream_timeout") from error
    except TooLarge as error:
        why = f"its answer has more than {http.max_body_bytes} bytes"
        raise _server_error(url, why, 502, "upstream_body_too_large") from error
    return Reply(answer, version.policy_version)


async def _error(
    call: UpstreamCall, http: HttpClient, response: Response, url: str
) -> RequestRefused | Failed:
    try:
        body = await http.body_of(response)
    except (Dropped, TooLarge, TimeoutError):  # the status says enough
        body = b""
    error = call.dialect.error_of(response.status, body, dict(response.headers))
    return _failed_if_retried(error)


def _failed_if_retried(error: RequestRefused) -> RequestRefused | Failed:
    """A failure, or a refusal where the answer cannot be read: a server that answers so goes on to do so, and
    is not asked again."""
    return Failed(error) if error.status in RETRIED and error.code != BAD_REPLY else error


async def _read(
    call: UpstreamCall, http: HttpClient, response: Response, url: str, version: "_Version"
) -> Answer:
    body = await http.body_of(response)
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        start = body[:80].decode(errors="replace")
        why = f"its answer is no JSON ({error}); it begins with {start!r}"
        raise _server_error(url, why, 502, BAD_REPLY) from error
    if not isinstance(reply, dict):
        why = f"its answer is JSON of type {type(reply).__name__} and not an object"
        raise _server_error(url, why, 502, BAD_REPLY)
    version.hear(reply)
    try:
        answer = call.dialect.read(call.request, reply)
    except RequestRefused as error:
        raise _failed_if_retried(error) from error
    if any(choice.finish_reason in _CUT_OFF for choice in answer.choices):
        why = "it cut the answer off, as servers do while their weights are changed"
        raise Failed(_server_error(url, why, 503, "upstream_aborted"))
    if call.request.stream or call.emit is not None:
        for piece in answer.pieces():
            await call.pass_on(piece)
    return answer


async def _hear(
    call: UpstreamCall, http: HttpClient, response: Response, url: str, version: "_Version"
) -> Answer:
    reader = call.dialect.reader(call.request)
    problem: RequestRefused | Failed | None = None
    cause: Exception | None = None
    try:
        await _hear_all(call, http, response, reader, version)
    except Dropped as error:
        cause = error
        problem = Failed(_server_error(url, error, 502, "upstream_dropped"))
    except (TimeoutError, TooLarge) as error:
        cause = error
        problem = _stream_error(url, error, http)
    answer = reader.answer()
    # A connection that broke behind the end of the answer takes nothing from it.
    if problem is None or reader.complete:
        problem = _verdict(reader, answer, url)
    if problem is None:
        return answer
    if not call.passed_on:
        raise problem from cause
    why = problem.error.message if isinstance(problem, Failed) else problem.message
    raise PartialAnswer(why, answer) from cause


async def _hear_all(
    call: UpstreamCall,
    http: HttpClient,
    response: Response,
    reader: StreamReader,
    version: "_Version",
) -> None:
    events = EventSplitter(max_event_bytes=http.max_body_bytes)
    num_bytes = 0
    while part := await _next_part(http, response, reader):
        num_bytes += len(part)
        if num_bytes > http.max_body_bytes:
            raise TooLarge
        await _feed(call, reader, _whole_events(events, part), version)
        if reader.error is not None:
            return
    await _feed(call, reader, events.finish(), version)


async def _next_part(http: HttpClient, response: Response, reader: StreamReader) -> bytes:
    """Once the answer is complete, what may be behind it is not waited for long."""
    if not reader.complete:
        return await http.part_of(response)
    try:
        async with asyncio.timeout(_REST_OF_STREAM_S):
            return await http.part_of(response)
    except (TimeoutError, Dropped):
        return b""


def _whole_events(events: EventSplitter, part: bytes) -> list[tuple[str, bytes]]:
    try:
        return events.feed(part)
    except ValueError as error:
        raise TooLarge from error


async def _feed(
    call: UpstreamCall, reader: StreamReader, events: list[tuple[str, bytes]], version: "_Version"
) -> None:
    """Events that arrived together are searched together and leave together, but for those that end the
    answer."""
    # Two searches of all events at once, so that nearly no event has to be searched or parsed once more.
    together = b"\n".join([data for _, data in events])
    has_hint, has_version = hints_at_key(together), b"weight_version" in together
    raw: list[bytes] = []
    for name, event in events:
        data = bytes_without_keys(event) if has_hint else event
        if has_version:
            version.hear(_object(data))
        for piece in reader.feed(name, data):
            if piece.raw is None:
                await call.pass_on(piece)
            elif reader.complete:
                # Apart from the others, so that whoever passes them on can hold back what ends the answer and
                # nothing else.
                await _flush(call, raw)
                await call.pass_on(piece)
            else:
                raw.append(piece.raw)
    await _flush(call, raw)


async def _flush(call: UpstreamCall, raw: list[bytes]) -> None:
    if raw:
        whole = b"".join(raw)
        raw.clear()
        await call.pass_on(Piece(raw=whole))


def _verdict(reader: StreamReader, answer: Answer, url: str) -> RequestRefused | Failed | None:
    """The reason that a stream that ended is no whole answer; None when it is one."""
    if reader.error is not None:
        return _failed_if_retried(reader.error)
    if not reader.complete:
        why = "its stream ended before the answer was complete"
        return Failed(_server_error(url, why, 502, "upstream_dropped"))
    if any(choice.finish_reason in _CUT_OFF for choice in answer.choices):
        why = "it cut the answer off, as servers do while their weights are changed"
        return Failed(_server_error(url, why, 503, "upstream_aborted"))
    return None


@dataclass(slots=True)
class _Version:
    """The policy version that a server tells, in a header or in its answer."""

    policy_version: int | None

    def hear(self, reply: dict[str, Any]) -> None:
        metadata = reply.get("metadata")
        weight_version = reply.get("weight_version")
        if weight_version is None and isinstance(metadata, dict):  # where SGLang has it
            weight_version = metadata.get("weight_version")
        version = _version_of(weight_version)
        if version is not None and self.policy_version is None:
            self.policy_version = version


def _version_of(value: object) -> int | None:
    """None for what is no number, such as SGLang's `default`."""
    # 18 digits always fit into the 64 bits of a version in the ledger.
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    return value if type(value) is int and value >= 0 else None


def _stream_error(url: str, error: Exception, http: HttpClient) -> RequestRefused:
    if isinstance(error, TimeoutError):
        return _server_error(url, error, 504, "upstream_timeout")
    why = f"its stream has more than {http.max_body_bytes} bytes"
    return _server_error(url, why, 502, "upstream_body_too_large")


def _server_error(url: str, why: object, status: int, code: str) -> RequestRefused:
    return RequestRefused(f"The upstream {url} failed: {why}.", status=status, kind="server_error", code=code)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
