"""The connections to one server that speaks OpenAI's protocol, and what its failures mean here.

    body ──open──► response ──whole──► bytes           no connection, broken off, 429, 5xx ──► InferenceError
                                                       too long a prompt ──► ContextLengthError
                                                       any other 4xx ──► HttpRefusal

Nothing is tried again here: whoever plays the rollout does that. Leaving early closes the connection.
"""

import asyncio
import io
import math
import os
import re
import resource
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

from rllm.errors import ConfigError, ContextLengthError, InferenceError, MissingExtraError
from rllm.errors.redaction import hide_key, may_hold_key, values_without_keys, without_keys

try:
    import aiohttp
    import orjson
except ImportError as error:
    raise MissingExtraError(error.name or "aiohttp", "gateway") from error

Response = aiohttp.ClientResponse
Found = TypeVar("Found")

_CONTEXT_OVERFLOW = re.compile(
    r"context.length|maximum model length|longer than the maximum|max_model_len", re.IGNORECASE
)
_KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s of uvicorn, and so of vLLM: who closes a connection first is not surprised."""
_MOST_OPENED_AT_ONCE = 64
MAX_REPLY_BYTES = 256 << 20
"""A whole answer: 100,000 tokens with log-probabilities take 20 MB of JSON."""
_MAX_ERROR_BYTES = 1 << 20
_MAX_ERROR_CHARS = 2_000
"""The length of a server's words about an error; some repeat the whole request."""
_MAX_BYTES_AT_ONCE = 1 << 20
# Statuses of a refusal that may pass when the call is repeated.
_TRY_LATER = frozenset({408, 409, 425, 429})


class HttpRefusal(Exception):
    """The server says no, and would say so again: a status from 400 to 499."""

    def __init__(self, status: int, message: str, *, param: str = "", is_json: bool = True) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.param = param
        """The field that the server points at."""
        self.is_json = is_json
        """It is an error in the protocol's own form, and not a page of something in between."""


class ServerHttp:
    """One pool of connections for each event loop that calls come from; it is made when the first does.

    At most `max_connections` are open at once and other calls wait for one, in the order in which they came;
    0 takes three quarters of the files that this process may open.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        timeout_s: float,
        connect_timeout_s: float,
        max_connections: int = 0,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"`{name}` is {value}; it must be a number of seconds above 0.")
        if max_connections < 0:
            raise ConfigError(f"`max_connections` is {max_connections}; it must be 0 or more.")
        self.base_url = base_url
        hide_key(api_key)
        self._headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(sock_read=timeout_s, sock_connect=connect_timeout_s)
        self._max_connections = max_connections or _most_connections()
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    @property
    def session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            for dead in [each for each in self._sessions if each.is_closed()]:
                self._sessions.pop(dead).detach()  # nothing can be closed in a loop that has ended
            session = self._sessions[loop] = aiohttp.ClientSession(
                connector=_Connector(self._max_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=self._timeout,
                trace_configs=[_which_connection()],
            )
        return session

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for loop, session in sessions.items():
            if loop is asyncio.get_running_loop():
                await session.close()
            elif loop.is_closed():
                session.detach()
            else:  # of another thread
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.close(), loop))

    async def get(self, url: str) -> Any:
        """JSON; None where there is none."""
        with self.failures():
            async with self.session.get(url, trace_request_ctx=WhichConnection()) as response:
                body = await self.body_of(response)
        return json_or_none(body) if response.status == 200 else None

    async def open(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Response:
        """The response, once its headers are there; to be released. `path` is a whole address, or goes on
        behind the server's.

        Raises InferenceError, ContextLengthError or HttpRefusal, as the diagram says.
        """
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        payload = orjson.dumps(body)
        # A large body in one piece would hold up the event loop while it is written.
        is_large = len(payload) > _MAX_BYTES_AT_ONCE
        with self.failures():
            # The body is made by a function, because a second try needs a stream that nobody has read.
            response = await self._send(
                path, all_headers, lambda: io.BytesIO(payload) if is_large else payload
            )
        if response.status == 200:
            return response
        try:
            with self.failures():
                content = await response.content.read(_MAX_ERROR_BYTES)
            raise _error(self.base_url, response.status, content, response.headers.get("Retry-After"))
        finally:
            response.release()

    async def _send(
        self, path: str, headers: Mapping[str, str], data: Callable[[], bytes | io.BytesIO]
    ) -> Response:
        """Once more where a kept connection turns out to have been closed meanwhile: nothing was asked."""
        connection = WhichConnection()
        while True:
            try:
                return await self.session.post(
                    path if path.startswith("http") else self.base_url + path,
                    data=data(),
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=connection,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not connection.was_kept:
                    raise
                connection.was_kept = False

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """The whole reply as JSON; None where it is none."""
        response = await self.open(path, body, headers)
        try:
            return await self.whole(response)
        finally:
            response.release()

    async def whole(self, response: Response) -> Any:
        with self.failures():
            return json_or_none(await self.body_of(response))

    async def body_of(self, response: Response) -> bytes:
        """Unpacked as it comes, so that a few packed bytes cannot become gigabytes."""
        parts: list[bytes] = []
        num_bytes = 0
        async for part in response.content.iter_any():
            num_bytes += len(part)
            if num_bytes > MAX_REPLY_BYTES:
                raise InferenceError(
                    f"The server at {self.base_url} answered with more than {MAX_REPLY_BYTES >> 20} MiB; "
                    "the rest is not read."
                )
            parts.append(part)
        return b"".join(parts)

    @contextmanager
    def failures(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InferenceError(
                f"The server at {self.base_url} cannot be reached or broke off: {_cause(error)}"
            ) from error


def _cause(error: Exception) -> str:
    """aiohttp speaks of ssl in every connection that fails, also to an http address."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        # Failures to resolve a name have numbers below 0, which `strerror` does not know.
        number = error.errno or 0
        return os.strerror(number) if number > 0 else str(error.strerror)
    return str(error) or type(error).__name__


