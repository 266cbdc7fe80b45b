"""A model server on a real socket that does what it is told: answers, streams, hangs, lies, drops, dies.

    async with FakeUpstream() as server:                    # answers every chat as vLLM would
        server.script = [refuse(429, retry_after="0"), say("hello")]    # one a request, then the default

Ids are code points, so a prompt's ids can be read. What was asked is in `server.asked`.
"""

import asyncio
import gzip
import json
import socket
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from rllm.gateway.dialects.registry import DIALECTS
from rllm.types.wire import CallRecord, CallRequest, Dialect, Piece

Behaviour = Callable[["Asked"], Awaitable[web.StreamResponse]]
END_ID = 0


@dataclass(slots=True)
class Asked:
    """One request as it came."""

    http: web.Request
    path: str
    body: dict[str, Any]
    server: "FakeUpstream"
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client went away before the answer was sent."""


class FakeUpstream:
    """One server. `stop` kills it with all its connections; `start` brings it back on the same port."""

    def __init__(self, *, engine: str = "vllm", answer: str = "ok", model: str = "m") -> None:
        self.engine = engine
        self.answer = answer
        self.model = model
        self.script: list[Behaviour] = []
        self.default: Behaviour = speak
        self.asked: list[Asked] = []
        self.num_probes = 0
        self.healthy = True
        self.health_path = True
        self.port = 0
        self._runner: web.ServerRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [each.body for each in self.asked]

    @property
    def num_connections(self) -> int:
        assert self._runner is not None
        server = self._runner.server
        return 0 if server is None else len(server.connections)

    async def start(self) -> Self:
        self._runner = web.ServerRunner(
            web.Server(self._answer, handler_cancellation=True), shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return self

    async def stop(self) -> None:
        """As kill -9 does: whoever is connected is cut off."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            server = site._server  # type: ignore[attr-defined]
            server.close()
        assert runner.server is not None
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(http, web.BaseRequest)
        if http.method == "GET":
            return self._told(http.path)
        body = b"".join([part async for part in http.content.iter_any()])
        asked = Asked(http, http.path, json.loads(body), self)  # type: ignore[arg-type]
        self.asked.append(asked)
        behaviour = self.script.pop(0) if self.script else self.default
        try:
            return await behaviour(asked)
        except asyncio.CancelledError:
            asked.gone.set()
            raise

    def _told(self, path: str) -> web.Response:
        self.num_probes += 1
        if path == "/health" and self.health_path:
            return web.Response(status=200 if self.healthy else 503)
        if path == "/v1/models":
            if not self.healthy:
                return web.Response(status=503)
            model = {"id": self.model, "owned_by": self.engine, "max_model_len": 4096}
            return web.json_response({"object": "list", "data": [model]})
        if path == "/version" and self.engine == "vllm":
            return web.json_response({"version": "0.12.0"})
        return web.Response(status=404)


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def rendered(messages: Sequence[dict[str, Any]]) -> str:
    """The prompt of a chat: an answer stands in it as it was sampled, end token included."""
    text = ""
    for message in messages:
        end = "\0" if message["role"] == "assistant" else ""
        text += f"{message['role']}:{message.get('content') or ''}{end}\n"
    return text + "assistant:"


async def speak(asked: Asked) -> web.StreamResponse:
    """An answer as vLLM gives it, with what the body asks for."""
    return await say(asked.server.answer)(asked)


