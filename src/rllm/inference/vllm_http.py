"""The connections to one vLLM or SGLang server: what it serves, and the chunks of its answers.

    GET /v1/models, /version ──facts──► ServerFacts          body ──complete──► chunk, chunk, …

Failures become errors here: ContextLengthError and ValueError for what was asked wrongly, InferenceError for
what the server did not do.
"""

import io
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rllm.errors import ContextLengthError, InferenceError, MissingExtraError
from rllm.inference.sse import EventSplitter
from rllm.types.messages import LogprobMeaning, SamplingParams

try:
    import aiohttp
    import orjson
except ImportError as error:
    raise MissingExtraError(error.name or "aiohttp", "gateway") from error

_CONTEXT_OVERFLOW = re.compile(
    r"context length|maximum model length|longer than the maximum|max_model_len", re.IGNORECASE
)
_KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s of uvicorn, and so of vLLM: who closes a connection first is not surprised."""
_MAX_ERROR_BYTES = 1 << 20


@dataclass(kw_only=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    model: str
    max_context: int
    engine: str = "vllm"
    """`vllm` or `sglang`."""
    version: tuple[int, ...] = ()
    processed_logprobs: bool = False
    """vLLM was started with `--logprobs-mode processed_logprobs`. No server tells, so it has to be set."""

    def logprob_meaning(self, sampling: SamplingParams) -> LogprobMeaning:
        if self.processed_logprobs:
            return sampling.logprob_meaning
        if self.engine == "sglang" and sampling.temperature not in (0.0, 1.0):
            return LogprobMeaning.TEMPERATURE
        return LogprobMeaning.RAW


class VLLMHttp:
    """The connections to one server."""

    def __init__(
        self, base_url: str, api_key: str | None, timeout_s: float, connect_timeout_s: float
    ) -> None:
        self.base_url = base_url
        self.root = base_url.removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = aiohttp.ClientTimeout(sock_read=timeout_s, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=self._timeout,
            )
        return self._session

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, url: str) -> Any:
        """JSON; None where there is none."""
        with self._failures():
            async with self.session.get(url) as response:
                body = await response.read()
        return _json_or_none(body) if response.status == 200 else None

    async def facts(self, model: str) -> ServerFacts:
        """Raises InferenceError when the server does not serve `model`; an empty name takes any."""
        listed = await self.get(f"{self.base_url}/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        served = {
            each["id"]: each
            for each in models or ()
            if isinstance(each, dict) and isinstance(each.get("id"), str)
        }
        if not served or (model and model not in served):
            raise InferenceError(
                f"The server at {self.base_url} serves {', '.join(served) or 'no model'}; "
                f"{f'`{model}` is wanted' if model else 'one is needed'}."
            )
        chosen = served[model] if model else next(iter(served.values()))
        length = chosen.get("max_model_len")
        if type(length) is not int:
            raise InferenceError(
                f"The server at {self.base_url} does not tell the `max_model_len` of {chosen['id']}, as vLLM "
                "and SGLang do; serve the model with one of them."
            )
        told = await self.get(f"{self.root}/version")
        version = told.get("version") if isinstance(told, dict) else None
        return ServerFacts(
            model=chosen["id"],
            max_context=length,
            engine="sglang" if chosen.get("owned_by") == "sglang" else "vllm",
            version=_numbers(version) if isinstance(version, str) else (),
        )

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of an answer, or the one reply. Leaving early closes the connection."""
        response = await self._post(orjson.dumps(body))
        try:
            if response.status != 200:
                with self._failures():
                    said = await response.content.read(_MAX_ERROR_BYTES)
                raise _refusal(self.base_url, response.status, said)
            if response.content_type == "text/event-stream":
                async for chunk in self._chunks(response):
                    yield chunk
                return
            with self._failures():
                reply = _json_or_none(await response.read())
            if not isinstance(reply, dict):
                raise InferenceError(
                    f"The server at {self.base_url} answered with something that is no JSON."
                )
            yield reply
        finally:
            response.release()

    async def _post(self, body: bytes) -> aiohttp.ClientResponse:
        with self._failures():
            try:
                return await self._send(body)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                # A kept connection that the server had closed: sampling has no side effects.
                return await self._send(body)

    async def _send(self, body: bytes) -> aiohttp.ClientResponse:
        return await self.session.post(
            f"{self.base_url}/completions",
            data=io.BytesIO(body),
            headers={"Content-Type": "application/json"},
        )

    async def _chunks(self, response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        events = EventSplitter()
        while True:
            with self._failures():
                part = await response.content.readany()
            if not part:
                return
            for _, data in events.feed(part):
                if data.strip() == b"[DONE]":
                    continue
                chunk = _json_or_none(data)
                if not isinstance(chunk, dict):
                    raise InferenceError(
                        f"The server at {self.base_url} sent an event that is no JSON object."
                    )
                yield chunk

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError) as error:
            what = str(error) or type(error).__name__
            raise InferenceError(
                f"The server at {self.base_url} cannot be reached or broke off: {what}"
            ) from error


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _refusal(url: str, status: int, body: bytes) -> Exception:
    said = error_text(_json_or_none(body)) or body[:500].decode(errors="replace")
    if status in (400, 413, 422) and _CONTEXT_OVERFLOW.search(said):
        return ContextLengthError(said)
    if status in (400, 422):
        return ValueError(f"The server at {url} refused the request: {said}")
    return InferenceError(f"The server at {url} answered {status}: {said}")


def error_text(reply: Any) -> str:
    """The message in an error, in OpenAI's form or in FastAPI's."""
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(message or "")


def _json_or_none(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
