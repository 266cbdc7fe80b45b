"""Connections to servers that are kept between requests, and one exchange over one of them.

    method, URL, body ──ask──► a kept connection, or a new one ──► Response: status and headers are here
    Response ──release──► kept, where the answer was read to its end; else closed at once

aiohttp reads the answers (`ResponseHandler`, as its own client does). Its client itself is not used: what it
makes of every request anew (URL, headers, cookies, redirects, traces) takes longer than all else of a call
to a model, whose requests differ in nothing but the body.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from aiohappyeyeballs import start_connection
from aiohttp import ServerDisconnectedError
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.streams import StreamReader
from yarl import URL

from rllm.errors import ConfigError

_COPIED_BYTES = 1 << 20
"""A body up to this size leaves in one piece with its head."""
_ADDRESSES_KEPT_S = 10.0
"""A name is looked up again after this time."""
_NEXT_ADDRESS_AFTER_S = 0.25
"""The time after which the next address of a name is tried as well."""
_MAX_TARGETS = 1024


class Response:
    """The head of an answer, and its body as it comes."""

    __slots__ = ("_connection", "content", "headers", "status")

    def __init__(
        self, status: int, headers: Mapping[str, str], content: StreamReader, connection: "UpstreamConnection"
    ) -> None:
        self.status = status
        self.headers = headers
        self.content = content
        self._connection = connection

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "")

    @property
    def content_length(self) -> int | None:
        """The size that the server tells, before it is unpacked."""
        length = self.headers.get("Content-Length")
        return None if length is None else int(length)

    def release(self) -> None:
        """Keep the connection for the next request where the answer was read to its end; else close it."""
        self._connection.release()


class UpstreamConnection(ResponseHandler):
    """One connection to one server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, origin: "Origin") -> None:
        super().__init__(loop)
        self._origin = origin
        self.kept_since_s = 0.0

    def release(self) -> None:
        # Bytes of a body that are not sent yet would have to leave before the next request does, to a server
        # that has answered without them.
        if self.is_usable() and self.transport is not None and not self.transport.get_write_buffer_size():
            self._origin.keep(self)
        else:
            self.end()

    def is_usable(self) -> bool:
        return self.is_connected() and not self.should_close

    def end(self) -> None:
        """Close it at once, with what was not sent yet."""
        # `close` alone would first send the rest, to a server that may never read it.
        if self.transport is not None and self.transport.get_write_buffer_size():
            self.transport.abort()
        self.close()


@dataclass(slots=True, eq=False)
class Origin:
    """One host and port, and the connections to it that nobody uses."""

    url: URL
    keep_alive_s: float
    idle: deque[UpstreamConnection] = field(default_factory=deque["UpstreamConnection"])
    """The one that was used last at the end."""
    addresses: list[Any] = field(default_factory=list[Any])
    addresses_until_s: float = 0.0
    closer: asyncio.TimerHandle | None = None

    def take(self) -> UpstreamConnection | None:
        now_s = asyncio.get_running_loop().time()
        while self.idle:
            connection = self.idle.pop()
            if connection.is_usable() and now_s - connection.kept_since_s < self.keep_alive_s:
                return connection
            connection.end()
        return None

    def keep(self, connection: UpstreamConnection) -> None:
        loop = asyncio.get_running_loop()
        connection.kept_since_s = loop.time()
        self.idle.append(connection)
        if self.closer is None:
            self.closer = loop.call_later(self.keep_alive_s, self._close_old)

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        self.closer = None
        while self.idle and loop.time() - self.idle[0].kept_since_s >= self.keep_alive_s:
            self.idle.popleft().end()
        if self.idle:
            self.closer = loop.call_at(self.idle[0].kept_since_s + self.keep_alive_s, self._close_old)

    async def connect(self) -> UpstreamConnection:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        host, port = str(self.url.raw_host), self.url.port
        if loop.time() >= self.addresses_until_s:
            self.addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.addresses_until_s = loop.time() + _ADDRESSES_KEPT_S
        open_socket = await start_connection(
            self.addresses, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER_S, interleave=1
        )
        is_tls = self.url.scheme == "https"
        try:
            _, connection = await loop.create_connection(
                lambda: UpstreamConnection(loop, self),
                sock=open_socket,
                ssl=_tls_context() if is_tls else None,
                server_hostname=host if is_tls else None,
            )
        except BaseException:
            open_socket.close()
            raise
        return connection

    def close(self) -> None:
        if self.closer is not None:
            self.closer.cancel()
            self.closer = None
        while self.idle:
            self.idle.pop().end()


