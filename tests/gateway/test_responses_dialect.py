"""The Responses protocol: what clients send is understood, what they get is what OpenAI's own SDK reads."""

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI, RateLimitError
from openai.types.responses import Response
from pydantic import BaseModel

from rllm.errors import RequestRefused
from rllm.gateway.dialects.responses import ResponsesDialect, ResponsesUpstream
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
from rllm.types.messages import FinishReason, Message

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
FILES = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files",
    "tools": [
        {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "patch"},
    ],
}
WEB_SEARCH = {"type": "web_search"}


# ---- a server that answers what it is told -----------------------------------------------------------------


class ScriptedServer:
    """A server of one protocol, in a thread of its own."""

    def __init__(self) -> None:
        self.dialect = ResponsesDialect()
        self.answer = Answer(id="resp_1", model="m", created=1)
        self.pieces: list[Piece] = []
        self.fails: RequestRefused | None = None
        """Instead of an answer, or in the middle of a streamed one."""
        self.requests: list[CallRequest] = []
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def says(self, *choices: Choice, pieces: list[Piece] | None = None, **fields: Any) -> None:
        self.answer = Answer(id="resp_1", model="m", created=1, choices=list(choices), **fields)
        self.pieces = pieces if pieces is not None else [p for choice in choices for p in pieces_of(choice)]
        self.fails = None

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/responses", self._handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _handle(self, incoming: web.Request) -> web.StreamResponse:
        try:
            request = self.dialect.parse(orjson.loads(await incoming.read()))
            self.requests.append(request)
            if self.fails is not None and not request.stream:
                raise self.fails
        except RequestRefused as error:
            return web.json_response(self.dialect.error(error), status=error.status)
        if not request.stream:
            return web.Response(
                body=orjson.dumps(self.dialect.reply(request, self.answer)), content_type="application/json"
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(incoming)
        for part in streamed(request, self.answer, self.pieces, self.fails):
            await response.write(part)
        return response


def streamed(
    request: CallRequest, answer: Answer, pieces: list[Piece], fails: RequestRefused | None = None
) -> Iterator[bytes]:
    writer = ResponsesDialect().stream(request, answer.id, answer.model, answer.created)
    yield writer.begin()
    for piece in pieces:
        if sent := writer.piece(piece):
            yield sent
    yield writer.failed(fails) if fails is not None else writer.end(answer)


def pieces_of(choice: Choice, size: int = 3) -> list[Piece]:
    def cut(text: str) -> list[str]:
        return [text[start : start + size] for start in range(0, len(text), size)]

    pieces = [Piece(reasoning=part) for part in cut(choice.reasoning)]
    pieces += [Piece(text=part) for part in cut(choice.text)]
    for index, call in enumerate(choice.tool_calls):
        pieces.append(Piece(tool_call=ToolCallPiece(index=index, id=call.id, name=call.name)))
        pieces += [
            Piece(tool_call=ToolCallPiece(index=index, arguments=part)) for part in cut(call.arguments)
        ]
    return pieces


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    running.says(Choice(text="Hello"))
    running.requests.clear()
    return running


@pytest.fixture(scope="module")
def client(running: ScriptedServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=running.url, api_key="any", max_retries=0) as made:
        yield made


def parsed(**fields: Any) -> CallRequest:
    return ResponsesDialect().parse({"model": "m", "input": "Hi"} | fields)


def refusal(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        parsed(**fields)
    assert 400 <= caught.value.status < 500
    return caught.value


def calls(*arguments: str) -> list[WireToolCall]:
    return [
        WireToolCall(id=f"call_{place}", name="weather", arguments=text)
        for place, text in enumerate(arguments)
    ]


def events_of(parts: Iterator[bytes]) -> list[dict[str, Any]]:
    blocks = b"".join(parts).decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# ---- requests ----------------------------------------------------------------------------------------------


def test_text_and_instructions_become_a_conversation() -> None:
    request = parsed(instructions="Be brief.", input="Hi")
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert request.model == "m"


def test_items_become_messages_with_parallel_calls_in_one() -> None:
    request = parsed(
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
            {"role": "user", "content": "Weather in Rome and Oslo?"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "no json"},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {
                "type": "function_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "snow"}],
            },
        ]
    )
    assert request.messages == [
        {"role": "system", "content": "Rules"},
        {"role": "user", "content": "Weather in Rome and Oslo?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
                },
                {"id": "b", "type": "function", "function": {"name": "weather", "arguments": "no json"}},
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
        {"role": "tool", "content": "snow", "tool_call_id": "b"},
    ]


def test_two_answers_in_a_row_stay_two() -> None:
    request = parsed(
        input=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "One"},
            {"role": "assistant", "content": "Two"},
        ]
    )
    assert [message["content"] for message in request.messages] == ["Hi", "One", "Two"]


