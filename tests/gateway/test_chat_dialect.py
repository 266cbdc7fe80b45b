"""Chat completions: what clients send is understood, what they get is what OpenAI's own SDK reads."""

import asyncio
import copy
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from rllm.errors import RequestRefused
from rllm.gateway.dialects.chat import ChatDialect, ChatReader, ChatUpstream
from rllm.gateway.wire import (
    Answer,
    CallRequest,
    Choice,
    Dialect,
    Piece,
    TokenLogprob,
    ToolCallPiece,
    ToolChoice,
    ToolMode,
    WireToolCall,
)
from rllm.types.messages import FinishReason

EVERYTHING = frozenset({"logprobs", "token_ids", "usage"})
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def parsed(**fields: Any) -> CallRequest:
    return ChatDialect().parse(HELLO | fields)


def refusal(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        parsed(**fields)
    assert caught.value.status == 400
    return caught.value


def said(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return ChatDialect().parse({"messages": list(messages)}).messages


# ---- what clients send -------------------------------------------------------------------------------------


def test_everything_that_a_request_sets_is_read() -> None:
    request = parsed(
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        max_completion_tokens=64,
        stop=["Observation:", "</code>"],
        seed=7,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        presence_penalty=0.5,
        frequency_penalty=0,
    )
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (0.5, 0.9, 20, 64)
    assert (request.stop, request.seed, request.n) == (["Observation:", "</code>"], 7, 3)
    assert (request.stream, request.include_usage) == (True, True)
    assert (request.logprobs, request.top_logprobs, request.return_token_ids) == (True, 2, True)
    assert request.tools == [WEATHER]
    assert request.tool_choice == ToolChoice(mode=ToolMode.REQUIRED)
    assert request.parallel_tool_calls is False
    assert request.penalties == {"presence_penalty": 0.5}


def test_what_is_left_open_stays_open() -> None:
    request = parsed(stream=False, temperature=None, stop=None, tools=None, tool_choice=None, n=None)
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (None,) * 4
    assert (request.stream, request.stop, request.n, request.tools) == (False, [], 1, [])
    assert request.penalties == {}


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 8.0}, 8),
        ({"max_tokens": None, "max_completion_tokens": 9}, 9),
    ],
)
def test_the_size_has_two_names(sizes: dict[str, Any], tokens: int) -> None:
    assert parsed(**sizes).max_tokens == tokens


def test_two_sizes_that_differ_are_refused() -> None:
    error = refusal(max_tokens=5, max_completion_tokens=6)
    assert error.param == "max_completion_tokens"
    assert "5" in error.message
    assert "6" in error.message


def test_unknown_fields_of_platforms_and_frameworks_are_tolerated() -> None:
    request = parsed(metadata={"a": "b"}, store=True, prompt_cache_key="k", session_id="s", user="u", x={})
    assert request.body["session_id"] == "s"
    assert request.penalties == {}


def test_fields_of_engines_that_change_the_answer_are_kept_for_the_engine_to_decide() -> None:
    fields = {"min_p": 0.1, "ignore_eos": True, "guided_regex": "a+", "chat_template_kwargs": {"x": 1}}
    assert parsed(**fields).penalties == fields
    assert parsed(min_p=0, ignore_eos=False, repetition_penalty=1.0, logit_bias={}).penalties == {}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_developer_is_a_system(role: str) -> None:
    assert said({"role": role, "content": "Be kind"}) == [{"role": "system", "content": "Be kind"}]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_parts_become_text_in_every_role(role: str) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    assert said({"role": role, "content": parts}) == [{"role": role, "content": "ab"}]


def test_parts_that_are_not_text_stay_parts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    text = {"type": "text", "text": "What is it?"}
    assert said({"role": "user", "content": [text, image]})[0]["content"] == [text, image]


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_an_assistant_that_only_calls_has_one_shape(content: dict[str, Any]) -> None:
    message = {"role": "assistant", "tool_calls": [CALL], "provider_specific_fields": {"a": 1}} | content
    assert said(message) == [{"role": "assistant", "content": None, "tool_calls": [CALL]}]


def test_what_an_sdk_echoes_of_an_answer_is_that_answer() -> None:
    choice = Choice(text="", tool_calls=[WireToolCall(id="call_1", name="weather", arguments="{}")])
    reply = ChatDialect().reply(parsed(), Answer(id="x", model="m", created=1, choices=[choice]))
    echoed = ChatCompletion.model_validate(reply).choices[0].message.model_dump()
    assert said(echoed) == [choice.message()]
    assert said(reply["choices"][0]["message"]) == [choice.message()]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_tool_may_answer_nothing(content: dict[str, Any]) -> None:
    message = {"role": "tool", "tool_call_id": "call_1", "name": "weather"} | content
    assert said(message) == [{"role": "tool", "content": "", "tool_call_id": "call_1", "name": "weather"}]


