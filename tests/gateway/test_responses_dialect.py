"""The Responses protocol: what clients get is what OpenAI's own SDK reads."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI, RateLimitError
from openai.types.responses import Response
from pydantic import BaseModel

from rllm.errors import RequestRefused
from rllm.gateway.dialects.responses import ResponsesDialect
from rllm.types.messages import FinishReason, Message
from rllm.types.wire import (
    Answer,
    Choice,
    Piece,
    TokenLogprob,
    ToolCallPiece,
    WireToolCall,
)

sys.path.insert(0, str(Path(__file__).parent))
from dialect_server import DialectServer, calls, events_of, json_values, pieces_of, stream_of, words
from responses_client import FILES, WEATHER, WEB_SEARCH, parsed

streamed = partial(stream_of, ResponsesDialect())


@pytest.fixture(scope="module")
def running() -> Iterator[DialectServer]:
    with DialectServer(ResponsesDialect(), "/v1/responses", "resp_1") as server:
        yield server


@pytest.fixture
def server(running: DialectServer) -> DialectServer:
    running.reset()
    return running


@pytest.fixture(scope="module")
def client(running: DialectServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as made:
        yield made


# ---- replies, read by the SDK ------------------------------------------------------------------------------


def test_the_sdk_reads_an_answer(server: DialectServer, client: OpenAI) -> None:
    server.says(
        Choice(text="Grüße 🎈", reasoning="Hm."),
        usage={"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 8},
    )
    response = client.responses.create(
        model="m", input="Hi", instructions="Be kind.", temperature=0.3, metadata={"run": "1"}
    )
    assert response.output_text == "Grüße 🎈"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (response.status, response.id, response.model) == ("completed", "resp_1", "m")
    assert (response.instructions, response.temperature) == ("Be kind.", 0.3)
    assert response.metadata == {"run": "1"}
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (
        10,
        4,
        14,
    )
    assert response.usage.input_tokens_details.cached_tokens == 8


async def test_the_async_sdk_reads_an_answer_and_a_stream(server: DialectServer) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        response = await client.responses.create(model="m", input="Hi")
        assert response.output_text == "Hello"
        async with client.responses.stream(model="m", input="Hi") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Hello"


def strictly(reply: dict[str, Any]) -> Response:
    """As the SDK's own model validates it, and after a trip over the wire."""
    return Response.model_validate(orjson.loads(orjson.dumps(reply)), strict=False)


def test_every_field_is_of_the_type_that_the_sdk_declares() -> None:
    request = parsed(
        tools=[WEATHER, FILES, WEB_SEARCH],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "text"}},
        include=["message.output_text.logprobs"],
        reasoning={"effort": "low"},
    )
    token = TokenLogprob(token_id=1, text="Hi", logprob=-0.5, top=[(1, "Hi", -0.5), (2, "Ho", float("-inf"))])
    answer = Answer(
        id="resp_1",
        model="m",
        created=1,
        choices=[Choice(text="Hi", reasoning="Hm", tool_calls=calls("{}"), token_logprobs=[token])],
    )
    response = strictly(ResponsesDialect().reply(request, answer))
    message = response.output[1]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert part.logprobs[0].token == "Hi"
    assert [each.token for each in part.logprobs[0].top_logprobs] == ["Hi", "Ho"]
    for event in events_of(streamed(request, answer, pieces_of(answer.choices[0]))):
        if "response" in event:
            strictly(event["response"])


def test_log_probabilities_are_not_shown_to_those_who_did_not_ask() -> None:
    token = TokenLogprob(token_id=1, text="Hi", logprob=-0.5)
    answer = Answer(
        id="resp_1",
        model="m",
        created=1,
        choices=[Choice(text="Hi", token_logprobs=[token], completion_ids=[1])],
    )
    shown = orjson.dumps(ResponsesDialect().reply(parsed(), answer))
    shown += b"".join(streamed(parsed(stream=True), answer, [Piece(text="Hi", logprobs=[token])]))
    assert b"-0.5" not in shown
    assert b"completion_ids" not in shown


