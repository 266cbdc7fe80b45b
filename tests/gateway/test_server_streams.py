"""Streams: at once, never a clean end for what broke off, and nothing goes on for a client that is gone."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import openai
import pytest

from rllm.errors import PartialAnswer
from rllm.gateway.server import Gateway, calls
from rllm.types.wire import Answer, CallStatus, Choice, Dialect

sys.path.insert(0, str(Path(__file__).parent))
from polling import eventually

Serve = Callable[..., Any]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
ENDS = {
    "chat/completions": b"[DONE]",
    "completions": b"[DONE]",
    "responses": b"response.completed",
    "messages": b"message_stop",
}


async def open_stream(gateway: Gateway, path: str, session: str = "s", **more: Any) -> Any:
    """A connection that has just sent its request."""
    body = json.dumps({"model": "m", "stream": True} | BODIES[path] | more).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"POST /k/{gateway.token}/sessions/{session}/v1/{path} HTTP/1.1\r\nHost: x\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


@pytest.mark.parametrize("path", BODIES)
async def test_the_first_piece_is_there_before_the_rest_is_written(
    serve: Serve, scripted: ModuleType, path: str
) -> None:
    hold = asyncio.Event()
    gateway: Gateway = await serve(lambda request: scripted.Say(text="first rest", hold=hold))
    reader, writer = await open_stream(gateway, path)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"text/event-stream" in head
    begun = await reader.readuntil(b"first")
    hold.set()
    rest = await reader.readuntil(b"\r\n0\r\n\r\n")
    assert ENDS[path] not in begun
    assert b"rest" in rest
    assert ENDS[path] in rest
    writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_goes_away_stops_the_work(
    serve: Serve, scripted: ModuleType, path: str, stream: bool
) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(text="first rest", hold=asyncio.Event()))
    reader, writer = await open_stream(gateway, path, stream=stream)
    if stream:
        await reader.readuntil(b"first")
    await eventually(lambda: gateway.policy.in_flight == 1)
    writer.close()
    await eventually(lambda: gateway.policy.cancelled == 1 and gateway.num_in_flight == 0)
    (trace,) = gateway.ledger.traces("s")
    assert trace.status is CallStatus.PARTIAL
    assert trace.error["code"] == "client_disconnected"
    assert (trace.response["content"] or "").strip() == ("first" if stream else "")
    assert gateway.counts.recorded_by_status["partial"] == 1


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_that_breaks_off_never_looks_whole(
    serve: Serve, scripted: ModuleType, path: str
) -> None:
    broken = PartialAnswer("the upstream dropped the connection")
    gateway: Gateway = await serve(lambda request: scripted.Say(text="one two", error=broken, error_after=1))
    reader, writer = await open_stream(gateway, path)
    told = await reader.read()  # the connection ends, without the chunk that ends a body
    assert b"one" in told
    assert b"error" in told
    assert b"dropped the connection" in told
    assert ENDS[path] not in told
    assert b"\r\n0\r\n\r\n" not in told
    writer.close()
    (trace,) = gateway.ledger.traces("s")
    assert trace.status is CallStatus.PARTIAL
    assert trace.response["content"].strip() == "one"


async def test_the_sdk_raises_for_an_answer_that_breaks_off(serve: Serve, scripted: ModuleType) -> None:
    broken = PartialAnswer("dropped")
    gateway: Gateway = await serve(lambda request: scripted.Say(text="one two", error=broken, error_after=1))
    async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="dropped"):
            [each async for each in stream]


async def test_what_arrived_of_a_broken_answer_is_kept_with_its_ids(
    serve: Serve, scripted: ModuleType
) -> None:
    arrived = Answer(
        id="chatcmpl-7",
        model="m",
        created=1,
        choices=[
            Choice(text="half", prompt_ids=[1], completion_ids=[5], logprobs=[-0.1], policy_versions=[2])
        ],
    )
    gateway: Gateway = await serve(lambda request: scripted.Say(error=PartialAnswer("gone", arrived)))
    async with aiohttp.ClientSession() as http:
        url = f"{gateway.url}/k/{gateway.token}/sessions/s/v1/chat/completions"
        async with http.post(url, json=BODIES["chat/completions"]) as reply:
            assert reply.status == 502
            assert (await reply.json())["error"]["code"] == "partial_answer"
    (trace,) = gateway.ledger.traces("s")
    assert (trace.status, trace.id, trace.completion_ids) == (CallStatus.PARTIAL, "chatcmpl-7", [5])


RAW = {
    "chat/completions": [
        b'data: {"id":"up-1","choices":[{"index":0,"delta":{"content":"[DONE] one"}}]}\n\n',
        b'data: {"id":"up-1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
        b"data: [DONE]\n\n",
    ],
    "messages": [
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":"message_stop one"}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ],
    "responses": [
        b'data: {"type":"response.output_text.delta","output_index":0,"delta":"one"}\n\n',
        b'data: {"sequence_number":3,"type":"response.completed","response":{}}\n\n',
    ],
}


@pytest.mark.parametrize("path", RAW)
async def test_events_of_an_upstream_pass_as_they_are_but_the_last_waits_for_the_disk(
    serve: Serve, scripted: ModuleType, path: str
) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(raw=RAW[path]))
    append, on_disk = gateway.ledger.append, asyncio.Event()

    async def slow_append(records: Any, **how: Any) -> None:
        await on_disk.wait()
        await append(records, **how)

    gateway.ledger.append = slow_append
    reader, writer = await open_stream(gateway, path)
    told = await reader.readuntil(b"one")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            told += await reader.readuntil(RAW[path][-1].strip())
    on_disk.set()
    rest = await reader.readuntil(b"\r\n0\r\n\r\n")
    assert RAW[path][-1] in rest
    writer.close()


async def test_an_upstream_that_says_done_with_its_finish_reasons_gets_the_end_that_sdks_wait_for(
    serve: Serve, scripted: ModuleType
) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(raw=RAW["chat/completions"][:2]))
    reader, writer = await open_stream(gateway, "chat/completions")
    assert b"data: [DONE]\n\n" in await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


async def test_what_passed_through_of_an_upstreams_events_is_kept_when_the_client_leaves(
    serve: Serve, scripted: ModuleType
) -> None:
    gateway: Gateway = await serve(
        lambda request: scripted.Say(raw=RAW["chat/completions"], hold=asyncio.Event())
    )
    reader, writer = await open_stream(gateway, "chat/completions")
    await reader.readuntil(b"one")
    writer.close()
    await eventually(lambda: gateway.counts.recorded_by_status["partial"])
    (trace,) = gateway.ledger.traces("s")
    assert (trace.id, trace.response["content"]) == ("up-1", "[DONE] one")


async def test_a_silent_stream_is_kept_awake_after_its_first_piece(
    serve: Serve, scripted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "KEEP_ALIVE_S", 0.02)
    hold = asyncio.Event()
    gateway: Gateway = await serve(lambda request: scripted.Say(text="first rest", hold=hold))
    reader, writer = await open_stream(gateway, "chat/completions")
    await reader.readuntil(b": still working\n\n")
    hold.set()
    assert ENDS["chat/completions"] in await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


async def test_a_client_that_does_not_read_slows_its_own_stream_alone(
    serve: Serve, scripted: ModuleType
) -> None:
    long = "x" * 200_000
    gateway: Gateway = await serve(lambda request: scripted.Say(text=" ".join([long] * 100)))
    reader, writer = await open_stream(gateway, "chat/completions")
    await reader.readexactly(1000)
    await asyncio.sleep(0.2)
    assert gateway.num_in_flight == 1  # 20 MB are not piled up for it
    assert len(next(iter(gateway.calls._in_flight)).pieces) < 100
    async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="x") as client:
        assert (await client.models.list()).data
    writer.close()
    await eventually(lambda: gateway.num_in_flight == 0)


@pytest.mark.parametrize("dialect", Dialect)
async def test_many_streams_that_end_at_once_are_whole(
    serve: Serve, scripted: ModuleType, dialect: Dialect
) -> None:
    hold = asyncio.Event()
    gateway: Gateway = await serve(lambda request: scripted.Say(text="first rest", hold=hold))
    path = list(BODIES)[list(Dialect).index(dialect)]
    streams = [await open_stream(gateway, path, f"s{number}") for number in range(50)]
    for reader, _ in streams:
        await reader.readuntil(b"first")
    hold.set()
    for reader, writer in streams:
        assert ENDS[path] in await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
    assert gateway.counts.recorded_by_status["ok"] == 50