def test_a_tool_may_answer_in_parts() -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "12 C"}]}
    assert said(message)[0]["content"] == "12 C"


def test_thoughts_in_the_history_are_kept_under_one_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        assert said({"role": "assistant", "content": "4", name: "2+2"})[0]["reasoning_content"] == "2+2"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ToolChoice(mode=ToolMode.NONE)),
        ("auto", ToolChoice(mode=ToolMode.AUTO)),
        ("required", ToolChoice(mode=ToolMode.REQUIRED)),
        (
            {"type": "function", "function": {"name": "weather"}},
            ToolChoice(mode=ToolMode.NAMED, name="weather"),
        ),
        (None, ToolChoice(mode=ToolMode.AUTO)),
    ],
)
def test_every_tool_choice_is_understood(choice: Any, expected: ToolChoice) -> None:
    assert parsed(tools=[WEATHER], tool_choice=choice).tool_choice == expected


def test_a_tool_without_parameters_takes_none() -> None:
    tool = parsed(tools=[{"type": "function", "function": {"name": "now", "strict": False}}]).tools[0]
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}
    assert tool["function"]["strict"] is False


@pytest.mark.parametrize(
    ("chosen", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}},
            {"type": "array"},
        ),
    ],
)
def test_every_response_format_is_understood(chosen: dict[str, Any], schema: Any) -> None:
    assert parsed(response_format=chosen).response_schema == schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"model": 7}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**5000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"50256": 101}}, "logit_bias.50256"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_bad_value_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert f"`{param.partition('[')[0]}" in error.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FULL = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind"}]},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
    ],
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 5,
    "stop": ["a"],
    "logit_bias": {"5": 1},
    "functions": None,
    "function_call": None,
    "n": 2,
}


def is_answered_or_refused(body: Any) -> bool:
    try:
        return isinstance(ChatDialect().parse(body), CallRequest)
    except RequestRefused as error:
        return error.status == 400 and bool(error.param)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [path, *(place for key, inner in entries for place in places(inner, (*path, key)))]


@settings(max_examples=400, deadline=None)
@given(body=st.dictionaries(st.sampled_from([*FULL, "x", "top_p"]), JSON, max_size=6) | JSON)
def test_any_json_is_a_request_or_a_400(body: Any) -> None:
    assert is_answered_or_refused(body)


@settings(max_examples=600, deadline=None)
@given(place=st.sampled_from(places(FULL)[1:]), value=JSON, removed=st.booleans())
def test_a_good_body_with_one_change_is_a_request_or_a_400(
    place: tuple[Any, ...], value: Any, removed: bool
) -> None:
    body = copy.deepcopy(FULL)
    holder: Any = body
    for key in place[:-1]:
        holder = holder[key]
    if removed:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    assert is_answered_or_refused(body)


# ---- what clients get --------------------------------------------------------------------------------------


def logprob(text: str, value: float = -0.5) -> TokenLogprob:
    return TokenLogprob(
        token_id=len(text), text=text, logprob=value, top=[(1, text, value), (2, "other", -2.0)]
    )


def answer_of(*choices: Choice, answer_id: str = "chatcmpl-1") -> Answer:
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "cached_tokens": 3}
    return Answer(id=answer_id, model="m", created=1_700_000_000, choices=list(choices), usage=usage)


TWO_CALLS = Choice(
    tool_calls=[
        WireToolCall(id="call_a", name="weather", arguments='{"city": "Bern"}'),
        WireToolCall(id="call_b", name="weather", arguments='{"city": "Ulm"}'),
    ],
    finish_reason=FinishReason.TOOL_CALLS,
)
TWO_CALL_PIECES = [
    Piece(tool_call=ToolCallPiece(index=0, id="call_a", name="weather")),
    Piece(tool_call=ToolCallPiece(index=0, arguments='{"city": ')),
    Piece(tool_call=ToolCallPiece(index=0, arguments='"Bern"}')),
    Piece(tool_call=ToolCallPiece(index=1, id="call_b", name="weather", arguments='{"city"')),
    Piece(tool_call=ToolCallPiece(index=1, arguments=': "Ulm"}')),
]