def say(
    text: str,
    *,
    hold: asyncio.Event | None = None,
    headers: dict[str, str] | None = None,
    extra: dict[str, Any] | None = None,
    prompt: str | None = None,
    finish_reason: str = "stop",
    encoding: str = "",
) -> Behaviour:
    """`prompt`: what the prompt ids say, where that is not the messages. `hold` is waited for first."""

    async def behave(asked: Asked) -> web.StreamResponse:
        if hold is not None:
            await hold.wait()
        if asked.body.get("stream"):
            return await stream(text, headers=headers, extra=extra, prompt=prompt)(asked)
        told = prompt if prompt is not None else _prompt_of(asked)
        choices = [_choice(asked, index, text, finish_reason) for index in range(asked.body.get("n") or 1)]
        reply = _head(asked) | {"choices": choices, "usage": _usage(told, text, len(choices))} | (extra or {})
        if asked.body.get("return_token_ids"):
            for choice in choices:
                if asked.path.endswith("/completions") and not asked.path.endswith("/chat/completions"):
                    choice["prompt_token_ids"] = _prompt_ids(asked, told)
            if asked.path.endswith("/chat/completions"):
                reply["prompt_token_ids"] = _prompt_ids(asked, told)
        body = json.dumps(reply).encode()
        sent = dict(headers or {})
        if encoding:
            sent["Content-Encoding"] = encoding
            body = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
        return web.Response(body=body, content_type="application/json", headers=sent)

    return behave


def stream(
    text: str,
    *,
    drop_after: int | None = None,
    end_after: int | None = None,
    error_after: int | None = None,
    error: dict[str, Any] | None = None,
    hold: asyncio.Event | None = None,
    hold_after: int = 1,
    done: bool = True,
    headers: dict[str, str] | None = None,
    extra: dict[str, Any] | None = None,
    prompt: str | None = None,
    encoding: str = "",
) -> Behaviour:
    """One event a character. `drop_after` cuts the connection after as many, `end_after` ends politely."""

    async def behave(asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **(headers or {})})
        if encoding:
            response.enable_compression(web.ContentCoding(encoding))
        await response.prepare(asked.http)
        for place, event in enumerate(_events(asked, text, prompt, extra)):
            if place == drop_after:
                assert asked.http.transport is not None
                asked.http.transport.abort()
                return response
            if place == end_after:
                await response.write_eof()
                return response
            if place == error_after:
                await response.write(_event({"error": error}))
                await response.write_eof(b"data: [DONE]\n\n")
                return response
            if hold is not None and place == hold_after:
                await hold.wait()
            await response.write(event)
        await response.write_eof(b"data: [DONE]\n\n" if done else b"")
        return response

    return behave


def refuse(
    status: int, message: str = "no", *, param: str | None = None, retry_after: str | None = None
) -> Behaviour:
    async def behave(asked: Asked) -> web.StreamResponse:
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        error = {"message": message, "type": "some_error", "param": param, "code": None}
        return web.json_response({"error": error}, status=status, headers=headers)

    return behave


def refuse_field(name: str) -> Behaviour:
    """Every request with that field in its body is refused, as strict servers do; others are answered."""

    async def behave(asked: Asked) -> web.StreamResponse:
        if name in asked.body:
            return await refuse(400, f"Unrecognized request argument supplied: {name}")(asked)
        return await speak(asked)

    return behave


def body(data: bytes, content_type: str = "application/json", **headers: str) -> Behaviour:
    async def behave(asked: Asked) -> web.StreamResponse:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=data, headers={"Content-Type": content_type, **sent})

    return behave


async def drop(asked: Asked) -> web.StreamResponse:
    """Closes the connection without a word, as a server does with a kept connection that it is done with."""
    assert asked.http.transport is not None
    asked.http.transport.close()
    return web.Response()


def hang(reached: asyncio.Event | None = None) -> Behaviour:
    async def behave(asked: Asked) -> web.StreamResponse:
        if reached is not None:
            reached.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    return behave


def closed_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# ---- what vLLM would send ----------------------------------------------------------------------------------


def _prompt_of(asked: Asked) -> str:
    given = asked.body.get("prompt")
    if isinstance(given, str):
        return given
    return "" if isinstance(given, list) else rendered(asked.body.get("messages", ()))


def _prompt_ids(asked: Asked, told: str) -> list[int]:
    given = asked.body.get("prompt")
    return given if isinstance(given, list) else ids_of(told)


