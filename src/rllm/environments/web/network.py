"""The network of one browser context: a proxy of its own, which knows the hosts of the task and no other.

    page ──► proxy on loopback, one port a context ──┬─ without the token  ──► 407
                                                     ├─ a host of `sites`  ──► answered here, by a function
                                                     ├─ a host of `hosts`  ──► passed on to a public address
                                                     └─ any other          ──► 403, counted

Chromium sends everything through it: workers, websockets and prefetches too, and it resolves no name
itself. A local address is passed on only where the task names it with its port, as in `127.0.0.1:8080`.
The context alone has the token, so that no other program of this machine can use the port.
"""

import asyncio
import base64
import hmac
import ipaddress
import mimetypes
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MAX_HEAD_BYTES = 64_000
MAX_BODY_BYTES = 8_000_000
"""The size of a request; answers may have any size."""
_IDLE_S = 60.0
_CONNECT_S = 10.0
_CHUNK = 65_536


@dataclass(kw_only=True, slots=True, frozen=True)
class SiteRequest:
    """A page's request to a site."""

    method: str
    path: str
    """Decoded, without the query."""
    query: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


@dataclass(kw_only=True, slots=True, frozen=True)
class SiteResponse:
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    content_type: str = "text/html; charset=utf-8"


Site = Callable[[SiteRequest], SiteResponse]
"""A site that runs in this process: a request in, a response out. It must not block."""

USER = "rllm"
"""Whom the token belongs to, as proxies name it."""
LOGIN_HOST = "login.rllm.test"
"""Answered with an empty page; a context shows its token here once, and Chromium sends it from then on."""
_LOCKED = SiteResponse(status=407, headers=(("Proxy-Authenticate", 'Basic realm="rllm"'),))
_NO_ANSWER = SiteResponse(status=502, body=b"The host did not answer.")
_CLOSED = SiteResponse(status=403, body=b"<title>Closed</title>This host is closed to the task.")


@dataclass(slots=True)
class _Head:
    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict[str, str])
    raw_lines: list[bytes] = field(default_factory=list[bytes])
    authorization: str = ""
    """The context's credential for its proxy; not among the headers, because no site may know it."""