def test_a_reply_is_what_the_sdk_knows_as_a_completion() -> None:
    choice = Choice(text="Hé", completion_ids=[4, 5], prompt_ids=[1], token_logprobs=[logprob("Hé")])
    reply = ChatDialect().reply(parsed(), answer_of(choice, TWO_CALLS))
    completion = ChatCompletion.model_validate(json.loads(orjson.dumps(reply)), strict=True)
    first, second = completion.choices
    assert (first.message.content, first.finish_reason, first.logprobs) == ("Hé", "stop", None)
    assert (second.message.content, second.finish_reason) == (None, "tool_calls")
    assert [call.id for call in second.message.tool_calls or []] == ["call_a", "call_b"]
    assert completion.usage is not None
    assert completion.usage.total_tokens == 12
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 3
    assert "token_ids" not in str(reply)


def test_log_probabilities_come_when_asked_for_with_their_bytes() -> None:
    choice = Choice(text="é", token_logprobs=[logprob("é"), logprob("\ufffd", -math.inf)])
    reply = ChatDialect().reply(parsed(logprobs=True, top_logprobs=2), answer_of(choice))
    logprobs = ChatCompletion.model_validate(reply).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].bytes == [0xC3, 0xA9]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["é", "other"]
    assert (logprobs.content[1].bytes, logprobs.content[1].logprob) == (None, -9999.0)


def test_token_ids_come_when_asked_for() -> None:
    answer = answer_of(Choice(text="Hi", prompt_ids=[1, 2], completion_ids=[3]))
    reply = ChatDialect().reply(parsed(return_token_ids=True), answer)
    assert (reply["prompt_token_ids"], reply["choices"][0]["token_ids"]) == ([1, 2], [3])


def test_thoughts_are_answered_beside_the_content() -> None:
    reply = ChatDialect().reply(parsed(), answer_of(Choice(text="4", reasoning="2+2")))
    assert reply["choices"][0]["message"]["reasoning_content"] == "2+2"


def test_an_error_has_the_shape_of_openai() -> None:
    error = RequestRefused("No", param="n", code="c")
    assert ChatDialect().error(error) == {
        "error": {"message": "No", "type": "invalid_request_error", "param": "n", "code": "c"}
    }