def _head(asked: Asked) -> dict[str, Any]:
    return {"id": f"up-{len(asked.server.asked)}", "created": 1, "model": asked.body.get("model", "m")}


def _is_chat(asked: Asked) -> bool:
    return asked.path.endswith("/chat/completions")


def _logprobs(asked: Asked, ids: Sequence[int]) -> dict[str, Any] | None:
    wanted = asked.body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    names = [chr(token) for token in ids]
    if asked.body.get("return_tokens_as_token_ids"):
        names = [f"token_id:{token}" for token in ids]
    values = [-float(token) / 1000 for token in ids]
    if _is_chat(asked):
        pairs = zip(names, values, strict=True)
        return {"content": [{"token": name, "logprob": value, "top_logprobs": []} for name, value in pairs]}
    tops = [{name: value} for name, value in zip(names, values, strict=True)]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": [0] * len(ids)}


def _choice(asked: Asked, index: int, text: str, finish_reason: str) -> dict[str, Any]:
    ids = [*ids_of(text), END_ID]
    said = {"message": {"role": "assistant", "content": text}} if _is_chat(asked) else {"text": text}
    choice: dict[str, Any] = {"index": index, **said, "finish_reason": finish_reason}
    choice["logprobs"] = _logprobs(asked, ids)
    if asked.body.get("return_token_ids"):
        choice["token_ids"] = ids
    return choice


def _usage(prompt: str, text: str, n: int) -> dict[str, int]:
    return {"prompt_tokens": len(prompt), "completion_tokens": n * (len(text) + 1), "total_tokens": 0}


def _events(asked: Asked, text: str, prompt: str | None, extra: dict[str, Any] | None) -> list[bytes]:
    told = prompt if prompt is not None else _prompt_of(asked)
    head = _head(asked) | (extra or {})
    wants_ids = asked.body.get("return_token_ids")
    events: list[bytes] = []
    for place, character in enumerate([*text, ""]):
        ids = ids_of(character) or [END_ID]
        for index in range(asked.body.get("n") or 1):
            said = {"delta": {"content": character}} if _is_chat(asked) else {"text": character}
            choice = {"index": index, **said, "logprobs": _logprobs(asked, ids), "finish_reason": None}
            if not character:
                choice["finish_reason"] = "stop"
            chunk = head | {"choices": [choice]}
            if wants_ids:
                choice["token_ids"] = ids
                if place == 0 and _is_chat(asked):
                    chunk["prompt_token_ids"] = _prompt_ids(asked, told)
                elif place == 0:
                    choice["prompt_token_ids"] = _prompt_ids(asked, told)
            events.append(_event(chunk))
    if (asked.body.get("stream_options") or {}).get("include_usage"):
        events.append(_event(head | {"choices": [], "usage": _usage(told, text, asked.body.get("n") or 1)}))
    return events


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


# ---- who asks ----------------------------------------------------------------------------------------------


@dataclass
class Session:
    """What a policy sees of a session."""

    id: str = "s"
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    records: list[CallRecord] = field(default_factory=list[CallRecord])

    def history(self) -> list[CallRecord]:
        return self.records


def chat(*said: str, **fields: Any) -> CallRequest:
    """A chat request as its client sends it: user and assistant in turn, and fields of the body."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said or ("hi",))]
    return DIALECTS[Dialect.CHAT].parse({"model": "m", "messages": messages, **fields})


class Heard:
    """Collects what is passed on to a client."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.first = asyncio.Event()

    async def __call__(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.first.set()

    @property
    def raw(self) -> bytes:
        return b"".join(piece.raw or b"" for piece in self.pieces)

    @property
    def text(self) -> str:
        """What a chat client would have read."""
        events = [line[6:] for line in self.raw.split(b"\n") if line.startswith(b"data: {")]
        deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)