def test_a_thought_in_plain_text_stays_with_its_answer() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    request = parsed(
        input=[{"role": "user", "content": "Hi"}, thought, {"role": "assistant", "content": "Yes"}]
    )
    assert request.messages[1] == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}


def test_images_stay_parts_in_the_chat_form() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}
    text = {"type": "input_text", "text": "What is this?"}
    request = parsed(input=[{"role": "user", "content": [text, image]}])
    assert request.messages[0]["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
    ]


def test_items_of_hosted_tools_keep_their_type_so_that_an_engine_can_refuse_them() -> None:
    item = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    request = parsed(input=[{"role": "user", "content": "Hi"}, item])
    assert request.messages[1] == {"role": "assistant", "content": [item]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": ["message"], "role": "user"}]}, "input[0].type"),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"conversation": "conv_0"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_kept_conversations_are_refused_with_what_to_do_instead() -> None:
    assert "previous_response_id" in refusal(conversation="conv_0").message
    assert parsed(previous_response_id="resp_0").previous_response_id == "resp_0"
    assert parsed(store=True, previous_response_id=None, background=False).messages


def test_sampling_and_formats_are_read() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    request = parsed(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=99,
        stream=True,
        parallel_tool_calls=False,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        metadata={"a": "b"},
        reasoning={"effort": "low"},
        something_new={"x": 1},
    )
    assert (request.temperature, request.top_p, request.max_tokens) == (0.5, 0.9, 99)
    assert (request.stream, request.parallel_tool_calls) == (True, False)
    assert (request.logprobs, request.top_logprobs) == (True, 2)
    assert request.response_schema == schema
    assert parsed(text={"format": {"type": "json_object"}}).response_schema == {"type": "object"}
    assert parsed(text={"format": {"type": "text"}, "verbosity": "low"}).response_schema is None


def test_functions_are_offered_and_hosted_tools_are_not() -> None:
    request = parsed(tools=[WEATHER, WEB_SEARCH, FILES, {"type": "custom", "name": "free"}])
    assert [tool["function"]["name"] for tool in request.tools] == ["weather", "mcp__files__read"]
    assert request.tools[0] == {
        "type": "function",
        "function": {key: WEATHER[key] for key in ("name", "description", "parameters", "strict")},
    }


def test_two_tools_that_the_model_could_not_tell_apart_are_refused() -> None:
    plain = {"type": "function", "name": "mcp__files__read", "parameters": {}}
    assert "another tool" in refusal(tools=[FILES, plain]).message
    assert "another tool" in refusal(tools=[plain, FILES]).message


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(mode=ToolMode.NONE)),
        ("required", ToolChoice(mode=ToolMode.REQUIRED)),
        ({"type": "function", "name": "weather"}, ToolChoice(mode=ToolMode.NAMED, name="weather")),
        (
            {"type": "function", "name": "read", "namespace": "mcp__files"},
            ToolChoice(mode=ToolMode.NAMED, name="mcp__files__read"),
        ),
    ],
)
def test_tool_choices(value: object, expected: ToolChoice) -> None:
    assert parsed(tools=[WEATHER, FILES], tool_choice=value).tool_choice == expected


def test_allowed_tools_leave_only_those() -> None:
    allowed = {"type": "function", "name": "weather"}
    request = parsed(
        tools=[WEATHER, FILES],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [allowed, WEB_SEARCH]},
    )
    assert request.tool_choice == ToolChoice(mode=ToolMode.REQUIRED)
    assert [tool["function"]["name"] for tool in request.tools] == ["weather"]