def test_a_cut_answer_is_incomplete(server: DialectServer, client: OpenAI) -> None:
    server.says(Choice(text="Hel", finish_reason=FinishReason.LENGTH))
    response = client.responses.create(model="m", input="Hi", max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    with client.responses.create(model="m", input="Hi", stream=True) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "Hel"


def test_parallel_calls_come_back_with_their_ids(server: DialectServer, client: OpenAI) -> None:
    server.says(
        Choice(
            text="I look.",
            tool_calls=calls('{"city": "Rome"}', '{"city": "Oslo"}'),
            finish_reason=FinishReason.TOOL_CALLS,
        )
    )
    response = client.responses.create(model="m", input="Hi", tools=[WEATHER])  # pyright: ignore
    found = [item for item in response.output if item.type == "function_call"]
    assert [(item.call_id, item.name, item.arguments) for item in found] == [
        ("call_0", "weather", '{"city": "Rome"}'),
        ("call_1", "weather", '{"city": "Oslo"}'),
    ]
    assert response.status == "completed"


def test_a_call_of_a_namespaced_tool_carries_name_and_namespace(
    server: DialectServer, client: OpenAI
) -> None:
    call = WireToolCall(id="c", name="mcp__files__read", arguments="{}")
    server.says(Choice(tool_calls=[call]))
    response = client.responses.create(model="m", input="Hi", tools=[FILES])  # pyright: ignore
    with client.responses.create(model="m", input="Hi", tools=[FILES], stream=True) as stream:  # pyright: ignore
        done = [event.item for event in stream if event.type == "response.output_item.done"]
    for item in (response.output[0], done[0]):
        assert item.type == "function_call"
        assert (item.namespace, item.name) == ("mcp__files", "read")
    echoed = parsed(tools=[FILES], input=[{"role": "user", "content": "Hi"}, response.output[0].to_dict()])
    assert echoed.messages[1] == Choice(tool_calls=[call]).message()


# ---- streams -----------------------------------------------------------------------------------------------


def test_events_come_in_the_order_of_the_protocol() -> None:
    choice = Choice(text="Yes", reasoning="Hm", tool_calls=calls("{}"), finish_reason=FinishReason.TOOL_CALLS)
    answer = Answer(id="resp_1", model="m", created=1, choices=[choice])
    events = events_of(streamed(parsed(tools=[WEATHER]), answer, pieces_of(choice)))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    finals = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == finals


def test_a_stream_and_a_reply_end_with_the_same_response() -> None:
    choice = Choice(text="Yes", reasoning="Hm", tool_calls=calls("{}", "[1]"))
    answer = Answer(id="resp_1", model="m", created=1, choices=[choice], usage={"prompt_tokens": 3})
    request = parsed(tools=[WEATHER])
    events = events_of(streamed(request, answer, pieces_of(choice)))
    assert events[-1]["response"] == ResponsesDialect().reply(request, answer)


def test_an_answer_that_is_already_known_is_streamed_whole() -> None:
    """As when a client tries again and gets the answer from the ledger."""
    choice = Choice(text="Yes", reasoning="Hm", tool_calls=calls("{}", ""))
    answer = Answer(id="resp_1", model="m", created=1, choices=[choice])
    request = parsed(tools=[WEATHER])
    whole = events_of(streamed(request, answer, []))
    assert whole[-1]["response"] == ResponsesDialect().reply(request, answer)
    half = events_of(streamed(request, answer, pieces_of(choice)[:2]))
    assert half[-1]["response"] == whole[-1]["response"]


def test_text_after_a_call_belongs_to_the_same_answer() -> None:
    choice = Choice(text="before after", tool_calls=calls("{}"))
    pieces = [
        Piece(text="before "),
        Piece(tool_call=ToolCallPiece(index=0, id="call_0", name="weather", arguments="{}")),
        Piece(text="after"),
    ]
    answer = Answer(id="resp_1", model="m", created=1, choices=[choice])
    output = events_of(streamed(parsed(), answer, pieces))[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert parsed(input=[{"role": "user", "content": "Hi"}, *output]).messages[1] == choice.message()


def test_log_probabilities_stream_with_the_text(server: DialectServer, client: OpenAI) -> None:
    tokens = [TokenLogprob(token_id=place, text=text, logprob=-place) for place, text in enumerate("abc")]
    choice = Choice(text="abc", token_logprobs=tokens)
    server.says(choice, pieces=[Piece(text=token.text, logprobs=[token]) for token in tokens])
    with client.responses.stream(
        model="m", input="Hi", include=["message.output_text.logprobs"], top_logprobs=1
    ) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert [entry.logprob for event in deltas for entry in event.logprobs] == [0, -1, -2]
    part = final.output[0].content[0]  # pyright: ignore
    assert [entry.token for entry in part.logprobs] == ["a", "b", "c"]  # pyright: ignore


def test_a_stream_that_fails_never_looks_complete(server: DialectServer, client: OpenAI) -> None:
    server.says(Choice(text="Hello"))
    server.fails = RequestRefused("The engine died.", status=503, kind="server_error", code="engine_failed")
    with client.responses.create(model="m", input="Hi", stream=True) as stream:
        events = list(stream)
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    error, failed = events[-2:]
    assert error.type == "error"
    assert (error.code, error.message) == ("engine_failed", "The engine died.")
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert failed.response.error.code == "server_error"
    assert failed.response.output_text == "Hello"
    strictly(failed.response.to_dict())
    with (  # noqa: SIM117  the second raises inside of the first
        client.responses.stream(model="m", input="Hi") as helped
    ):
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            helped.get_final_response()


def test_a_failure_after_an_upstreams_own_events_names_no_other_response() -> None:
    writer = ResponsesDialect().stream(parsed(), "resp_1", "m", 1)
    events = events_of(iter([writer.failed(RequestRefused("cut off", status=502))]))
    assert [event["type"] for event in events] == ["error"]


def test_errors_have_the_shape_that_the_sdk_reads(server: DialectServer, client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="m", input="Hi", conversation="conv_0")
    assert caught.value.param == "conversation"
    assert caught.value.code == "unsupported_parameter"
    server.fails = RequestRefused("Later.", status=429, kind="rate_limit_error", code="busy")
    with pytest.raises(RateLimitError) as limited:
        client.responses.create(model="m", input="Hi")
    assert limited.value.code == "busy"
    assert isinstance(limited.value, APIError)


def test_the_sdk_parses_structured_answers(server: DialectServer, client: OpenAI) -> None:
    class City(BaseModel):
        name: str

    server.says(Choice(text='{"name": "Rome"}'))
    parsed_answer = client.responses.parse(model="m", input="Hi", text_format=City)
    assert parsed_answer.output_parsed == City(name="Rome")
    assert server.requests[0].response_schema is not None
    with client.responses.stream(model="m", input="Hi", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Rome")


# ---- what a client sends back ------------------------------------------------------------------------------

arguments_texts = st.dictionaries(words, json_values, max_size=3).map(json.dumps) | words


@st.composite
def any_choice(draw: st.DrawFn) -> Choice:
    texts = draw(st.lists(arguments_texts, max_size=3))
    return Choice(
        text=draw(words),
        reasoning=draw(words),
        tool_calls=calls(*texts),
        finish_reason=draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])),
    )


