"""One exchange with a server over HTTP: bytes out, a response in, and three ways in which it can fail.

    body ──post──► response ──body_of──► bytes, unpacked
                       └──part_of──► bytes as they arrive; reading stops while nobody takes them
    Unreachable   no connection: nothing was sent
    Dropped       the connection ended before the answer did
    TimeoutError  nothing came for too long

Nothing is retried here. Leaving `post` early, as a cancelled task does, closes the connection at once.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from rllm.errors.redaction import bytes_without_keys
from rllm.files.descriptors import raised_file_limit
from rllm.gateway.upstream.connections import Connections, Origin, Response, UpstreamConnection

KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s of uvicorn, and so of vLLM: who closes a connection first is not surprised."""
_PROBE_TIMEOUT_S = 5.0
_FAILURES = (aiohttp.ClientError, HttpProcessingError, TimeoutError)
_SHARE_OF_FILES = 6
"""One in so many open files that a process may have is a connection to a server, at most. The others are for
clients, which are more: some of them only keep their connection, and some wait for a server."""


class Unreachable(ConnectionError):
    """No connection could be made."""


class SlowToConnect(Unreachable, TimeoutError):
    """No connection in time, which a busy server's full backlog does as well as a machine that is gone."""


class Dropped(ConnectionError):
    """The connection broke, or what came over it was no HTTP."""

    def __init__(self, message: str, *, before_answer: bool = False) -> None:
        super().__init__(message)
        self.before_answer = before_answer
        """Not one byte had come, as when the server had closed a kept connection meanwhile."""


class TooLarge(Exception):
    """The answer has more bytes than are taken."""


@dataclass(kw_only=True, slots=True, eq=False)
class HttpClient:
    """The connections to all servers of one policy."""

    headers: dict[str, str] = field(default_factory=dict[str, str])
    timeout_s: float
    """The longest wait for the next byte of an answer."""
    connect_timeout_s: float
    max_body_bytes: int
    _connections: Connections = field(init=False)
    _room: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(most_connections()), init=False
    )
    """Calls beyond it wait, in the order in which they came, instead of failing for want of open files."""
    num_waiting: int = field(default=0, init=False)
    """The number of those calls that wait."""

    def __post_init__(self) -> None:
        self._connections = Connections(
            headers=self.headers,
            read_timeout_s=self.timeout_s,
            keep_alive_s=KEEP_ALIVE_S,
        )

    async def close(self) -> None:
        self._connections.close()

    def post(self, url: str, body: bytes) -> "_Exchange":
        """`async with` it for the response, once its headers are there.

        Raises Unreachable, Dropped or TimeoutError.
        """
        return _Exchange(self, url, body)

    async def _send(self, url: str, body: bytes) -> Response:
        """Takes room, and gives it back only where there is no response."""
        self.num_waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.num_waiting -= 1
        try:
            target = self._connections.target("POST", url)
            connection = await self._connection(target.origin, self.connect_timeout_s)
            return await self._connections.ask(target, body, connection)
        except BaseException as error:
            self._room.release()
            if isinstance(error, _FAILURES) and not isinstance(error, Unreachable):
                raise self._failure(error, before_answer=True) from error
            raise

    async def _connection(self, origin: Origin, timeout_s: float) -> UpstreamConnection:
        """One that was kept, or a new one."""
        connection = origin.take()
        if connection is not None:
            return connection
        try:
            async with asyncio.timeout(timeout_s):
                return await origin.connect()
        except TimeoutError as error:
            # It is an OSError too, so it stands first: no answer in time says less than a refusal.
            raise SlowToConnect(f"no connection within {timeout_s:g} s, as --connect-timeout says") from error
        except OSError as error:
            raise Unreachable(f"no connection: {error.strerror or error}") from error

    def _end(self, response: Response) -> None:
        response.release()
        self._room.release()

    async def body_of(self, response: Response) -> bytes:
        """The whole body. Raises TooLarge, Dropped or TimeoutError."""
        length = response.content_length
        if length is not None and length > self.max_body_bytes:
            raise TooLarge
        if length is not None and "Content-Encoding" not in response.headers:
            try:
                return bytes_without_keys(await response.content.read())
            except _FAILURES as error:
                raise self._failure(error) from error
        parts: list[bytes] = []
        num_bytes = 0
        while part := await self.part_of(response):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > self.max_body_bytes:
                raise TooLarge
        return bytes_without_keys(b"".join(parts))

    async def part_of(self, response: Response) -> bytes:
        """The part of the body that has arrived since; empty at its end. Raises Dropped or TimeoutError."""
        try:
            return await response.content.readany()
        except _FAILURES as error:
            raise self._failure(error) from error

    async def get(self, url: str) -> tuple[int, Any]:
        """Status and JSON (None where there is none) of something small."""
        target = self._connections.target("GET", url)
        connect_timeout_s = min(self.connect_timeout_s, _PROBE_TIMEOUT_S)
        # Beside the room for calls: a check that waited behind them would find a busy server dead.
        connection = await self._connection(target.origin, connect_timeout_s)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                response = await self._connections.ask(target, b"", connection)
                try:
                    return response.status, _json_or_none(await self.body_of(response))
                finally:
                    response.release()
        except TimeoutError as error:
            raise TimeoutError(f"nothing came for {_PROBE_TIMEOUT_S:g} s") from error
        except _FAILURES as error:
            raise self._failure(error, before_answer=True) from error

    async def ask(self, url: str, data: Any) -> tuple[int, Any]:
        """Status and JSON (None where there is none) of something small that is posted."""
        async with self.post(url, orjson.dumps(data)) as response:
            return response.status, _json_or_none(await self.body_of(response))

    def _failure(self, error: Exception, *, before_answer: bool = False) -> Exception:
        """The failure of an exchange, in our own words."""
        match error:
            case TimeoutError():
                return TimeoutError(f"nothing came for {self.timeout_s:g} s")
            case aiohttp.ClientPayloadError():
                return Dropped("the connection broke before its answer was complete")
            case _:
                what = str(error) or type(error).__name__
                return Dropped(f"the connection broke: {what}", before_answer=before_answer)


class _Exchange:
    """A class, since every call enters one: a generator in its place takes longer."""

    __slots__ = ("_body", "_http", "_response", "_url")

    def __init__(self, http: HttpClient, url: str, body: bytes) -> None:
        self._http, self._url, self._body = http, url, body

    async def __aenter__(self) -> Response:
        self._response = await self._http._send(self._url, self._body)
        return self._response

    async def __aexit__(self, *error: object) -> None:
        self._http._end(self._response)


def most_connections() -> int:
    """To all servers together."""
    return max(8, raised_file_limit() // _SHARE_OF_FILES)


def _json_or_none(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