def test_what_codex_sends_is_understood() -> None:
    body = {
        "model": "m",
        "instructions": "You are a coding agent.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "<permissions>"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}]},
            {
                "type": "function_call",
                "name": "read",
                "namespace": "mcp__files",
                "arguments": "{}",
                "call_id": "c1",
            },
            {"type": "function_call_output", "call_id": "c1", "output": "text"},
        ],
        "tools": [WEATHER | {"strict": False}, FILES, WEB_SEARCH],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x": "y"},
    }
    request = ResponsesDialect().parse(body)
    assert [message["role"] for message in request.messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert request.messages[3]["tool_calls"][0]["function"]["name"] == "mcp__files__read"
    assert not request.logprobs


# ---- replies, read by the SDK ------------------------------------------------------------------------------


def test_the_sdk_reads_an_answer(server: ScriptedServer, client: OpenAI) -> None:
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


async def test_the_async_sdk_reads_an_answer_and_a_stream(server: ScriptedServer) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0) as client:
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


def test_a_cut_answer_is_incomplete(server: ScriptedServer, client: OpenAI) -> None:
    server.says(Choice(text="Hel", finish_reason=FinishReason.LENGTH))
    response = client.responses.create(model="m", input="Hi", max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    with client.responses.create(model="m", input="Hi", stream=True) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "Hel"


def test_parallel_calls_come_back_with_their_ids(server: ScriptedServer, client: OpenAI) -> None:
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
    server: ScriptedServer, client: OpenAI
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


def test_log_probabilities_stream_with_the_text(server: ScriptedServer, client: OpenAI) -> None:
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


def test_a_stream_that_fails_never_looks_complete(server: ScriptedServer, client: OpenAI) -> None:
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


def test_errors_have_the_shape_that_the_sdk_reads(server: ScriptedServer, client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="m", input="Hi", conversation="conv_0")
    assert caught.value.param == "conversation"
    assert caught.value.code == "unsupported_parameter"
    server.fails = RequestRefused("Later.", status=429, kind="rate_limit_error", code="busy")
    with pytest.raises(RateLimitError) as limited:
        client.responses.create(model="m", input="Hi")
    assert limited.value.code == "busy"
    assert isinstance(limited.value, APIError)


def test_the_sdk_parses_structured_answers(server: ScriptedServer, client: OpenAI) -> None:
    class City(BaseModel):
        name: str

    server.says(Choice(text='{"name": "Rome"}'))
    parsed_answer = client.responses.parse(model="m", input="Hi", text_format=City)
    assert parsed_answer.output_parsed == City(name="Rome")
    assert server.requests[0].response_schema is not None
    with client.responses.stream(model="m", input="Hi", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Rome")


# ---- what a client sends back ------------------------------------------------------------------------------

words = st.text(st.characters(codec="utf-8"), max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
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


@settings(max_examples=40, deadline=None)
@given(any_choice(), st.integers(1, 50))
def test_what_a_client_sends_back_is_the_message_that_it_got(
    running: ScriptedServer, client: OpenAI, choice: Choice, size: int
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


# ---- any JSON ----------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "model": "m",
    "instructions": "Rules",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]},
        {
            "type": "function_call",
            "call_id": "a",
            "name": "read",
            "namespace": "mcp__files",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "web_search_call", "id": "ws"},
    ],
    "tools": [WEATHER, FILES, WEB_SEARCH],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    },
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
    "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "temperature": 1,
    "stop": ["x"],
    "stream": False,
}
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


def answers_or_refuses(body: dict[str, Any]) -> None:
    refused: RequestRefused | None = None
    try:
        request = ResponsesDialect().parse(body)
    except RequestRefused as error:
        refused = error
    if refused is not None:
        assert 400 <= refused.status < 500
        orjson.dumps(ResponsesDialect().error(refused))
        return
    choice = Choice(text="Hi", tool_calls=calls("{}"))
    answer = Answer(id="resp_1", model="m", created=1, choices=[choice])
    ResponsesDialect().reply(request, answer)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(GOOD)) | st.text(max_size=5), any_json, max_size=5))