def said(message: Message) -> Message:
    """Without the thought, which is not part of the answer."""
    return {key: value for key, value in message.items() if key != "reasoning_content"}


@given(any_choice(), st.integers(1, 50))
def test_what_a_client_sends_back_is_the_message_that_it_got(
    running: DialectServer, client: OpenAI, choice: Choice, size: int
) -> None:
    running.says(choice, pieces=pieces_of(choice, size))
    question = {"role": "user", "content": "Hi"}
    plain = client.responses.create(model="m", input="Hi")
    with client.responses.create(model="m", input="Hi", stream=True) as events:
        final = [event.response for event in events if hasattr(event, "response")][-1]
    for response in (plain, final):
        echo = [question, *(item.to_dict(mode="json") for item in response.output), question]
        messages = parsed(input=echo).messages
        assert len(messages) == 3
        assert said(messages[1]) == choice.message()
        assert messages[1].get("reasoning_content", "") == choice.reasoning


def test_a_client_that_drops_thoughts_and_ids_still_says_the_same() -> None:
    choice = Choice(text="", reasoning="long thought", finish_reason=FinishReason.LENGTH)
    answer = Answer(id="resp_1", model="m", created=1, choices=[choice])
    output = ResponsesDialect().reply(parsed(), answer)["output"]
    kept = [
        {key: value for key, value in item.items() if key != "id"}
        for item in output
        if item["type"] != "reasoning"
    ]
    assert parsed(input=[{"role": "user", "content": "Hi"}, *kept]).messages[1] == choice.message()
