"""Request bodies: bytes from a client in, a JSON object of bounded size and depth out, or a 4xx."""

import asyncio
import zlib
from typing import Any

import orjson
from aiohttp import web

from rllm.errors import RequestRefused

MAX_BODY_BYTES = 32 << 20
MAX_DEPTH = 200
MAX_CONTAINERS = 500_000
"""Objects and lists of one body: reading them holds the interpreter, so that nobody else is answered."""
SMALL_BODY_BYTES = 256 << 10
"""The size of a body that is read and checked in a millisecond or two."""
_TOO_DEEP = ("recursion", "depth limit")
"""The words by which versions of orjson say that they stopped reading."""
ARRIVAL_TIMEOUT_S = 30.0
"""For the head of a request, and for its body before it comes at `_SLOWEST_BYTES_PER_S`."""
_SLOWEST_BYTES_PER_S = 64 << 10
_ALWAYS_ALLOWED_BYTES = 1 << 20
_MAX_RATIO = 200
"""Above the bytes that are always allowed, nothing honest unpacks to more times its size."""
_UNPACKED_AT_ONCE_BYTES = 256 << 10
"""A larger compressed body is unpacked in a thread, so that the others do not wait."""
_MAX_GZIP_MEMBERS = 64
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


async def read_body(
    http: web.BaseRequest, limit: int = MAX_BODY_BYTES, timeout_s: float = ARRIVAL_TIMEOUT_S
) -> bytes:
    """The body, unpacked. Raises RequestRefused: 413 when it is too large, 415 for an unknown encoding."""
    encodings = _encodings(http)
    if http.content_length is not None and http.content_length > limit:
        raise _too_large(f"{http.content_length}", limit)
    if http.headers.get("Expect", "").lower() == "100-continue":
        # Only now: a client that waits for it has not sent a body that is refused for its size.
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0
    try:
        if http.content.is_eof():  # it is all here, as nearly always
            body = http.content.read_nowait()
        else:
            body = await _read(http, limit, timeout_s)
    except TimeoutError:
        raise RequestRefused(
            f"The body came at less than {_SLOWEST_BYTES_PER_S} bytes/s for {timeout_s:g} s; send it again.",
            status=408,
            code="body_timeout",
        ) from None
    except web.RequestPayloadError as error:
        raise RequestRefused(f"The body could not be read ({error}); send it again.") from error
    if len(body) > limit:
        raise _too_large("more", limit)
    for encoding in reversed(encodings):
        if len(body) > _UNPACKED_AT_ONCE_BYTES:
            body = await asyncio.to_thread(_unpack, body, encoding, limit)
        else:
            body = _unpack(body, encoding, limit)
    return body


def json_object(body: bytes) -> dict[str, Any]:
    """Raises RequestRefused (400) for what is no JSON object or is nested too deeply to be worked with."""
    if not body:
        raise RequestRefused("The body is empty; send a JSON object.")
    # An upper bound of the containers, before anything is parsed: brackets within texts count as well.
    num_brackets = body.count(b"{") + body.count(b"[")
    if num_brackets > MAX_CONTAINERS:
        raise RequestRefused(
            f"The body has {num_brackets} opening brackets and the limit is {MAX_CONTAINERS}; send fewer "
            "objects and lists.",
            status=413,
            code="body_too_large",
        )
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if any(word in str(error).lower() for word in _TOO_DEEP):
            raise _too_deep() from error
        raise RequestRefused(f"The body is no JSON in UTF-8 ({error}); send a JSON object.") from error
    if not isinstance(value, dict):
        raise RequestRefused(f"The body is JSON of type {type(value).__name__}; send an object.")
    # Counting brackets is nearly free, and most bodies have fewer than could be too deep.
    if num_brackets > MAX_DEPTH:
        _require_shallow(value)
    return value


def _require_shallow(value: dict[str, Any]) -> None:
    """Level by level, because a function that calls itself is what deep nesting breaks."""
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for each in level:
            below += each.values() if type(each) is dict else each
        level = [each for each in below if type(each) in (dict, list)]


def _too_deep() -> RequestRefused:
    return RequestRefused(f"The body is nested more than {MAX_DEPTH} levels deep; send a flatter one.")


def _too_large(size: str, limit: int) -> RequestRefused:
    return RequestRefused(
        f"The body has {size} bytes and the limit is {limit}; send a smaller one.",
        status=413,
        code="body_too_large",
    )


def _encodings(http: web.BaseRequest) -> list[str]:
    header = http.headers.get("Content-Encoding")
    if header is None:  # as nearly always
        return []
    names = [each.strip().lower() for each in header.split(",")]
    encodings = [each for each in names if each not in ("", "identity")]
    unknown = [each for each in encodings if each not in _WBITS]
    if unknown or len(encodings) > 2:
        raise RequestRefused(
            f"The body has the encoding {', '.join(unknown or encodings)[:80]!r}; this gateway reads gzip "
            "and deflate, at most two on top of each other.",
            status=415,
            code="unsupported_encoding",
        )
    return encodings


async def _read(http: web.BaseRequest, limit: int, timeout_s: float) -> bytes:
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with asyncio.timeout_at(deadline) as timer:
        chunk = await http.content.readany()
        if not chunk or http.content.at_eof():
            return chunk
        body = bytearray(chunk)
        while chunk := await http.content.readany():
            body += chunk
            if len(body) > limit:
                raise _too_large("more", limit)
            # Each byte that came buys time for the next ones, so a slow but steady body of any size arrives.
            timer.reschedule(deadline + len(body) / _SLOWEST_BYTES_PER_S)
    return bytes(body)


def _unpack(body: bytes, encoding: str, limit: int) -> bytes:
    limit = min(limit, max(_ALWAYS_ALLOWED_BYTES, len(body) * _MAX_RATIO))
    wbits = _WBITS[encoding]
    if encoding == "deflate" and (len(body) < 2 or body[0] & 0x0F != 8 or int.from_bytes(body[:2]) % 31):
        wbits = -15  # without the header that the standard asks for, as some clients send it
    data = bytearray()
    members = 0
    try:
        while body:
            members += 1
            if members > _MAX_GZIP_MEMBERS:
                raise zlib.error(f"it has more than {_MAX_GZIP_MEMBERS} members")
            stream = zlib.decompressobj(wbits)
            # At least 1, because 0 means no limit to zlib. The one byte beyond the limit shows that there is
            # more.
            data += stream.decompress(body, limit + 1 - len(data))
            if len(data) > limit:
                raise _too_large(f"unpacked more than {limit}", limit)
            if not stream.eof:
                raise zlib.error("it ends too early")
            body = stream.unused_data if encoding != "deflate" else b""
    except zlib.error as error:
        raise RequestRefused(f"The body is not what its encoding {encoding!r} says ({error}).") from error
    return bytes(data)
