"""A retry gets the answer that was lost; the same question asked twice gets two."""

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

from rllm.errors import RequestRefused
from rllm.gateway.server import Gateway
from rllm.types.wire import CallStatus, WireToolCall

sys.path.insert(0, str(Path(__file__).parent))
from polling import eventually

Serve = Callable[..., Any]
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MARK = {"x-stainless-retry-count": "1"}


async def ask(
    http: aiohttp.ClientSession, gateway: Gateway, headers: dict[str, str] | None = None, **more: Any
) -> Any:
    url = f"{gateway.url}/k/{gateway.token}/sessions/s/v1/chat/completions"
    async with http.post(url, json=BODY | more, headers=headers or {}) as reply:
        assert reply.status == 200, await reply.text()
        if not more.get("stream"):
            return await reply.json()
        events = [line[6:] async for line in reply.content if line.startswith(b"data: {")]
        return [json.loads(each) for each in events]


async def test_the_same_question_asked_twice_is_two_samples(serve: Serve) -> None:
    gateway: Gateway = await serve()
    async with aiohttp.ClientSession() as http:
        first, second = await ask(http, gateway), await ask(http, gateway)
        together = await asyncio.gather(*(ask(http, gateway) for _ in range(5)))
    assert len({each["id"] for each in [first, second, *together]}) == 7
    assert len(gateway.ledger.traces("s")) == len(gateway.policy.requests) == 7


async def test_a_retry_gets_the_recorded_answer(serve: Serve, scripted: ModuleType) -> None:
    call = WireToolCall(id="call_1", name="add", arguments='{"a": 1}')
    gateway: Gateway = await serve(
        lambda request: scripted.Say(text="it is", reasoning="hm", tool_calls=[call])
    )
    async with aiohttp.ClientSession() as http:
        first = await ask(http, gateway, n=2)
        again = await ask(http, gateway, MARK, n=2)
        assert again == first
        keyed = await ask(http, gateway, {"Idempotency-Key": "k"})
        assert await ask(http, gateway, {"Idempotency-Key": "k"}) == keyed
        other = await ask(http, gateway, {"Idempotency-Key": "k"}, seed=3)  # another request
    assert len({first["id"], keyed["id"], other["id"]}) == 3
    assert len(gateway.policy.requests) == 3
    assert gateway.counts.num_retries == 2


async def test_a_streamed_retry_is_streamed_again(serve: Serve) -> None:
    gateway: Gateway = await serve()
    async with aiohttp.ClientSession() as http:
        first = await ask(http, gateway, stream=True)
        again = await ask(http, gateway, MARK, stream=True)
    assert {each["id"] for each in first} == {each["id"] for each in again}
    for chunks in (first, again):
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks) == "hello world"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(gateway.ledger.traces("s")) == 1


async def test_what_was_asked_for_comes_back_with_a_retry_too(serve: Serve) -> None:
    gateway: Gateway = await serve()
    more = {"logprobs": True, "return_token_ids": True}
    async with aiohttp.ClientSession() as http:
        first = await ask(http, gateway, **more)
        again = await ask(http, gateway, MARK, **more)
    assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"] == [11, 12, 13]
    assert again["choices"][0]["logprobs"] == first["choices"][0]["logprobs"]
    assert [each["token"] for each in again["choices"][0]["logprobs"]["content"]] == ["<11>", "<12>", "<13>"]


@pytest.mark.parametrize("answered", [[], [11, 12, 13]], ids=["hosted", "with ids"])
async def test_a_streamed_retry_shows_the_texts_of_its_tokens_and_their_alternatives(
    serve: Serve, scripted: ModuleType, answered: list[int]
) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(ids=answered, shown=("hel", "lo", "!")))
    more = {"logprobs": True, "top_logprobs": 2, "stream": True}
    async with aiohttp.ClientSession() as http:
        await ask(http, gateway, **more)
        again = await ask(http, gateway, MARK, **more)
    logprobs = [each["choices"][0]["logprobs"] for each in again if each["choices"][0]["logprobs"]]
    tokens = [token for each in logprobs for token in each["content"]]
    assert [token["token"] for token in tokens] == ["hel", "lo", "!"]
    assert [[each["token"] for each in token["top_logprobs"]] for token in tokens] == [
        ["hel", "HEL"],
        ["lo", "LO"],
        ["!", "!"],
    ]
    (trace,) = gateway.ledger.traces("s")
    assert [token["text"] for token in trace.token_logprobs] == ["hel", "lo", "!"]
    assert trace.completion_ids == answered


async def test_a_retry_is_told_which_text_ended_the_answer(serve: Serve, scripted: ModuleType) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(stop_sequence="END"))
    url = f"{gateway.url}/k/{gateway.token}/sessions/s/v1/messages"
    body = BODY | {"max_tokens": 5, "stop_sequences": ["END"]}
    async with aiohttp.ClientSession() as http:
        replies = [await (await http.post(url, json=body, headers=each)).json() for each in ({}, MARK)]
    assert replies[0] == replies[1]
    assert (replies[0]["stop_reason"], replies[0]["stop_sequence"]) == ("stop_sequence", "END")
    (trace,) = gateway.ledger.traces("s")
    assert trace.stop_sequence == "END"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_of_what_is_on_its_way_joins_it(
    serve: Serve, scripted: ModuleType, stream: bool
) -> None:
    hold = asyncio.Event()
    gateway: Gateway = await serve(lambda request: scripted.Say(hold=hold))
    async with aiohttp.ClientSession() as http:
        first = asyncio.create_task(ask(http, gateway, stream=stream))
        await eventually(lambda: gateway.policy.in_flight)
        again = asyncio.create_task(ask(http, gateway, MARK, stream=stream))
        await eventually(lambda: gateway.counts.num_retries == 1)
        first.cancel()  # who joined keeps it alive
        await asyncio.sleep(0.05)
        hold.set()
        answer = await again
    assert gateway.policy.cancelled == 0
    (trace,) = gateway.ledger.traces("s")
    assert trace.id == (answer[0]["id"] if stream else answer["id"])
    assert trace.status is CallStatus.OK