@asynccontextmanager
async def served(
    answer: Answer, pieces: Sequence[Piece] = (), error: RequestRefused | None = None
) -> AsyncIterator[str]:
    """A server that answers every call with `answer`, or breaks off with `error` after `pieces`."""
    dialect = ChatDialect()

    async def respond(http: web.Request) -> web.StreamResponse:
        try:
            request = dialect.parse(await http.json())
        except RequestRefused as refused:
            return web.json_response(dialect.error(refused), status=refused.status)
        if not request.stream:
            return web.json_response(dialect.reply(request, answer))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(http)
        writer = dialect.stream(request, answer.id, answer.model, answer.created)
        await stream.write(writer.begin())
        for piece in pieces:
            await stream.write(writer.piece(piece))
        await stream.write(writer.end(answer) if error is None else writer.failed(error))
        return stream

    app = web.Application()
    app.router.add_post("/v1/chat/completions", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(
    answer: Answer, pieces: Sequence[Piece] = (), error: RequestRefused | None = None
) -> AsyncIterator[AsyncOpenAI]:
    async with served(answer, pieces, error) as url, AsyncOpenAI(base_url=url, api_key="any") as client:
        yield client


async def chunks_of(client: AsyncOpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(**HELLO, stream=True, **fields)
    return [chunk async for chunk in stream]


async def test_the_sdk_reads_a_plain_answer() -> None:
    async with client_of(answer_of(Choice(text="Hello"))) as client:
        completion = await client.chat.completions.create(**HELLO)
    assert completion.choices[0].message.content == "Hello"


async def test_the_sdk_sees_a_bad_request_with_its_parameter() -> None:
    async with client_of(answer_of()) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(**HELLO, temperature=-1)
    assert caught.value.param == "temperature"


async def test_a_stream_is_roles_then_deltas_then_one_finish_reason_a_choice() -> None:
    pieces = [
        Piece(choice=1, reasoning="hm"),
        Piece(choice=0, text="He"),
        Piece(choice=1, text="Grü"),
        Piece(choice=0, text='llo "you"\n'),
        Piece(choice=1, text="ezi"),
    ]
    answer = answer_of(
        Choice(index=0, text='Hello "you"\n'),
        Choice(index=1, text="Grüezi", finish_reason=FinishReason.LENGTH),
    )
    async with client_of(answer, pieces) as client:
        chunks = await chunks_of(client, n=2)
    assert {(chunk.id, chunk.created) for chunk in chunks} == {("chatcmpl-1", 1_700_000_000)}
    for index, text, reason in ((0, 'Hello "you"\n', "stop"), (1, "Grüezi", "length")):
        deltas = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert deltas[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in deltas) == text
        assert [choice.finish_reason for choice in deltas if choice.finish_reason] == [reason]
        assert deltas[-1].finish_reason == reason
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", "") for chunk in chunks]
    assert "".join(thoughts) == "hm"


async def test_usage_is_streamed_only_when_asked_for_in_a_last_chunk_of_its_own() -> None:
    async with client_of(answer_of(Choice(text="Hi")), [Piece(text="Hi")]) as client:
        chunks = await chunks_of(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_stream_helper_puts_parallel_calls_together() -> None:
    async with client_of(answer_of(TWO_CALLS), TWO_CALL_PIECES) as client:
        async with client.chat.completions.stream(**HELLO, tools=[WEATHER]) as stream:  # type: ignore[list-item]
            kinds = [event.type async for event in stream]
            completion = await stream.get_final_completion()
        raw = await chunks_of(client, tools=[WEATHER])
    message = completion.choices[0].message
    assert message.content is None
    calls = message.tool_calls or []
    assert [(call.id, call.function.parsed_arguments) for call in calls] == [
        ("call_a", {"city": "Bern"}),
        ("call_b", {"city": "Ulm"}),
    ]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    firsts = [call for chunk in raw for call in chunk.choices[0].delta.tool_calls or [] if call.id]
    assert [(call.index, call.type, call.function.name) for call in firsts if call.function] == [
        (0, "function", "weather"),
        (1, "function", "weather"),
    ]


def test_the_synchronous_sdk_reads_streams_and_structured_answers() -> None:
    class City(BaseModel):
        name: str

    text = '{"name": "Bern"}'
    answer, pieces = answer_of(Choice(text=text)), [Piece(text=text[:7]), Piece(text=text[7:])]

    def talk(url: str) -> tuple[City | None, str]:
        with OpenAI(base_url=url, api_key="any") as client:
            with client.chat.completions.stream(**HELLO, response_format=City) as stream:
                for _ in stream:
                    pass
                city = stream.get_final_completion().choices[0].message.parsed
            with client.chat.completions.create(**HELLO, stream=True) as chunks:
                return city, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async def run() -> tuple[City | None, str]:
        async with served(answer, pieces) as url:
            return await asyncio.to_thread(talk, url)

    assert asyncio.run(run()) == (City(name="Bern"), text)


async def test_log_probabilities_are_streamed_only_when_asked_for() -> None:
    pieces = [
        Piece(text="a", logprobs=[logprob("a")]),
        Piece(logprobs=[logprob("\ufffd")]),
        Piece(text="é", logprobs=[logprob("\ufffd")]),
    ]
    async with client_of(answer_of(Choice(text="aé")), pieces) as client:
        async with client.chat.completions.stream(**HELLO, logprobs=True, top_logprobs=2) as stream:
            async for _ in stream:
                pass
            completion = await stream.get_final_completion()
        silent = await chunks_of(client)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert [token.token for token in logprobs.content or []] == ["a", "\ufffd", "\ufffd"]
    assert all(chunk.choices[0].logprobs is None for chunk in silent)


async def test_streamed_token_ids_come_when_asked_for() -> None:
    answer = answer_of(Choice(text="Hi", prompt_ids=[1, 2], completion_ids=[3]))
    async with client_of(answer, [Piece(text="Hi")]) as client:
        chunks = await chunks_of(client, extra_body={"return_token_ids": True})
        silent = await chunks_of(client)
    assert chunks[-1].model_extra == {"prompt_token_ids": [1, 2]}
    assert chunks[-1].choices[0].model_extra == {"token_ids": [3]}
    assert "token_ids" not in str(silent)


async def test_a_stream_that_breaks_never_looks_like_a_clean_end() -> None:
    failure = RequestRefused("The engine is gone", status=502, kind="server_error")
    async with client_of(answer_of(), [Piece(text="Hal")], failure) as client:
        with pytest.raises(APIError, match="The engine is gone"):
            await chunks_of(client)
    writer = ChatDialect().stream(parsed(), "x", "m", 1)
    assert b"[DONE]" not in writer.failed(failure)


# ---- upstreams ---------------------------------------------------------------------------------------------


def foreign(**fields: Any) -> CallRequest:
    """A request of a client that speaks another protocol."""
    messages = [{"role": "user", "content": "Hi"}]
    return CallRequest(**{"dialect": Dialect.MESSAGES, "body": {}, "messages": messages} | fields)


def test_an_upstream_of_the_same_protocol_gets_the_body_as_it_was_sent() -> None:
    body = HELLO | {"messages": [{"role": "developer", "content": "x", "odd": 1}], "store": True, "top_k": -1}
    assert ChatUpstream().body(ChatDialect().parse(body), capture=frozenset()) == body
    request = ChatDialect().parse(body | {"stream": True, "logprobs": False})
    captured = ChatUpstream().body(request, capture=EVERYTHING)
    assert captured["logprobs"] is True
    assert captured["return_token_ids"] is True
    assert captured["stream_options"] == {"include_usage": True}
    assert request.body["logprobs"] is False


def test_what_was_changed_since_the_request_was_read_reaches_the_upstream() -> None:
    request = parsed(max_tokens=10, temperature=0.1)
    request.max_tokens, request.temperature, request.model = 5, 1.0, "other"
    body = ChatUpstream().body(request, capture=frozenset())
    assert (body["max_completion_tokens"], body["temperature"], body["model"]) == (5, 1.0, "other")
    assert "max_tokens" not in body


def test_a_request_of_another_protocol_is_said_whole_in_this_one() -> None:
    request = foreign(
        model="m",
        tools=[WEATHER],
        tool_choice=ToolChoice(mode=ToolMode.NAMED, name="weather"),
        parallel_tool_calls=False,
        response_schema={"type": "array"},
        temperature=0.3,
        top_p=0.5,
        top_k=4,
        max_tokens=9,
        stop=["x"],
        seed=3,
        n=2,
        logprobs=True,
        top_logprobs=1,
        stream=True,
        include_usage=True,
        penalties={"presence_penalty": 1},
    )
    body = ChatUpstream().body(request, capture=frozenset())
    again = ChatDialect().parse(body)
    for name in CallRequest.__slots__:
        if name not in ("dialect", "body"):
            assert getattr(again, name) == getattr(request, name), name


def test_what_chat_cannot_say_is_refused() -> None:
    for request in (foreign(prompt="Once"), foreign(penalties={"truncation": "auto"})):
        with pytest.raises(RequestRefused) as caught:
            ChatUpstream().body(request, capture=frozenset())
        assert caught.value.status == 400


def vllm_reply() -> dict[str, Any]:
    tool = {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    tokens = [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}]
    return {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "qwen",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a", "reasoning": "hm", "refusal": None},
                "logprobs": {"content": tokens},
                "finish_reason": "stop",
                "stop_reason": "END",
                "token_ids": [11],
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": None, "tool_calls": [tool]},
                "logprobs": {"content": tokens * 2},
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [12, 13],
            },
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "prompt_logprobs": None,
        "prompt_token_ids": [1, 2],
        "kv_transfer_params": None,
    }


def test_every_choice_of_a_reply_is_captured_and_only_what_was_asked_for_is_passed_on() -> None:
    answer = ChatUpstream().read(parsed(n=2), vllm_reply())
    first, second = answer.choices
    assert (first.text, first.reasoning, first.stop_sequence) == ("a", "hm", "END")
    assert (first.prompt_ids, first.completion_ids, first.logprobs) == ([1, 2], [11], [-0.1])
    assert (second.completion_ids, second.logprobs) == ([12, 13], [-0.1, -0.1])
    assert second.tool_calls == [WireToolCall(id="chatcmpl-tool-1", name="weather", arguments="{}")]
    assert second.finish_reason is FinishReason.TOOL_CALLS
    assert answer.usage == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 1}
    assert answer.no_ids_because == ""
    assert answer.raw is not None
    expected = vllm_reply()
    del expected["prompt_token_ids"]
    for choice in expected["choices"]:
        del choice["token_ids"]
        choice["logprobs"] = None
    assert answer.raw == expected
    assert ChatDialect().reply(parsed(n=2), answer) is answer.raw


def test_a_client_that_asked_for_everything_gets_the_reply_as_it_is() -> None:
    request = parsed(n=2, logprobs=True, return_token_ids=True)
    answer = ChatUpstream().read(request, vllm_reply())
    assert answer.raw == vllm_reply()
    assert answer.choices[0].token_logprobs[0].token_id == 11


def test_a_client_of_another_protocol_gets_no_raw_reply_and_an_id_of_its_own_form() -> None:
    answer = ChatUpstream().read(foreign(n=2), vllm_reply())
    assert answer.raw is None
    assert answer.id.startswith("msg_")


def test_a_hosted_model_without_ids_says_what_is_missing() -> None:
    reply = vllm_reply()
    del reply["prompt_token_ids"]
    for choice in reply["choices"]:
        del choice["token_ids"]
    answer = ChatUpstream().read(parsed(n=2), reply)
    assert "return_token_ids" in answer.no_ids_because
    assert answer.choices[0].completion_ids == []


def test_ids_are_read_from_token_names() -> None:
    reply = vllm_reply()
    reply["choices"] = reply["choices"][:1]
    del reply["choices"][0]["token_ids"]
    reply["choices"][0]["logprobs"]["content"][0]["token"] = "token_id:42"
    answer = ChatUpstream().read(parsed(), reply)
    assert (answer.choices[0].completion_ids, answer.no_ids_because) == ([42], "")


def test_ids_and_log_probabilities_that_do_not_fit_are_not_used() -> None:
    reply = vllm_reply()
    reply["choices"][1]["token_ids"] = [12, 13, 14]
    answer = ChatUpstream().read(parsed(n=2), reply)
    assert (answer.choices[1].completion_ids, answer.choices[1].logprobs) == ([], [])
    assert "3 token ids and 2 log-probabilities" in answer.no_ids_because


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"choices": []},
        {"choices": {}},
        {"choices": [1]},
        {"choices": [{"index": 0}]},
        {"choices": [{"message": "Hi"}]},
        {"error": {"message": "No", "code": "x"}},
        {"error": "No"},
        [],
    ],
)
def test_a_reply_that_is_none_is_a_bad_gateway(reply: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        ChatUpstream().read(parsed(), reply)
    assert caught.value.status == 502


@settings(max_examples=300, deadline=None)
@given(place=st.sampled_from(places(vllm_reply())[1:]), value=JSON, streamed=st.booleans())
def test_any_reply_is_an_answer_or_an_error(place: tuple[Any, ...], value: Any, streamed: bool) -> None:
    reply = vllm_reply()
    holder: Any = reply
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    data = json.dumps(reply).encode().replace(b'"message":', b'"delta":')
    for request in (parsed(n=2), foreign(logprobs=True)):
        reader = ChatUpstream().reader(request)
        reader.feed("", data)
        answer = reader.answer() if streamed else read_or_none(request, reply)
        for choice in answer.choices if answer else ():
            assert len(choice.completion_ids) == len(choice.logprobs) or answer.no_ids_because


def read_or_none(request: CallRequest, reply: dict[str, Any]) -> Answer | None:
    """None when the reply is refused."""
    try:
        return ChatUpstream().read(request, reply)
    except RequestRefused:
        return None


def chunk(*choices: dict[str, Any], **fields: Any) -> bytes:
    shared = {"id": "chatcmpl-9", "object": "chat.completion.chunk", "created": 5, "model": "qwen"}
    return orjson.dumps(shared | {"choices": list(choices)} | fields)


def delta(index: int, finish: str | None = None, ids: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
    part: dict[str, Any] = {"index": index, "delta": fields, "logprobs": None, "finish_reason": finish}
    if ids:
        part["token_ids"] = list(ids)
        part["logprobs"] = {"content": [{"token": "t", "logprob": -i / 10, "top_logprobs": []} for i in ids]}
    return part


def call_delta(index: int, arguments: str, call_id: str = "", name: str = "") -> list[dict[str, Any]]:
    call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name:
        call |= {"id": call_id, "type": "function"}
        call["function"]["name"] = name
    return [call]


VLLM_STREAM = [
    chunk(
        delta(0, role="assistant", content=""),
        delta(1, role="assistant", content=""),
        prompt_token_ids=[1, 2],
    ),
    chunk(delta(1, ids=[21], reasoning="hm")),
    chunk(delta(0, ids=[11], content="Hel")),
    chunk(delta(1, ids=[22], tool_calls=call_delta(0, "", "c1", "weather"))),
    chunk(delta(0, ids=[12, 13], content="lo")),
    chunk(delta(1, ids=[23], tool_calls=call_delta(0, '{"city":'))),
    chunk(delta(1, ids=[24], tool_calls=call_delta(1, '{"city":"Ulm"}', "c2", "weather"))),
    chunk(delta(1, ids=[25], tool_calls=call_delta(0, '"Bern"}'))),
    chunk(delta(0, "stop", ids=[14], content="")),
    chunk(delta(1, "tool_calls", content="")),
    chunk(usage={"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}),
    b"[DONE]",
]


def read(request: CallRequest, events: Sequence[bytes]) -> tuple[ChatReader, list[Piece]]:
    reader = ChatUpstream().reader(request)
    assert isinstance(reader, ChatReader)
    return reader, [piece for data in events for piece in reader.feed("", data)]


def test_interleaved_choices_of_a_stream_are_put_together() -> None:
    reader, _ = read(parsed(n=2, stream=True), VLLM_STREAM)
    assert reader.complete
    answer = reader.answer()
    first, second = answer.choices
    assert (answer.id, answer.model, answer.created) == ("chatcmpl-9", "qwen", 5)
    assert (first.text, first.finish_reason) == ("Hello", FinishReason.STOP)
    assert (first.prompt_ids, first.completion_ids) == ([1, 2], [11, 12, 13, 14])
    assert first.logprobs == [-1.1, -1.2, -1.3, -1.4]
    assert (second.reasoning, second.text) == ("hm", "")
    assert second.tool_calls == [
        WireToolCall(id="c1", name="weather", arguments='{"city":"Bern"}'),
        WireToolCall(id="c2", name="weather", arguments='{"city":"Ulm"}'),
    ]
    assert len(second.completion_ids) == len(second.logprobs) == 5
    assert answer.usage == {"prompt_tokens": 2, "completion_tokens": 9, "cached_tokens": 0}
    assert answer.no_ids_because == ""


def test_a_client_of_the_same_protocol_gets_the_stream_without_what_it_did_not_ask_for() -> None:
    _, pieces = read(parsed(n=2, stream=True), VLLM_STREAM)
    sent = b"".join(piece.raw or b"" for piece in pieces)
    assert b"token_ids" not in sent
    assert b'"logprob"' not in sent
    assert b"usage" not in sent
    assert sent.endswith(b"data: [DONE]\n\n")
    assert len(pieces) == len(VLLM_STREAM) - 1


def test_a_client_that_asked_for_everything_gets_the_bytes_of_the_stream() -> None:
    request = parsed(
        n=2, stream=True, stream_options={"include_usage": True}, logprobs=True, return_token_ids=True
    )
    _, pieces = read(request, VLLM_STREAM)
    assert [piece.raw for piece in pieces] == [b"data: " + data + b"\n\n" for data in VLLM_STREAM]


def test_a_client_of_another_protocol_gets_pieces_that_add_up_to_the_answer() -> None:
    request = foreign(n=2, stream=True, logprobs=True)
    reader, pieces = read(request, VLLM_STREAM)
    answer = reader.answer()
    assert all(piece.raw is None for piece in pieces)
    for choice in answer.choices:
        mine = [piece for piece in pieces if piece.choice == choice.index]
        assert "".join(piece.text for piece in mine) == choice.text
        assert "".join(piece.reasoning for piece in mine) == choice.reasoning
        assert [token.logprob for piece in mine for token in piece.logprobs] == choice.logprobs
        for place, call in enumerate(choice.tool_calls):
            parts = [piece.tool_call for piece in mine if piece.tool_call and piece.tool_call.index == place]
            assert (parts[0].id, parts[0].name) == (call.id, call.name)
            assert all(not part.id and not part.name for part in parts[1:])
            assert "".join(part.arguments for part in parts) == call.arguments


async def test_what_a_reader_passes_on_is_read_by_the_sdk_like_the_original() -> None:
    _, pieces = read(foreign(n=2, stream=True), VLLM_STREAM)
    answer = read(parsed(n=2, stream=True), VLLM_STREAM)[0].answer()
    async with client_of(answer, pieces) as client, client.chat.completions.stream(**HELLO, n=2) as stream:
        async for _ in stream:
            pass
        completion = await stream.get_final_completion()
    assert completion.choices[0].message.content == "Hello"
    calls = completion.choices[1].message.tool_calls or []
    assert [call.function.arguments for call in calls] == ['{"city":"Bern"}', '{"city":"Ulm"}']


def events_of(stream: bytes) -> list[bytes]:
    """The data of the whole events in a stream that may be cut anywhere."""
    *whole, _ = stream.split(b"\n\n")
    return [event.removeprefix(b"data: ") for event in whole]


def test_a_stream_that_is_cut_anywhere_is_never_complete_and_keeps_what_came() -> None:
    stream = b"".join(b"data: " + data + b"\n\n" for data in VLLM_STREAM)
    last_finish = stream.index(b"\n\n", stream.index(b'"finish_reason":"tool_calls"')) + 2
    whole = read(parsed(n=2), VLLM_STREAM)[0].answer()
    for cut in range(0, len(stream), 7):
        reader, _ = read(parsed(n=2), events_of(stream[:cut]))
        assert reader.complete == (cut >= last_finish)
        for choice in reader.answer().choices:
            assert whole.choices[choice.index].text.startswith(choice.text)


def test_a_stream_without_done_is_complete_when_every_choice_has_finished() -> None:
    assert read(parsed(n=2), VLLM_STREAM[:-2])[0].complete
    assert not read(parsed(n=2), VLLM_STREAM[:-3])[0].complete
    assert not read(parsed(n=2), [])[0].complete


@pytest.mark.parametrize(
    "broken",
    [b'{"error":{"message":"out of memory","code":500}}', b'{"choices":3}', b"{", b"[]", b'{"error":"x"}'],
)
def test_an_error_in_a_stream_is_kept_and_ends_it(broken: bytes) -> None:
    reader, pieces = read(parsed(n=2), [*VLLM_STREAM[:3], broken, *VLLM_STREAM[3:]])
    assert not reader.complete
    assert reader.error is not None
    assert reader.error.status >= 500
    assert len(pieces) == 3
    assert reader.answer().choices[0].text == "Hel"


def test_calls_are_told_apart_where_a_server_gives_no_index_or_the_same_one() -> None:
    for index in (None, 0):
        parts = [
            {"id": "a", "function": {"name": "f", "arguments": "{}"}},
            {"id": "b", "function": {"name": "g", "arguments": '{"x":'}},
            {"id": "b", "function": {"arguments": "1}"}},
        ]
        if index is not None:
            parts = [part | {"index": index} for part in parts]
        events = [chunk(delta(0, tool_calls=[part])) for part in parts]
        answer = read(parsed(), [*events, chunk(delta(0, "tool_calls"))])[0].answer()
        assert [(call.id, call.name, call.arguments) for call in answer.choices[0].tool_calls] == [
            ("a", "f", "{}"),
            ("b", "g", '{"x":1}'),
        ]


def test_a_call_without_an_id_has_the_same_in_the_stream_and_in_the_answer() -> None:
    part = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    reader, pieces = read(foreign(), [chunk(delta(0, "tool_calls", tool_calls=[part]))])
    call = pieces[0].tool_call
    assert call is not None
    assert call.id.startswith("call_")
    assert call.id == reader.answer().choices[0].tool_calls[0].id


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "Your input exceeds the context window of this model.",
        "the request exceeds the available context size (4096 tokens)",
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_context_overflow_has_one_code_whatever_the_engine(message: str, wrapped: bool) -> None:
    said = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    body = orjson.dumps({"error": said} if wrapped else {"object": "error"} | said)
    error = ChatUpstream().error_of(400, body, {})
    assert (error.status, error.code, error.kind) == (400, "context_length_exceeded", "BadRequestError")
    assert error.message == message


def test_an_upstream_error_keeps_status_code_type_param_and_retry_after() -> None:
    said = {"message": "Slow down", "type": "tokens", "param": "p", "code": "rate_limit_exceeded"}
    error = ChatUpstream().error_of(429, orjson.dumps({"error": said}), {"retry-AFTER": "7"})
    assert (error.status, error.code, error.kind, error.param) == (429, "rate_limit_exceeded", "tokens", "p")
    assert (error.message, error.retry_after) == ("Slow down", "7")


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (503, b"<html>busy</html>", "<html>busy</html>"),
        (500, b"", "500"),
        (500, b"\xff\xfe", "500"),
        (404, b'{"detail":"Not Found"}', "Not Found"),
        (422, b'{"detail":[{"loc":["n"]}]}', "loc"),
        (400, b'{"error":"bad"}', "bad"),
        (400, b"[1]", "[1]"),
        (302, b"moved", "302"),
    ],
)
def test_an_error_in_any_form_is_wrapped(status: int, body: bytes, expected: str) -> None:
    error = ChatUpstream().error_of(status, body, {})
    assert expected in error.message
    assert error.status == (502 if status == 302 else status)
    assert len(ChatUpstream().error_of(status, b"x" * 10**6, {}).message) < 3_000