class ContextNetwork:
    """The proxy of one context. Only used in the loop of the browser."""

    def __init__(self) -> None:
        self.sites: Mapping[str, Site] = {}
        self.hosts: tuple[str, ...] = ()
        self.num_refused: Counter[str] = Counter()
        """Hosts that were asked for and are closed."""
        self.failure: str | None = None
        """The failure that a site of the task raised."""
        self.port = 0
        self.token = secrets.token_hex(16)
        self._authorization = f"Basic {base64.b64encode(f'{USER}:{self.token}'.encode()).decode()}"
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    def admit(self, sites: Mapping[str, Site], hosts: tuple[str, ...]) -> None:
        """From now on these are open, and nothing is counted yet."""
        self.sites, self.hosts = sites, hosts
        self.num_refused.clear()
        self.failure = None

    async def close(self) -> None:
        """Stop listening and drop all connections, which ends their tasks."""
        if self._server is not None:
            self._server.close()
        for each in list(self._connections):
            each.transport.abort()

    def allows(self, url: str) -> bool:
        """Whether the address is of a host that is open."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            return False
        return self._is_open(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))

    def _is_open(self, host: str, port: int) -> bool:
        if host in self.sites:
            return port == 80
        return any(each in (host, f"{host}:{port}") or _is_below(host, each) for each in self.hosts)

    # ---- connections -------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while await self._answer_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, TimeoutError):
            pass  # the page gave up, or sent what is no HTTP: it has no answer to this request
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        head = await _read_head(reader)
        if head is None:
            return False
        if not hmac.compare_digest(head.authorization.encode(), self._authorization.encode()):
            await _write_response(writer, _LOCKED)
            return False
        if head.method == "CONNECT":
            host, _, port = head.target.rpartition(":")
            await self._tunnel(host.strip("[]").lower(), int(port), reader, writer)
            return False
        parts = urlsplit(head.target)
        host, port = (parts.hostname or "").lower(), parts.port or 80
        if host == LOGIN_HOST:
            await _write_response(writer, SiteResponse())
            return True
        if host in self.sites and port == 80:
            await self._answer_here(self.sites[host], head, reader, writer)
            return head.headers.get("connection", "").lower() != "close"
        if parts.scheme != "http" or not self._is_open(host, port):
            await self._refuse(host, port, writer)
            return False
        # One request a connection: what comes behind it is passed on unread, and could name another host.
        await self._forward(host, port, head, reader, writer)
        return False

    async def _answer_here(
        self, site: Site, head: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        length = int(head.headers.get("content-length", "0") or 0)
        if length > MAX_BODY_BYTES:
            raise ValueError(f"The body has {length} bytes; the limit is {MAX_BODY_BYTES}.")
        parts = urlsplit(head.target)
        request = SiteRequest(
            method=head.method,
            path=unquote(parts.path) or "/",
            query=parts.query,
            headers=head.headers,
            body=await reader.readexactly(length),
        )
        try:
            response = site(request)
        except Exception as error:  # noqa: BLE001  whatever a site raises is its own mistake: the episode fails with it
            self.failure = f"The site at {parts.hostname} failed: {type(error).__name__}: {error}"
            response = _NO_ANSWER
        # A 407 of the site would pass for one of the proxy, as `_pipe_answer` says.
        await _write_response(writer, _NO_ANSWER if response.status == _LOCKED.status else response)

    async def _refuse(self, host: str, port: int, writer: asyncio.StreamWriter) -> None:
        # A page can make up any number of names, and all of them would go into the result of every step.
        if len(self.num_refused) < 100:
            self.num_refused[f"{host}:{port}"[:200]] += 1
        await _write_response(writer, _CLOSED)

    async def _tunnel(
        self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # A function answers for a site, over plain HTTP only, so a tunnel to it has no other end.
        if host in self.sites or not self._is_open(host, port):
            await self._refuse(host, port, writer)
            return
        upstream = await self._connect(host, port, writer)
        if upstream is None:
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await _pipe_both(_pipe(reader, upstream[1]), _pipe(upstream[0], writer), upstream[1])

    async def _forward(
        self, host: str, port: int, head: _Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        upstream = await self._connect(host, port, writer)
        if upstream is None:
            return
        parts = urlsplit(head.target)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # The host closes the connection after its answer: bytes are passed
        # on unread, so its end is the only sign that the answer is complete.
        lines = [each for each in head.raw_lines if not each.lower().startswith((b"proxy-", b"connection:"))]
        upstream[1].write(
            f"{head.method} {path} HTTP/1.1\r\n".encode("latin-1")
            + b"".join(lines)
            + b"Connection: close\r\n\r\n"
        )
        await _pipe_both(_pipe(reader, upstream[1]), _pipe_answer(upstream[0], writer), upstream[1])

    async def _connect(
        self, host: str, port: int, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to a host that is open; None, and an answer to the page, where there is none."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                # The address that was checked is the one that is connected
                # to: a second look-up of the name could give a local one.
                address = str(rows[0][4][0])
                if f"{host}:{port}" not in self.hosts and not ipaddress.ip_address(address).is_global:
                    await self._refuse(host, port, writer)
                    return None
                return await asyncio.open_connection(address, port)
        except (OSError, TimeoutError):
            await _write_response(writer, _NO_ANSWER)
            return None


def folder_site(folder: Path) -> Site:
    """A site of the files below `folder`, and of nothing else."""
    root = folder.resolve()

    def serve(request: SiteRequest) -> SiteResponse:
        # Resolved before the check, because `..` and links may lead out of the folder.
        path = (root / request.path.lstrip("/")).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            return SiteResponse(status=404, body=b"There is no such page.")
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        if kind.startswith("text/") or kind.endswith("javascript"):
            kind = f"{kind}; charset=utf-8"
        cache = (("Cache-Control", "max-age=3600"),)
        return SiteResponse(body=path.read_bytes(), content_type=kind, headers=cache)

    return serve


def _is_below(host: str, pattern: str) -> bool:
    """`*.example.org` opens all hosts below it."""
    return pattern.startswith("*.") and host.endswith(pattern[1:])


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """The first lines of a request; None where the connection ended before one."""
    try:
        async with asyncio.timeout(_IDLE_S):
            raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw[:-4].split(b"\r\n")
    method, target, _ = first.decode("latin-1").split(" ", 2)
    head = _Head(method=method, target=target)
    for line in lines:
        name, _, value = line.decode("latin-1").partition(":")
        name = name.strip().lower()
        if name == "proxy-authorization":
            head.authorization = value.strip()
        else:
            head.headers[name] = value.strip()
            head.raw_lines.append(line + b"\r\n")
    return head


async def _write_response(writer: asyncio.StreamWriter, response: SiteResponse) -> None:
    head = [
        f"HTTP/1.1 {response.status} -",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        *(f"{name}: {value}" for name, value in response.headers),
    ]
    writer.write("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + response.body)
    await writer.drain()


async def _pipe_both(
    to_host: Coroutine[Any, Any, None], to_page: Coroutine[Any, Any, None], host_writer: asyncio.StreamWriter
) -> None:
    """Pass bytes on in both directions until one side has sent all of its own."""
    directions = {asyncio.ensure_future(to_host), asyncio.ensure_future(to_page)}
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in directions:
            each.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        host_writer.close()


async def _pipe_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass a host's answer on, but for one that asks for the token as if it were the proxy: that would make
    Chromium forget it."""
    try:
        first = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        first = b""
    if not first or first.split(b" ", 2)[1:2] == [str(_LOCKED.status).encode()]:
        await _write_response(writer, _NO_ANSWER)
        return
    writer.write(first)
    await _pipe(reader, writer)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
