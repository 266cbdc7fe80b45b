"""Streams of another server, passed on as they come; one that breaks off never looks like a whole answer."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import PartialAnswer, RequestRefused
from rllm.gateway.dialects.registry import DIALECTS
from rllm.gateway.upstream import UpstreamPolicy
from rllm.types.wire import Dialect, Piece

sys.path.insert(0, str(Path(__file__).parent))
import fake_upstream as fake

Connect = Callable[..., Any]


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with fake.FakeUpstream(answer="hello") as upstream:
        yield upstream


@pytest.fixture
async def policy(server: Any) -> AsyncIterator[UpstreamPolicy]:
    policy = UpstreamPolicy([server.url], max_wait_s=5.0)
    await policy.start()
    yield policy
    assert policy.health()["in_flight"] == 0
    assert policy.pool.upstreams[0].in_flight == 0
    await policy.close()


async def test_a_stream_is_passed_on_and_captured(server: Any, policy: UpstreamPolicy) -> None:
    heard = fake.Heard()
    answer = await policy.answer(fake.chat("hi", stream=True), fake.Session(), heard)
    (choice,) = answer.choices
    assert (choice.text, heard.text) == ("hello", "hello")
    assert choice.completion_ids == [*fake.ids_of("hello"), 0]
    assert choice.prompt_ids == fake.ids_of("user:hi\nassistant:")
    assert len(choice.logprobs) == 6
    assert answer.usage["completion_tokens"] == 6
    assert answer.first_token_s is not None
    assert heard.raw.endswith(b"data: [DONE]\n\n")
    assert b"token_ids" not in heard.raw
    assert b'"usage"' not in heard.raw


async def test_the_first_byte_leaves_before_the_second_is_there(server: Any, policy: UpstreamPolicy) -> None:
    hold = asyncio.Event()
    server.script = [fake.stream("hello", hold=hold)]
    heard = fake.Heard()
    call = asyncio.create_task(policy.answer(fake.chat("hi", stream=True), fake.Session(), heard))
    await asyncio.wait_for(heard.first.wait(), 10)
    assert heard.text == "h"
    hold.set()
    assert (await call).choices[0].text == "hello"


async def test_choices_that_are_streamed_together_are_kept_apart(server: Any, policy: UpstreamPolicy) -> None:
    answer = await policy.answer(fake.chat("hi", stream=True, n=3), fake.Session(), fake.Heard())
    assert [choice.text for choice in answer.choices] == ["hello"] * 3
    assert all(choice.completion_ids == [*fake.ids_of("hello"), 0] for choice in answer.choices)


async def test_a_client_of_another_protocol_gets_pieces(server: Any, policy: UpstreamPolicy) -> None:
    heard = fake.Heard()
    request = DIALECTS[Dialect.RESPONSES].parse({"model": "m", "input": "hi", "stream": True})
    answer = await policy.answer(request, fake.Session(), heard)
    assert "".join(piece.text for piece in heard.pieces) == "hello"
    assert answer.choices[0].completion_ids


@pytest.mark.parametrize("how", ["drop_after", "end_after"])
async def test_a_stream_that_breaks_off_is_a_partial_answer_with_what_came(
    server: Any, policy: UpstreamPolicy, how: str
) -> None:
    hold = asyncio.Event()
    server.script = [fake.stream("hello", hold=hold, hold_after=2, **{how: 3})]
    heard = fake.Heard()
    call = asyncio.create_task(policy.answer(fake.chat("hi", stream=True), fake.Session(), heard))
    await asyncio.wait_for(heard.first.wait(), 10)
    hold.set()
    with pytest.raises(PartialAnswer, match=server.url) as partial:
        await call
    answer: Any = partial.value.answer
    assert answer.choices[0].text == heard.text
    assert heard.text in ("he", "hel")
    assert len(answer.choices[0].policy_versions) == len(answer.choices[0].completion_ids) > 0
    assert answer.upstream == server.url
    assert len(server.asked) == 1
    assert b"[DONE]" not in heard.raw


async def test_an_error_in_mid_stream_is_a_partial_answer(server: Any, policy: UpstreamPolicy) -> None:
    hold = asyncio.Event()
    error = {"message": "engine died", "code": 500}
    server.script = [fake.stream("hello", hold=hold, error_after=2, error=error)]
    heard = fake.Heard()
    call = asyncio.create_task(policy.answer(fake.chat("hi", stream=True), fake.Session(), heard))
    await asyncio.wait_for(heard.first.wait(), 10)
    hold.set()
    with pytest.raises(PartialAnswer, match="engine died"):
        await call
    assert b"[DONE]" not in heard.raw


async def test_an_error_before_the_first_byte_has_its_real_status(
    server: Any, policy: UpstreamPolicy
) -> None:
    server.script = [
        fake.refuse(404, "no such model"),
        fake.stream("hello", error_after=0, error={"message": "too long for me", "code": 400}),
    ]
    for status, why in ((404, "no such model"), (400, "too long")):
        heard = fake.Heard()
        with pytest.raises(RequestRefused, match=why) as refused:
            await policy.answer(fake.chat("hi", stream=True), fake.Session(), heard)
        assert refused.value.status == status
        assert heard.pieces == []


@pytest.mark.parametrize("how", ["drop_after", "end_after"])
async def test_a_stream_that_breaks_before_its_first_event_is_tried_again(
    server: Any, policy: UpstreamPolicy, how: str
) -> None:
    server.script = [fake.stream("hello", **{how: 0})]
    heard = fake.Heard()
    answer = await policy.answer(fake.chat("hi", stream=True), fake.Session(), heard)
    assert heard.text == answer.choices[0].text == "hello"
    assert len(server.asked) == 2


async def test_an_answer_that_the_server_aborted_is_not_taken_for_a_whole_one(
    server: Any, policy: UpstreamPolicy
) -> None:
    server.script = [fake.say("hel", finish_reason="abort")]
    answer = await policy.answer(fake.chat("hi"), fake.Session())
    assert answer.choices[0].text == "hello"
    assert len(server.asked) == 2


async def test_finish_reasons_are_enough_where_a_server_sends_no_last_event(
    server: Any, policy: UpstreamPolicy
) -> None:
    server.script = [fake.stream("hello", done=False)]
    answer = await policy.answer(fake.chat("hi", stream=True), fake.Session(), fake.Heard())
    assert answer.choices[0].text == "hello"


async def test_garbage_in_a_stream_is_not_passed_on(server: Any, policy: UpstreamPolicy) -> None:
    server.script = [fake.body(b"data: {not json\n\n", "text/event-stream")]
    heard = fake.Heard()
    with pytest.raises(RequestRefused, match="no JSON") as refused:
        await policy.answer(fake.chat("hi", stream=True), fake.Session(), heard)
    assert refused.value.status == 502
    assert heard.pieces == []


async def test_a_server_that_does_not_stream_is_streamed_all_the_same(
    server: Any, policy: UpstreamPolicy
) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
    server.script = [fake.body(json.dumps({"id": "x", "choices": [choice]}).encode())]
    heard = fake.Heard()
    answer = await policy.answer(fake.chat("hi", stream=True), fake.Session(), heard)
    assert "".join(piece.text for piece in heard.pieces) == answer.choices[0].text == "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_a_call_closes_the_connection_at_once(
    server: Any, policy: UpstreamPolicy, stream: bool
) -> None:
    hold = asyncio.Event()
    server.script = [fake.stream("hello", hold=hold) if stream else fake.hang()]
    heard = fake.Heard()
    call = asyncio.create_task(policy.answer(fake.chat("hi", stream=stream), fake.Session(), heard))
    while not server.asked:
        await asyncio.sleep(0.001)
    if stream:
        await asyncio.wait_for(heard.first.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(server.asked[0].gone.wait(), 10)
    assert policy.pool.upstreams[0].in_flight == 0


async def test_a_slow_client_slows_the_server_down(server: Any, policy: UpstreamPolicy) -> None:
    sent = 0

    async def flood(asked: Any) -> Any:
        nonlocal sent
        response = fake.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(asked.http)
        event = b'data: {"choices": [{"index": 0, "delta": {"content": "%b"}}]}\n\n' % (b"x" * 10_000)
        for _ in range(3_000):
            await response.write(event)
            sent += 1
        return response

    server.script = [flood]
    stuck, go_on = asyncio.Event(), asyncio.Event()

    async def emit(piece: Piece) -> None:
        stuck.set()
        await go_on.wait()

    call = asyncio.create_task(policy.answer(fake.chat("hi", stream=True), fake.Session(), emit))
    await asyncio.wait_for(stuck.wait(), 10)
    before = -1
    while before != sent:  # until buffers are full and nothing moves
        before = sent
        await asyncio.sleep(0.05)
    assert 0 < sent < 3_000
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_stream_over_the_limit_ends_as_a_partial_answer(server: Any) -> None:
    policy = UpstreamPolicy([server.url], max_body_bytes=20_000)
    hold = asyncio.Event()
    server.script = [fake.stream("x" * 5_000, hold=hold)]
    heard = fake.Heard()
    call = asyncio.create_task(policy.answer(fake.chat("hi", stream=True), fake.Session(), heard))
    await asyncio.wait_for(heard.first.wait(), 10)
    hold.set()
    with pytest.raises(PartialAnswer, match="more than 20000 bytes"):
        await call
    await policy.close()


async def test_a_server_that_says_nothing_for_too_long_is_a_504(server: Any) -> None:
    policy = UpstreamPolicy([server.url], timeout_s=0.5)
    server.script = [fake.hang()]
    with pytest.raises(RequestRefused, match=r"nothing came for 0\.5 s") as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert refused.value.status == 504
    assert len(server.asked) == 1
    hold = asyncio.Event()
    server.script = [fake.stream("hello", hold=hold)]
    with pytest.raises(PartialAnswer, match="nothing came"):
        await policy.answer(fake.chat("hi", stream=True), fake.Session(), fake.Heard())
    await policy.close()
