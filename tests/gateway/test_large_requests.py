"""One large request holds nobody up: refused before it is worked on, or worked on off the event loop."""

import asyncio
import gc
import io
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import rllm.gateway.ledger.writer
import rllm.gateway.server.gateway
from rllm.errors import RequestRefused
from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.inference.scripted import CodepointTokenizer, ScriptedClient
from rllm.types.wire import CallRequest

CONTEXT = 400_000


class WatchedTokenizer(CodepointTokenizer):
    """Notes in which thread each text was encoded. It reads text alone: images have room beside it."""

    images = None

    def __init__(self) -> None:
        self.encoded: list[tuple[int, threading.Thread]] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append((len(text), threading.current_thread()))
        return super().encode(text)


@pytest.fixture
def tokenizer() -> WatchedTokenizer:
    return WatchedTokenizer()


@pytest.fixture
async def gateway(tokenizer: WatchedTokenizer, tmp_path: Path) -> AsyncIterator[Gateway]:
    client = ScriptedClient(lambda messages: "yes", tokenizer=tokenizer, max_context=CONTEXT)
    policy = LocalPolicy(client, "scripted")
    limits = {"max_body_bytes": policy.max_body_bytes}
    async with Gateway(policy, tmp_path / "ledger", token=None, grace_s=1.0, **limits) as gateway:
        yield gateway


async def ask(gateway: Gateway, path: str = "chat/completions", **body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{gateway.url}/sessions/s/v1/{path}", json={"max_tokens": 9, **body}) as reply,
    ):
        return reply.status, await reply.json()


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def test_text_that_no_context_could_hold_is_refused_before_it_is_encoded(
    gateway: Gateway, tokenizer: WatchedTokenizer
) -> None:
    tokenizer.encoded.clear()
    long = "x" * (CONTEXT + 1)
    tool = {"type": "function", "function": {"name": "f", "description": long, "parameters": {}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": long}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": said(long)}),
        ("chat/completions", {"messages": said("x"), "tools": [tool]}),
        ("chat/completions", {"messages": [*said("x"), {"role": "assistant", "tool_calls": [call]}]}),
        ("completions", {"prompt": long}),
        ("responses", {"input": long}),
        ("messages", {"messages": said(long)}),
        ("messages/count_tokens", {"messages": said(long)}),
    ]
    for path, body in bodies:
        status, reply = await ask(gateway, path, **body)
        assert status == 400, path
        assert str(CONTEXT) in reply["error"]["message"]
    assert not tokenizer.encoded


async def test_nothing_of_size_runs_on_the_event_loop(
    gateway: Gateway, tokenizer: WatchedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, checking, rendering, encoding, and writing to the ledger."""
    threads: dict[str, threading.Thread] = {}

    def watched(module: Any, name: str) -> None:
        work = getattr(module, name)

        def noting(*arguments: Any) -> Any:
            threads[name] = threading.current_thread()
            return work(*arguments)

        monkeypatch.setattr(module, name, noting)

    watched(rllm.gateway.server.gateway, "json_object")
    watched(rllm.gateway.ledger.writer, "encode_call")
    watched(rllm.gateway.server.gateway.DIALECTS["chat"], "parse")
    await ask(gateway, messages=said("first"))  # a session that may have a history begins in a thread
    tokenizer.encoded.clear()
    status, reply = await ask(gateway, messages=said("a" * 300_000))
    assert (status, reply["usage"]["prompt_tokens"]) == (200, 300_017)
    here = threading.current_thread()
    assert set(threads) == {"json_object", "encode_call", "parse"}
    assert all(thread is not here for thread in threads.values())
    large = [thread for chars, thread in tokenizer.encoded if chars > 100_000]
    assert large
    assert all(thread is not here for thread in large)
    await ask(gateway, messages=said("small"))
    assert all(thread is here for thread in threads.values()), "what is small costs no change of threads"
    prompts = [thread for chars, thread in tokenizer.encoded if chars > len("yes")]
    assert all(thread is not here for thread in prompts), "the process that renders is waited for as well"


async def test_a_session_is_answered_in_order_of_its_prompts_while_a_large_one_is_encoded(
    gateway: Gateway,
) -> None:
    """Two threads never change one session's conversations at once: all four calls share a beginning."""
    long = said("b" * 200_000)
    replies = await asyncio.gather(
        *(ask(gateway, messages=long) for _ in range(2)),
        *(ask(gateway, messages=said("b")) for _ in range(2)),
    )
    assert [status for status, _ in replies] == [200] * 4
    places = {(len(record.prompt_ids), record.conversation) for record in gateway.ledger.traces("s")}
    assert sorted(length for length, _ in places) == [18, 200_017]
    assert len({conversation for _, conversation in places}) == 2


async def test_a_body_that_is_too_long_by_its_own_account_is_refused_unread(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.split()[1] == b"413"
    assert b"body_too_large" in await reader.readuntil(b"}}")
    writer.close()


async def test_a_body_of_a_million_small_objects_is_refused_before_they_are_made(gateway: Gateway) -> None:
    body = b'{"messages": [' + b"{}," * 600_000 + b"{}]}"
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{gateway.url}/v1/chat/completions", data=io.BytesIO(body)) as reply,
    ):
        assert reply.status == 413
        error = json.loads(await reply.read())["error"]
    assert error["code"] == "body_too_large"
    assert "600003" in error["message"]


def _is_of_a_call(value: object) -> bool:
    """By `type`, because `isinstance` asks objects of others for their class, which some warn of."""
    return issubclass(type(value), CallRequest | RequestRefused)


async def test_what_was_refused_is_forgotten_at_once(gateway: Gateway) -> None:
    """Not at the next garbage collection, which is rare in a server: until then each would keep its text."""
    await ask(gateway, messages=said("hi"))
    gc.collect()
    gc.disable()
    try:
        for stream in (False, True):
            for body in (
                {"messages": said("x" * (CONTEXT + 1))},
                {"messages": said("hi"), "temperature": -1},
                {"messages": said("hi"), "max_tokens": "many"},
                {"messages": said("hi"), "logit_bias": {"1": 5}},
                {"messages": 3},
            ):
                assert (await ask(gateway, stream=stream, **body))[0] >= 400, body
        async with asyncio.timeout(20):
            while any(_is_of_a_call(each) for each in gc.get_objects()):  # the last handler is about to end
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