class AskedOnce(Generic[Found]):
    """A fact that the first call finds out: calls that come meanwhile wait for the same, and a failure is
    forgotten, so that the next call asks again."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Found]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[Found] | None = None
        self.value: Found | None = None

    async def __call__(self) -> Found:
        if self.value is not None:
            return self.value
        asking = self._asking
        # A task can be awaited only in the event loop that runs it.
        if asking is None or asking.done() or asking.get_loop() is not asyncio.get_running_loop():
            asking = self._asking = asyncio.create_task(self._ask())
            asking.add_done_callback(_consume_error)
        facts = await asyncio.shield(asking)  # whoever gives up leaves the others waiting
        self.value = facts
        return facts


def _consume_error(asking: "asyncio.Task[Any]") -> None:
    """Whoever waited has the error; when nobody does any more, it is no news."""
    if not asking.cancelled():
        asking.exception()


class _Connector(aiohttp.TCPConnector):
    """Opens a few connections at a time. Thousands at once would overflow the line in which a server keeps
    those that it has not accepted yet, and who is dropped from there waits for seconds."""

    def __init__(self, max_connections: int) -> None:
        super().__init__(limit=max_connections, keepalive_timeout=_KEEP_ALIVE_S)
        self._room = asyncio.Semaphore(_MOST_OPENED_AT_ONCE)

    async def _create_connection(self, *args: Any, **kwargs: Any) -> Any:
        async with self._room:
            return await super()._create_connection(*args, **kwargs)


class WhichConnection:
    """The connection that a call goes over."""

    was_kept = False


def _which_connection() -> aiohttp.TraceConfig:
    async def on_reuse(session: Any, context: Any, params: Any) -> None:
        context.trace_request_ctx.was_kept = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(on_reuse)
    return config


def error_text(reply: Any) -> str:
    """The message in an error, in OpenAI's form or in FastAPI's."""
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(message or "")


def json_or_none(body: bytes) -> Any:
    """The server's JSON, without the keys that it was sent."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return values_without_keys(value) if may_hold_key(body) else value


def _error(url: str, status: int, body: bytes, retry_after: str | None) -> Exception:
    reply = json_or_none(body)
    detail = (error_text(reply) or without_keys(body.decode(errors="replace")))[:_MAX_ERROR_CHARS]
    error = reply.get("error") if isinstance(reply, dict) else None
    fields = error if isinstance(error, dict) else {}
    if status in (400, 413, 422) and (
        fields.get("code") == "context_length_exceeded" or _CONTEXT_OVERFLOW.search(detail)
    ):
        return ContextLengthError(detail)
    if 400 <= status < 500 and status not in _TRY_LATER:
        return HttpRefusal(
            status, detail, param=str(fields.get("param") or ""), is_json=bool(error_text(reply))
        )
    return InferenceError(
        f"The server at {url} answered {status}: {detail}", retry_after_s=_seconds(retry_after)
    )


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header: seconds, or a date."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _most_connections() -> int:
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft_limit == resource.RLIM_INFINITY else max(8, soft_limit * 3 // 4)