@dataclass(slots=True, frozen=True)
class Target:
    """All that requests to one URL have in common."""

    origin: Origin
    head: bytes
    """Up to the value of Content-Length where a body follows, else all of it."""
    has_body: bool


@dataclass(kw_only=True, slots=True, eq=False)
class Connections:
    """All connections of one client, in one event loop."""

    headers: Mapping[str, str]
    """Sent with every request."""
    read_timeout_s: float
    """The longest wait for the next byte of an answer."""
    keep_alive_s: float
    _origins: dict[str, Origin] = field(default_factory=dict[str, Origin], init=False)
    _targets: dict[tuple[str, str], Target] = field(default_factory=dict[tuple[str, str], Target], init=False)

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not value.isprintable():
                raise ConfigError(
                    f"The header {name} for the upstream holds a character that cannot be sent, such as a "
                    "line break; give the key without it."
                )

    def target(self, method: str, url: str) -> Target:
        target = self._targets.get((method, url))
        if target is None:
            if len(self._targets) >= _MAX_TARGETS:  # servers come and go for ever
                self._targets.clear()
                self._origins = {name: origin for name, origin in self._origins.items() if origin.idle}
            target = self._targets[method, url] = self._new_target(method, URL(url))
        return target

    async def ask(self, target: Target, body: bytes, connection: UpstreamConnection) -> Response:
        """Send a request, and wait for the head of its answer. Whatever is raised, the connection is closed.

        Raises what aiohttp raises: ClientError, HttpProcessingError, TimeoutError.
        """
        try:
            # An answer without a length ends with its connection.
            connection.set_response_params(read_until_eof=True, read_timeout=self.read_timeout_s)
            transport = connection.transport
            if transport is None:  # closed as soon as it was made
                raise ServerDisconnectedError
            if not target.has_body:
                transport.write(target.head)
            elif len(body) <= _COPIED_BYTES:
                transport.write(b"%b%d\r\n\r\n%b" % (target.head, len(body), body))
            else:
                transport.write(b"%b%d\r\n\r\n" % (target.head, len(body)))
                transport.write(body)
            connection.start_timeout()
            while True:
                message, content = await connection.read()
                # Other codes below 200 only announce the answer that will follow.
                if message.code == 101 or not 100 <= message.code <= 199:
                    return Response(message.code, message.headers, content, connection)
        except BaseException:
            connection.end()
            raise

    def close(self) -> None:
        for origin in self._origins.values():
            origin.close()
        self._origins.clear()
        self._targets.clear()

    def _new_target(self, method: str, url: URL) -> Target:
        origin_url = url.origin()
        origin = self._origins.setdefault(str(origin_url), Origin(origin_url, self.keep_alive_s))
        headers = {
            "Host": url.host_port_subcomponent,
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "User-Agent": SERVER_SOFTWARE,
            **self.headers,
        }
        lines = [f"{method} {url.raw_path_qs} HTTP/1.1", *map(": ".join, headers.items())]
        has_body = method == "POST"
        lines += ["Content-Type: application/json", "Content-Length: "] if has_body else ["", ""]
        return Target(origin, "\r\n".join(lines).encode(), has_body)


@cache
def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    # The only version that aiohttp's parser reads.
    context.set_alpn_protocols(["http/1.1"])
    return context