async def test_a_retry_after_a_cancelled_call_is_a_new_sample(serve: Serve, scripted: ModuleType) -> None:
    holds = [asyncio.Event(), asyncio.Event(), asyncio.Event()]
    holds[0].set()
    holds[2].set()
    gateway: Gateway = await serve(lambda request: scripted.Say(hold=holds[len(gateway.policy.requests) - 1]))
    async with aiohttp.ClientSession() as http:
        other = await ask(http, gateway)  # an equal call that was answered long ago
        lost = asyncio.create_task(ask(http, gateway))
        await eventually(lambda: gateway.policy.in_flight)
        lost.cancel()
        again = await ask(http, gateway, MARK)
        assert again["id"] != other["id"]
        assert (await ask(http, gateway, MARK))["id"] == again["id"]
    await eventually(lambda: gateway.num_in_flight == 0)
    states = sorted(str(each.status) for each in gateway.ledger.traces("s"))
    assert states == ["ok", "ok", "partial"]


async def test_a_call_that_ends_late_leaves_its_key_to_the_call_that_has_it_now(
    serve: Serve, scripted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(hold=hold))
    policy, hold, lets_go = gateway.policy, asyncio.Event(), asyncio.Event()
    answer = policy.answer

    async def slow_to_end(*args: Any) -> Any:
        try:
            return await answer(*args)
        except asyncio.CancelledError:
            await lets_go.wait()
            raise

    monkeypatch.setattr(type(policy), "answer", lambda self, *args: slow_to_end(*args))
    key = {"Idempotency-Key": "k"}
    async with aiohttp.ClientSession() as http:
        lost = asyncio.create_task(ask(http, gateway, key))
        await eventually(lambda: policy.in_flight)
        lost.cancel()
        await eventually(lambda: policy.cancelled)
        second = asyncio.create_task(ask(http, gateway, key))
        await eventually(lambda: policy.in_flight)
        lets_go.set()
        await eventually(lambda: gateway.num_in_flight == 1)
        third = asyncio.create_task(ask(http, gateway, key))
        await eventually(lambda: gateway.counts.num_retries or policy.in_flight == 2)
        hold.set()
        assert await third == await second
    assert len(policy.requests) == 2


async def test_an_answer_whose_client_left_while_it_was_written_is_kept_for_the_retry(serve: Serve) -> None:
    gateway: Gateway = await serve()
    append, on_disk = gateway.ledger.append, asyncio.Event()

    async def slow_append(records: Any, **how: Any) -> None:
        await on_disk.wait()
        await append(records, **how)

    async with aiohttp.ClientSession() as http:
        other = await ask(http, gateway)
        gateway.ledger.append = slow_append
        lost = asyncio.create_task(ask(http, gateway))
        await eventually(lambda: gateway.num_in_flight and len(gateway.policy.requests) == 2)
        lost.cancel()
        await asyncio.sleep(0.05)
        on_disk.set()
        await eventually(lambda: gateway.num_in_flight == 0)
        await ask(http, gateway)
        again = await ask(http, gateway, MARK)
    ids = [each.id for each in gateway.ledger.traces("s")]
    assert len(ids) == 3
    assert ids.index(again["id"]) == 1
    assert ids[0] == other["id"]
    assert gateway.counts.num_undelivered == 1


async def test_a_retry_after_an_error_asks_again(serve: Serve, scripted: ModuleType) -> None:
    errors = [RequestRefused("busy", status=503, code="busy"), None]
    gateway: Gateway = await serve(lambda request: scripted.Say(error=errors.pop(0)))
    async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="x", max_retries=2) as client:
        reply = await client.chat.completions.create(**BODY)
    error, answered = gateway.ledger.traces("default")
    assert (error.status, answered.status) == (CallStatus.ERROR, CallStatus.OK)
    assert answered.id == reply.id


async def test_retries_are_known_across_a_restart(serve: Serve, tmp_path: Path) -> None:
    before: Gateway = await serve(token="same")
    async with aiohttp.ClientSession() as http:
        first, second = await ask(http, before), await ask(http, before)
        keyed = await ask(http, before, {"Idempotency-Key": "k"})
        await before.close()
        after: Gateway = await serve(token="same")
        assert (await ask(http, after, MARK))["id"] == second["id"]
        assert (await ask(http, after, {"Idempotency-Key": "k"}))["id"] == keyed["id"]
        fresh = [await ask(http, after) for _ in range(2)]  # two new samples beside the two old ones
        assert (await ask(http, after, MARK))["id"] == fresh[1]["id"]
    assert [each.id for each in after.ledger.traces("s")] == [
        each["id"] for each in [first, second, keyed, *fresh]
    ]


async def test_sessions_do_not_share_retries(serve: Serve) -> None:
    gateway: Gateway = await serve()
    async with aiohttp.ClientSession() as http:
        ids = set()
        for session in ("a", "b"):
            url = gateway.open_session(session).base_url + "/chat/completions"
            async with http.post(url, json=BODY, headers=MARK) as reply:
                ids.add((await reply.json())["id"])
    assert len(ids) == 2
