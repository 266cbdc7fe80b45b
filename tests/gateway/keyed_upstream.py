"""An upstream whose answers follow from what it is asked, so that each record can be checked against it.

"key=s7/3 …" in the last user message ──said(key, choice)──► text or calls, ids, log-probabilities
messages ──prompt_ids──► the ids of each message, an answer's own ids for each answer
"""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from aiohttp import web

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        },
    }
    for name in ("look", "take", "open")
]
_KEY = re.compile(r"key=(\S+)")


@dataclass(kw_only=True, slots=True)
class Said:
    """One choice of the answer to one key."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """As in a message."""
    ids: list[int]
    logprobs: list[float]


@cache
def said(key: str, choice: int = 0) -> Said:
    draw = random.Random(f"{key}#{choice}")
    count = draw.randint(6, 24)
    answer = Said(
        ids=[draw.randrange(150_000) for _ in range(count)],
        logprobs=[-draw.random() * 4 for _ in range(count)],
    )
    if draw.random() < 0.6:
        answer.text = f"Ünder {key} choice {choice}: " + " ".join(
            f"w{draw.randrange(1000)}" for _ in range(8)
        )
    if not answer.text or draw.random() < 0.3:
        for number in range(draw.randint(1, 3)):
            arguments = json.dumps({"where": f"{key} ✓ {draw.randrange(1000)}"}, ensure_ascii=False)
            name = draw.choice(TOOLS)["function"]["name"]
            function = {"name": name, "arguments": arguments}
            answer.calls.append(
                {"id": f"call_{key}_{choice}_{number}", "type": "function", "function": function}
            )
    return answer


def key_of(messages: Sequence[dict[str, Any]]) -> str:
    """Of the last message of a user; empty when there is none."""
    for message in reversed(messages):
        if message["role"] == "user" and (found := _KEY.search(_text(message))):
            return found[1]
    return ""


def prompt_ids(messages: Sequence[dict[str, Any]]) -> list[int]:
    ids: list[int] = []
    for place, message in enumerate(messages):
        is_answer = message["role"] == "assistant"
        ids += said(key_of(messages[:place])).ids if is_answer else _ids(message["role"], _text(message))
    return ids


@cache
def _ids(role: str, text: str) -> list[int]:
    draw = random.Random(f"{role}:{text}")
    return [draw.randrange(150_000) for _ in range(draw.randint(3, 9))]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class KeyedUpstream:
    """A chat completions server, as vLLM is one: it gives ids where they are asked for."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.asked: Counter[str] = Counter()
        """How often each key was asked for."""
        self.pause_s = pause_s
        """Between the events of a stream; before an answer that is whole, a few of them."""
        self.url = ""
        self.num_open = self.most_open = 0

    async def __aenter__(self) -> Self:
        self._runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        if not http.path.endswith("/chat/completions"):
            return web.json_response({"object": "list", "data": [{"id": "keyed", "owned_by": "vllm"}]})
        body = await http.json()
        key = key_of(body["messages"])
        self.asked[key] += 1
        assert body["return_token_ids"] is True, "the gateway asks for ids"
        assert body["logprobs"] is True, "the gateway asks for log-probabilities"
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self._answer(http, body, key)
        finally:
            self.num_open -= 1

    async def _answer(self, http: web.BaseRequest, body: dict[str, Any], key: str) -> web.StreamResponse:
        shared = {"id": f"chatcmpl-{key}-{self.asked[key]}", "created": 1_760_000_000, "model": "keyed"}
        if body.get("stream"):
            return await self._stream(http, body, key, shared)
        await asyncio.sleep(4 * self.pause_s)
        choices = [_choice(key, index) for index in range(body.get("n") or 1)]
        return web.json_response(
            shared
            | {"object": "chat.completion", "choices": choices, "usage": _usage(body, choices)}
            | {"prompt_token_ids": prompt_ids(body["messages"])}
        )

    async def _stream(
        self, http: web.BaseRequest, body: dict[str, Any], key: str, shared: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        shared = shared | {"object": "chat.completion.chunk"}
        chunks = [{"choices": [chunk]} for each in range(body.get("n") or 1) for chunk in _chunks(key, each)]
        chunks[0]["prompt_token_ids"] = prompt_ids(body["messages"])
        choices = [_choice(key, index) for index in range(body.get("n") or 1)]
        chunks.append({"choices": [], "usage": _usage(body, choices)})
        for chunk in chunks:
            await response.write(b"data: " + json.dumps(shared | chunk).encode() + b"\n\n")
            await asyncio.sleep(self.pause_s)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _choice(key: str, index: int) -> dict[str, Any]:
    answer = said(key, index)
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.calls:
        message["tool_calls"] = answer.calls
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(answer, slice(None)),
        "finish_reason": "tool_calls" if answer.calls else "stop",
        "token_ids": answer.ids,
    }


def _chunks(key: str, index: int) -> list[dict[str, Any]]:
    """Text in parts, then each call in parts; the ids spread over them."""
    answer = said(key, index)
    deltas: list[dict[str, Any]] = []
    for start in range(0, len(answer.text), 9):
        deltas.append({"content": answer.text[start : start + 9]})
    for place, call in enumerate(answer.calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        head = {"id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        deltas.append({"tool_calls": [{"index": place} | head]})
        for start in range(0, len(arguments), 7):
            part = {"arguments": arguments[start : start + 7]}
            deltas.append({"tool_calls": [{"index": place, "function": part}]})
    chunks: list[dict[str, Any]] = [{"index": index, "delta": {"role": "assistant", "content": ""}}]
    for number, delta in enumerate(deltas):
        part = slice(number * len(answer.ids) // len(deltas), (number + 1) * len(answer.ids) // len(deltas))
        chunk = {"index": index, "delta": delta, "token_ids": answer.ids[part], "finish_reason": None}
        chunks.append(chunk | {"logprobs": _logprobs(answer, part)})
    reason = "tool_calls" if answer.calls else "stop"
    return [*chunks, {"index": index, "delta": {}, "finish_reason": reason}]


def _logprobs(answer: Said, part: slice) -> dict[str, Any]:
    tokens = zip(answer.ids[part], answer.logprobs[part], strict=True)
    return {
        "content": [
            {"token": f"<{token}>", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in tokens
        ]
    }


def _usage(body: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, int]:
    asked = len(prompt_ids(body["messages"]))
    answered = sum(len(choice["token_ids"]) for choice in choices)
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