def test_any_body_is_understood_or_refused(body: dict[str, Any]) -> None:
    answers_or_refuses(body)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_good_body_with_one_thing_changed_is_understood_or_refused(data: st.DataObject) -> None:
    body = copy.deepcopy(GOOD)
    *path, last = data.draw(st.sampled_from(sorted(places(GOOD), key=repr)))
    holder: Any = body
    for key in path:
        holder = holder[key]
    if isinstance(holder, dict) and data.draw(st.booleans()):
        del holder[last]
    else:
        holder[last] = data.draw(any_json | st.sampled_from([{}, [], "", [[]], [{}], {"type": []}]))
    answers_or_refuses(body)


# ---- an upstream of the same protocol ----------------------------------------------------------------------


def upstream_reply(choice: Choice, **fields: Any) -> dict[str, Any]:
    answer = Answer(id="resp_up", model="big", created=7, choices=[choice], usage={"prompt_tokens": 5})
    return ResponsesDialect().reply(parsed(), answer) | fields


def test_an_upstream_gets_the_body_as_it_was_sent() -> None:
    request = parsed(tools=[WEB_SEARCH], something_new=[1], temperature=0.5)
    assert ResponsesUpstream().body(request, capture=frozenset({"token_ids"})) == request.body
    request.model, request.temperature, request.max_tokens = "other", 1.0, 5
    changed = ResponsesUpstream().body(request, capture=frozenset())
    assert (changed["model"], changed["temperature"], changed["max_output_tokens"]) == ("other", 1.0, 5)
    assert request.body["model"] == "m"


def test_an_upstream_of_this_protocol_answers_only_clients_of_it() -> None:
    with pytest.raises(RequestRefused, match="v1/responses only"):
        ResponsesUpstream().body(CallRequest(dialect=Dialect.CHAT, body={}), capture=frozenset())


def test_an_upstreams_reply_goes_through_and_is_understood() -> None:
    choice = Choice(text="Yes", reasoning="Hm", tool_calls=calls('{"a": 1}'))
    reply = upstream_reply(choice)
    answer = ResponsesUpstream().read(parsed(), reply)
    heard = answer.choices[0]
    assert heard.message() == choice.message()
    assert heard.reasoning == "Hm"
    assert heard.finish_reason is FinishReason.TOOL_CALLS
    assert answer.usage["prompt_tokens"] == 5
    assert "return_token_ids" in answer.no_ids_because
    assert ResponsesDialect().reply(parsed(), answer) is reply


def test_an_upstreams_failed_response_is_an_error() -> None:
    reply = upstream_reply(Choice(), status="failed", error={"code": "server_error", "message": "Oh."})
    with pytest.raises(RequestRefused, match="Oh") as caught:
        ResponsesUpstream().read(parsed(), reply)
    assert caught.value.status == 502
    with pytest.raises(RequestRefused) as broken:
        ResponsesUpstream().read(parsed(), {"object": "response"})
    assert broken.value.status == 502


def test_an_upstreams_events_go_through_unchanged() -> None:
    choice = Choice(text="Yes 🎈", reasoning="Hm", tool_calls=calls('{"a": 1}'))
    answer = Answer(id="resp_up", model="big", created=7, choices=[choice])
    sent = b"".join(streamed(parsed(stream=True), answer, pieces_of(choice)))
    reader = ResponsesUpstream().reader(parsed(stream=True))
    passed = b""
    for block in sent.split(b"\n\n")[:-1]:
        assert not reader.complete
        name, _, data = block.partition(b"\n")
        for piece in reader.feed(name.removeprefix(b"event: ").decode(), data.removeprefix(b"data: ")):
            assert piece.raw is not None
            passed += piece.raw
    assert reader.complete
    assert passed == sent
    assert reader.answer().id == "resp_up"
    assert reader.answer().choices[0].message() == choice.message()


def test_an_upstream_that_drops_or_fails_on_the_way_is_not_complete() -> None:
    choice = Choice(text="Yes and more")
    answer = Answer(id="resp_up", model="big", created=7, choices=[choice])
    events = events_of(streamed(parsed(stream=True), answer, pieces_of(choice)))
    reader = ResponsesUpstream().reader(parsed(stream=True))
    for event in events[:6]:
        reader.feed(event["type"], orjson.dumps(event))
    assert not reader.complete
    assert reader.answer().choices[0].text == "Yes an"
    assert reader.feed("error", b'{"type":"error","code":"server_error","message":"Oh."}') == []
    assert reader.error is not None
    assert not reader.complete
