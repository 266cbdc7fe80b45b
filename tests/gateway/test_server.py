"""Programs speak to a live gateway with the SDKs they know; everything they were told is in the ledger."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from rllm.errors import ConfigError, RequestRefused, StorageError
from rllm.gateway.ledger import Ledger
from rllm.gateway.server import Gateway
from rllm.types.wire import CallRecord, CallStatus, Dialect, WireToolCall

sys.path.insert(0, str(Path(__file__).parent))
from polling import eventually

Serve = Callable[..., Any]
HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def of_openai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0)


def of_anthropic(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="EMPTY", max_retries=0)


async def test_every_protocol_is_answered_and_recorded(serve: Serve) -> None:
    gateway: Gateway = await serve()
    session = gateway.open_session("lake-3/0")
    async with of_openai(session.base_url) as client, of_anthropic(session.root_url) as other:
        ids = [
            (await client.chat.completions.create(model="m", messages=HI)).id,
            (await client.completions.create(model="m", prompt="hi")).id,
            (await client.responses.create(model="m", input="hi")).id,
            (await other.messages.create(model="m", max_tokens=9, messages=HI)).id,
        ]
    traces = session.traces()
    assert [each.id for each in traces] == ids
    assert [each.dialect for each in traces] == list(Dialect)
    for trace in traces:
        assert (trace.status, trace.model, trace.session) == (CallStatus.OK, "m", "lake-3/0")
        assert trace.response == {"role": "assistant", "content": "hello world"}
        assert (trace.prompt_ids, trace.completion_ids) == ([1, 2, 3], [11, 12, 13])
        assert trace.policy_versions == [4, 4, 4]


async def test_streamed_answers_are_what_is_recorded_under_the_id_that_the_client_saw(serve: Serve) -> None:
    gateway: Gateway = await serve()
    session = gateway.open_session("s")
    async with of_openai(session.base_url) as client, of_anthropic(session.root_url) as other:
        chunks = [
            each async for each in await client.chat.completions.create(model="m", messages=HI, stream=True)
        ]
        texts = [each async for each in await client.completions.create(model="m", prompt="hi", stream=True)]
        events = [each async for each in await client.responses.create(model="m", input="hi", stream=True)]
        async with other.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
            message = await stream.get_final_message()
    chat, completion, response, told = session.traces()
    assert {each.id for each in chunks} == {chat.id}
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == "hello world"
    assert {each.id for each in texts} == {completion.id}
    assert events[-1].type == "response.completed"
    assert events[-1].response.id == response.id
    assert message.id == told.id
    assert message.content[0].text == "hello world"
    assert all(each.stream and each.first_token_s is not None for each in session.traces())


async def test_a_streamed_answer_without_a_word_has_one_id_too(serve: Serve, scripted: ModuleType) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(text="", ids=[2]))
    session = gateway.open_session("s")
    async with of_openai(session.base_url) as client:
        chunks = [
            each async for each in await client.chat.completions.create(messages=HI, model="", stream=True)
        ]
    (trace,) = session.traces()
    assert {each.id for each in chunks} == {trace.id}
    assert {each.model for each in chunks} == {trace.model} == {"scripted"}


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_recorded_merged(serve: Serve, scripted: ModuleType, stream: bool) -> None:
    calls = [WireToolCall(id=f"call_{n}", name="add", arguments=json.dumps({"n": n})) for n in range(2)]
    gateway: Gateway = await serve(lambda request: scripted.Say(text="", tool_calls=calls))
    session = gateway.open_session("s")
    async with of_openai(session.base_url) as client:
        if stream:
            async with client.chat.completions.stream(model="m", messages=HI, tools=[TOOL]) as events:
                got = (await events.get_final_completion()).choices[0].message.tool_calls
        else:
            reply = await client.chat.completions.create(model="m", messages=HI, tools=[TOOL])
            got = reply.choices[0].message.tool_calls
    (trace,) = session.traces()
    assert trace.finish_reason == "tool_calls"
    assert trace.tools[0]["function"]["name"] == "add"
    for call, sent in zip(trace.response["tool_calls"], got, strict=True):
        assert call["id"] == sent.id
        assert call["function"] == {"name": sent.function.name, "arguments": sent.function.arguments}


async def test_every_choice_is_recorded_and_what_was_not_asked_for_stays_here(serve: Serve) -> None:
    gateway: Gateway = await serve()
    session = gateway.open_session("s")
    async with of_openai(session.base_url) as client:
        reply = await client.chat.completions.create(model="m", messages=HI, n=3, temperature=0.5)
    assert [each.logprobs for each in reply.choices] == [None] * 3
    assert "token_ids" not in reply.model_dump_json()
    traces = session.traces()
    assert [each.completion_ids[0] for each in traces] == [11, 111, 211]
    assert {each.id for each in traces} == {reply.id}
    assert traces[0].sampling == {"temperature": 0.5, "n": 3}


async def test_traces_are_a_json_list_of_whole_records(serve: Serve) -> None:
    gateway: Gateway = await serve()
    session = gateway.open_session("a/b?c")
    async with of_openai(session.base_url) as client, aiohttp.ClientSession() as http:
        for _ in range(3):
            await client.chat.completions.create(model="m", messages=HI)
        async with http.get(session.root_url + "/traces") as reply:
            told = await reply.json()
    assert told == [json.loads(json.dumps(each.to_dict())) for each in session.traces()]
    assert [CallRecord.from_dict(each) for each in told] == session.traces()


async def test_a_call_is_on_disk_before_its_answer_leaves(serve: Serve, tmp_path: Path) -> None:
    gateway: Gateway = await serve()
    session = gateway.open_session("s")
    with Ledger.open(tmp_path / "ledger", read_only=True) as beside:
        async with of_openai(session.base_url) as client:
            reply = await client.chat.completions.create(model="m", messages=HI)
            assert [each.id for each in beside.call(reply.id)] == [reply.id]
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
            async for chunk in stream:
                if chunk.choices[0].finish_reason:
                    assert beside.call(chunk.id)


async def test_an_answer_that_cannot_be_recorded_is_not_given(serve: Serve) -> None:
    async def full(records: Any, *, num_bytes: int, num_open: int) -> None:
        raise StorageError("the disk is full")

    gateway: Gateway = await serve()
    async with of_openai(gateway.base_url) as client:
        append = gateway.ledger.append
        gateway.ledger.append = full
        with pytest.raises(openai.InternalServerError, match="disk is full"):
            await client.chat.completions.create(model="m", messages=HI)
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="disk is full"):
            [each async for each in stream]
        gateway.ledger.append = append  # space was made
        await client.chat.completions.create(model="m", messages=HI)
    assert gateway.counts.errors_by_code["ledger_unavailable"] == 2
    assert [each.status for each in gateway.ledger.traces("default")] == [CallStatus.OK]


async def test_errors_keep_their_status_and_are_recorded_as_errors(
    serve: Serve, scripted: ModuleType
) -> None:
    slow = RequestRefused("too much to do", status=429, kind="rate_limit_error", retry_after="7")
    gateway: Gateway = await serve(lambda request: scripted.Say(error=slow))
    session = gateway.open_session("s")
    async with of_openai(session.base_url) as client, of_anthropic(session.root_url) as other:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="m", messages=HI, stream=True)
        assert refused.value.response.headers["retry-after"] == "7"
        with pytest.raises(anthropic.RateLimitError):
            await other.messages.create(model="m", max_tokens=9, messages=HI)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[{"role": "bard"}])
    statuses = [(each.status, each.error and each.error["status"]) for each in session.traces()]
    assert statuses == [(CallStatus.ERROR, 429), (CallStatus.ERROR, 429), (CallStatus.ERROR, 400)]
    assert not any(each.completion_ids for each in session.traces())


async def test_a_bug_behind_the_gateway_is_told_without_its_details(
    serve: Serve, scripted: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(error=KeyError("secret")))
    async with of_openai(gateway.base_url) as client:
        with pytest.raises(openai.InternalServerError, match="KeyError") as refused:
            await client.chat.completions.create(model="m", messages=HI)
    assert "secret" not in str(refused.value)
    assert "secret" in caplog.text


async def test_a_closed_session_refuses_later_requests_and_cancels_those_on_their_way(
    serve: Serve, scripted: ModuleType
) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(hold=asyncio.Event()))
    session = gateway.open_session("s")
    async with of_openai(session.base_url) as client:
        waiting = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
        await eventually(lambda: gateway.policy.in_flight)
        await session.close()
        with pytest.raises(openai.APIStatusError, match="closed"):
            await waiting
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="m", messages=HI)
    assert refused.value.status_code == 410
    assert gateway.policy.cancelled == 1
    assert [each.status for each in session.traces()] == [CallStatus.PARTIAL]


async def test_closing_lets_calls_end_and_stops_those_that_take_too_long(
    serve: Serve, scripted: ModuleType, tmp_path: Path
) -> None:
    quick, never = asyncio.Event(), asyncio.Event()
    gateway: Gateway = await serve(
        lambda request: scripted.Say(hold=quick if request.model == "quick" else never), grace_s=1.0
    )
    async with of_openai(gateway.base_url) as client:
        ends = asyncio.create_task(client.chat.completions.create(model="quick", messages=HI))
        hangs = asyncio.create_task(client.chat.completions.create(model="never", messages=HI))
        await eventually(lambda: gateway.num_in_flight == 2)
        closing = asyncio.create_task(gateway.close())
        await eventually(lambda: gateway._is_closing)
        quick.set()
        assert (await ends).choices[0].message.content == "hello world"
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await hangs
        await closing
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()
    assert gateway.policy.is_closed
    with Ledger.open(tmp_path / "ledger") as again:  # it was let go of
        assert [each.status for each in again.traces("default")] == [CallStatus.OK, CallStatus.PARTIAL]


async def test_a_ledger_that_was_handed_in_stays_open(serve: Serve, tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "mine") as ledger:
        gateway: Gateway = await serve(ledger=ledger)
        await gateway.close()
        assert ledger.sessions() == []


async def test_models_and_token_counts_are_told(serve: Serve) -> None:
    gateway: Gateway = await serve()
    session = gateway.open_session("s")
    async with of_openai(session.base_url) as client, of_anthropic(session.root_url) as other:
        assert [each.id for each in (await client.models.list()).data] == ["scripted"]
        assert (await client.models.retrieve("scripted")).id == "scripted"
        with pytest.raises(openai.NotFoundError, match="there is scripted"):
            await client.models.retrieve("org/other")
        assert (await other.messages.count_tokens(model="m", messages=HI)).input_tokens == 7
    assert session.traces() == []


async def test_health_and_metrics_agree_with_what_happened(serve: Serve, scripted: ModuleType) -> None:
    bad = RequestRefused("no", status=503, code="engine_failed")
    gateway: Gateway = await serve(
        lambda request: scripted.Say(error=bad if request.model == "bad" else None)
    )
    async with of_openai(gateway.base_url) as client, aiohttp.ClientSession() as http:
        await client.chat.completions.create(model="m", messages=HI)
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="bad", messages=HI)
        async with http.get(gateway.url + "/health") as reply:
            health = await reply.json()
            assert gateway.token not in await reply.text()
        async with http.get(f"{gateway.url}/k/{gateway.token}/metrics") as reply:
            metrics = dict(re.findall(r"^(\w+(?:\{.*\})?) (.*)$", await reply.text(), re.MULTILINE))
    assert health["calls"] == {"accepted": 2, "recorded": 1, "errored": 1, "retried": 0}
    assert health["queued"] == 2
    assert health["policy_versions"] == [4]
    assert health["last_minute"] == {"ended": 2, "errored": 1, "error_rate": 0.5}
    assert metrics["rllm_gateway_calls_accepted_total"] == "2"
    assert metrics['rllm_gateway_calls_recorded_total{status="ok"}'] == "1"
    assert metrics['rllm_gateway_calls_errored_total{code="engine_failed"}'] == "1"
    assert metrics['rllm_gateway_call_seconds_bucket{le="+Inf"}'] == "1"
    assert metrics['rllm_gateway_tokens_total{kind="completion_tokens"}'] == "3"


async def test_an_unhealthy_policy_shows_in_the_status_of_health(serve: Serve) -> None:
    gateway: Gateway = await serve()
    gateway.policy.is_healthy = False
    async with aiohttp.ClientSession() as http, http.get(gateway.url + "/health") as reply:
        assert reply.status == 503


async def test_the_published_document_names_every_path_and_its_errors(serve: Serve) -> None:
    gateway: Gateway = await serve()
    async with aiohttp.ClientSession() as http, http.get(gateway.url + "/openapi.json") as reply:
        document = await reply.json()
    assert document["openapi"].startswith("3.1")
    names = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(names) == len(set(names))
    for path in ("/v1/chat/completions", "/v1/messages/count_tokens", "/v1/models/{model}", "/sessions"):
        assert path in document["paths"]
    assert "/sessions/{session}/v1/responses" in document["paths"]
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert refs == set(document["components"]["schemas"])


def test_an_address_that_cannot_be_had_is_refused_before_anything_is_written(
    scripted: ModuleType, tmp_path: Path
) -> None:
    first = Gateway(scripted.ScriptedPolicy(), tmp_path / "a")
    first.bind()
    with pytest.raises(ConfigError, match="listened"):
        Gateway(scripted.ScriptedPolicy(), tmp_path / "b", port=first.port).bind()
    with pytest.raises(ConfigError, match="address"):
        Gateway(scripted.ScriptedPolicy(), tmp_path / "b", host="no.such.host.invalid").bind()
    first._socket.close()
    assert list(tmp_path.iterdir()) == []


def test_speaking_of_calls_and_records_brings_in_no_server() -> None:
    code = "import sys, rllm.gateway; rllm.gateway.CallRecord; print('aiohttp' in sys.modules)"
    sources = Path(__file__).resolve().parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": str(sources)}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert told.stdout == "False\n", told.stderr


async def test_two_hundred_sessions_at_once_lose_and_mix_nothing(serve: Serve, scripted: ModuleType) -> None:
    def echo(request: Any) -> Any:
        said = request.messages[-1]["content"]
        return scripted.Say(text=f"echo {said}", ids=[int(part) for part in said.split("-")])

    gateway: Gateway = await serve(echo)
    sessions = [gateway.open_session(f"run/{number}") for number in range(200)]

    async def program(http: aiohttp.ClientSession, number: int) -> None:
        for turn in range(5):
            body = {
                "model": "m",
                "stream": bool((number + turn) % 2),
                "messages": [{"role": "user", "content": f"{number}-{turn}"}],
            }
            async with http.post(sessions[number].base_url + "/chat/completions", json=body) as reply:
                assert reply.status == 200
                assert str(number) in await reply.text()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=100)) as http:
        await asyncio.gather(*(program(http, number) for number in range(200)))
    seen: set[str] = set()
    for number, session in enumerate(sessions):
        traces = session.traces()
        assert [each.completion_ids for each in traces] == [[number, turn] for turn in range(5)]
        seen.update(each.id for each in traces)
    assert len(seen) == 1000
    assert gateway.counts.num_accepted == gateway.counts.recorded_by_status["ok"] == 1000
