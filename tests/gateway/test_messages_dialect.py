"""The Messages protocol: what clients send is understood, what they get is what Anthropic's own SDK reads."""

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from aiohttp import web
from anthropic import (
    Anthropic,
    APIStatusError,
    AsyncAnthropic,
    AuthenticationError,
    BadRequestError,
    RateLimitError,
)
from anthropic.types import Message as AnthropicMessage
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rllm.errors import RequestRefused
from rllm.gateway.dialects.chat import ChatDialect
from rllm.gateway.dialects.messages import MessagesDialect, MessagesUpstream
from rllm.gateway.dialects.tool_input import arguments_of, tool_input
from rllm.gateway.server.bodies import json_object
from rllm.gateway.wire import (
    Answer,
    CallRequest,
    Choice,
    Dialect,
    Piece,
    ToolCallPiece,
    ToolChoice,
    ToolMode,
    WireToolCall,
)
from rllm.types.messages import FinishReason, Message

WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
QUESTION = {"role": "user", "content": "Hi"}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


# ---- a server that answers what it is told -----------------------------------------------------------------


class ScriptedServer:
    """A server of one protocol, in a thread of its own."""

    def __init__(self) -> None:
        self.dialect = MessagesDialect()
        self.answer = Answer(id="msg_1", model="m", created=1)
        self.pieces: list[Piece] = []
        self.fails: RequestRefused | None = None
        """Instead of an answer, or in the middle of a streamed one."""
        self.requests: list[CallRequest] = []
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def says(self, *choices: Choice, pieces: list[Piece] | None = None, **fields: Any) -> None:
        self.answer = Answer(id="msg_1", model="m", created=1, choices=list(choices), **fields)
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
        app.router.add_post("/v1/messages", self._handle)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _count(self, incoming: web.Request) -> web.Response:
        request = self.dialect.parse_count(orjson.loads(await incoming.read()))
        return web.json_response({"input_tokens": sum(len(str(m["content"])) for m in request.messages)})

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
    writer = MessagesDialect().stream(request, answer.id, answer.model, answer.created)
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
def client(running: ScriptedServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=running.url, api_key="any", max_retries=0) as made:
        yield made


ASKING: dict[str, Any] = {"model": "m", "max_tokens": 64, "messages": [QUESTION]}


def parsed(**fields: Any) -> CallRequest:
    return MessagesDialect().parse(ASKING | fields)


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


def test_system_text_and_blocks_become_one_system_message() -> None:
    assert parsed(system="Be brief.").messages[0] == {"role": "system", "content": "Be brief."}
    blocks = [
        {"type": "text", "text": "One"},
        {"type": "text", "text": "Two", "cache_control": {"type": "ephemeral"}},
    ]
    assert parsed(system=blocks).messages == [{"role": "system", "content": "One\nTwo"}, QUESTION]
    assert parsed(system="").messages == parsed(system=[]).messages == [QUESTION]


def test_the_line_that_claude_code_changes_at_every_request_is_not_said_to_the_model() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.197; cch=eb6c6;"
    prompt = {"type": "text", "text": "You are an agent."}
    assert parsed(system=[{"type": "text", "text": line}, prompt]).messages[0]["content"] == prompt["text"]
    assert parsed(system=f"{line}\nYou are an agent.").messages[0]["content"] == prompt["text"]


def test_blocks_become_messages_in_their_order() -> None:
    request = parsed(
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "Weather in"}, {"type": "text", "text": "Rome?"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "AAAA"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                    {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "b",
                        "content": [{"type": "text", "text": "no city"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
            {"role": "system", "content": "The date is known."},
            {"role": "user", "content": "And?"},
        ]
    )
    assert request.messages == [
        {"role": "user", "content": "Weather in\nRome?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
                },
                {"id": "b", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
        {"role": "tool", "content": "Error: no city", "tool_call_id": "b"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "The date is known."},
        {"role": "user", "content": "And?"},
    ]


def test_text_before_a_tool_result_stays_before_it() -> None:
    content = [
        {"type": "text", "text": "Note"},
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "text", "text": "More"},
    ]
    assert parsed(messages=[{"role": "user", "content": content}]).messages == [
        {"role": "user", "content": "Note"},
        {"role": "tool", "content": "", "tool_call_id": "a"},
        {"role": "user", "content": "More"},
    ]


def test_images_and_documents_stay_parts() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    document = {"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}}
    request = parsed(
        messages=[{"role": "user", "content": [{"type": "text", "text": "See"}, image, document]}]
    )
    assert request.messages[0]["content"] == [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        document,
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [QUESTION, {"role": "assistant", "content": "The answer is ("}]}, "messages[1].role"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}],
                    },
                    QUESTION,
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"system": 7}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stream": 1}, "stream"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "must"}}, "tool_choice.type"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_sampling_is_read_and_what_belongs_to_the_provider_is_left_alone() -> None:
    request = parsed(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END"],
        stream=True,
        metadata={"user_id": "u"},
        context_management={"edits": []},
        betas=["x"],
        service_tier="auto",
        output_config={"effort": "high"},
        **THINKING,
    )
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 40)
    assert (request.max_tokens, request.stop, request.stream) == (64, ["END"], True)
    schema = {"type": "object"}
    asked = parsed(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert asked.response_schema == schema
    assert request.response_schema is None


def test_own_tools_are_offered_and_hosted_ones_are_not() -> None:
    request = parsed(tools=[WEATHER | {"type": "custom", "strict": True}, WEB_SEARCH])
    assert request.tools == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Weather of a city",
                "parameters": WEATHER["input_schema"],
                "strict": True,
            },
        }
    ]


@pytest.mark.parametrize(
    ("value", "expected", "parallel"),
    [
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "none"}, ToolChoice(mode=ToolMode.NONE), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(mode=ToolMode.REQUIRED), False),
        ({"type": "tool", "name": "weather"}, ToolChoice(mode=ToolMode.NAMED, name="weather"), True),
    ],
)
def test_tool_choices(value: object, expected: ToolChoice, parallel: bool) -> None:
    request = parsed(tools=[WEATHER], tool_choice=value)
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, parallel)


def test_counting_needs_no_limit_and_may_end_with_the_assistant() -> None:
    body = {
        "model": "m",
        "messages": [QUESTION, {"role": "assistant", "content": "Hello"}],
        "tools": [WEATHER],
    }
    request = MessagesDialect().parse_count(body)
    assert [message["role"] for message in request.messages] == ["user", "assistant"]
    assert len(request.tools) == 1


# ---- replies, read by the SDK ------------------------------------------------------------------------------


def test_the_sdk_reads_an_answer(server: ScriptedServer, client: Anthropic) -> None:
    server.says(
        Choice(text="Grüße 🎈"), usage={"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 8}
    )
    message = client.messages.create(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}], extra_body={"temperature": 0.5}
    )
    assert server.requests[0].temperature == 0.5
    assert (message.id, message.model, message.role) == ("msg_1", "m", "assistant")
    assert [(block.type, getattr(block, "text", None)) for block in message.content] == [("text", "Grüße 🎈")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (2, 8)
    assert message.usage.output_tokens == 4


def test_where_all_was_cached_the_last_token_counts_as_read(
    server: ScriptedServer, client: Anthropic
) -> None:
    server.says(Choice(text="yes"), usage={"prompt_tokens": 10, "completion_tokens": 1, "cached_tokens": 10})
    hi: Any = [{"role": "user", "content": "Hi"}]
    usage = client.messages.create(model="m", max_tokens=9, messages=hi).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (1, 9)


async def test_the_async_sdk_reads_answers_streams_and_counts(server: ScriptedServer) -> None:
    server.says(
        Choice(text="Hello there", reasoning="Hm."), usage={"prompt_tokens": 5, "completion_tokens": 7}
    )
    async with AsyncAnthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [QUESTION]}
        message = await client.messages.create(**ask)
        assert message.content[0].type == "text"  # thoughts only for those who asked for them
        async with client.messages.stream(**ask) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert await client.messages.count_tokens(model="m", messages=[QUESTION]) is not None  # pyright: ignore
    assert "".join(texts) == "Hello there"
    assert len(texts) == 4
    assert (final.usage.input_tokens, final.usage.output_tokens) == (5, 7)


def test_the_sdk_counts_tokens(server: ScriptedServer, client: Anthropic) -> None:
    count = client.messages.count_tokens(model="m", messages=[QUESTION], system="Be brief.")  # pyright: ignore
    assert count.input_tokens == len("Hi") + len("Be brief.")


def test_thoughts_are_shown_to_those_who_turned_them_on(server: ScriptedServer, client: Anthropic) -> None:
    server.says(Choice(text="Yes", reasoning="Hm. Well."))
    ask: dict[str, Any] = ASKING | THINKING
    message = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    for each in (message, final):
        first, second = each.content
        assert first.type == "thinking"
        assert (first.thinking, bool(first.signature)) == ("Hm. Well.", True)
        assert second.type == "text"


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        (Choice(text="a"), "end_turn", None),
        (Choice(text="a", finish_reason=FinishReason.LENGTH), "max_tokens", None),
        (Choice(text="a", stop_sequence="END"), "stop_sequence", "END"),
        (Choice(tool_calls=calls("{}"), finish_reason=FinishReason.TOOL_CALLS), "tool_use", None),
    ],
)
def test_stop_reasons(
    server: ScriptedServer, client: Anthropic, choice: Choice, reason: str, sequence: str | None
) -> None:
    server.says(choice)
    message = client.messages.create(**ASKING)
    with client.messages.stream(**ASKING) as stream:
        final = stream.get_final_message()
    for each in (message, final):
        assert (each.stop_reason, each.stop_sequence) == (reason, sequence)


def test_every_field_is_of_the_type_that_the_sdk_declares() -> None:
    choice = Choice(text="Hi", reasoning="Hm", tool_calls=calls('{"a": [1]}', "no json"))
    answer = Answer(id="msg_1", model="m", created=1, choices=[choice])
    request = parsed(tools=[WEATHER], **THINKING)
    message = AnthropicMessage.model_validate(
        orjson.loads(orjson.dumps(MessagesDialect().reply(request, answer)))
    )
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]


def test_an_empty_answer_still_has_a_text_block(server: ScriptedServer, client: Anthropic) -> None:
    server.says(Choice())
    assert client.messages.create(**ASKING).content[0].text == ""  # pyright: ignore
    with client.messages.stream(**ASKING) as stream:
        assert stream.get_final_message().content[0].text == ""  # pyright: ignore


# ---- tool input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ("{}", {}),
        ("", {}),
        ("city = Rome", {"_raw": "city = Rome"}),
        ('{"city": ', {"_raw": '{"city": '}),
        ("[1, 2]", {"_raw": "[1, 2]"}),
        ("3", {"_raw": "3"}),
        ('{"_raw": "x"}', {"_raw": '{"_raw": "x"}'}),
        ('{"a": NaN}', {"_raw": '{"a": NaN}'}),
        ('{"a": 1e999}', {"_raw": '{"a": 1e999}'}),
        ('{"a": 123456789012345678901234}', {"_raw": '{"a": 123456789012345678901234}'}),
        ('{"a": 18446744073709551615}', {"a": 18446744073709551615}),
        ('{"a": "\\ud800"}', {"_raw": '{"a": "\\ud800"}'}),
    ],
)
def test_arguments_become_an_object_and_themselves_again(arguments: str, value: dict[str, Any]) -> None:
    assert tool_input(arguments) == value
    back = arguments_of(value)
    assert back == arguments or json.loads(back) == json.loads(arguments or "{}")


def test_arguments_too_deep_to_be_sent_travel_as_text() -> None:
    for depth in (10, *range(180, 260)):
        arguments = '{"a":' * depth + "1" + "}" * depth
        choice = Choice(tool_calls=calls(arguments))
        reply = MessagesDialect().reply(parsed(), Answer(id="a", model="m", created=1, choices=[choice]))
        back = orjson.loads(orjson.dumps(reply))["content"]
        json_object(
            orjson.dumps({"messages": [{"content": back}]})
        )  # the gateway takes it when it comes back
        echoed = parsed(messages=[QUESTION, {"role": "assistant", "content": back}, QUESTION])
        assert echoed.messages[1] == choice.message()


# ---- streams -----------------------------------------------------------------------------------------------


def test_events_come_in_the_order_of_the_protocol() -> None:
    choice = Choice(text="Yes", reasoning="Hm", tool_calls=calls("{}", "{}"))
    answer = Answer(id="msg_1", model="m", created=1, choices=[choice])
    events = events_of(streamed(parsed(tools=[WEATHER], **THINKING), answer, pieces_of(choice)))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        *thinking,
        *block,
        *block,
        *block,
        "message_delta",
        "message_stop",
    ]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [0, 1, 2, 3]


def test_calls_are_streamed_whole_and_pings_keep_the_connection_awake() -> None:
    choice = Choice(text="I look.", tool_calls=calls('{"text": "' + "long " * 100 + '"}'))
    writer = MessagesDialect().stream(parsed(), "msg_1", "m", 1)
    sent = b"".join(writer.piece(piece) for piece in pieces_of(choice))
    assert sent.count(b"event: ping") >= 5
    assert b"tool_use" not in sent


def test_an_answer_that_is_already_known_is_streamed_whole(server: ScriptedServer, client: Anthropic) -> None:
    """As when a client tries again and gets the answer from the ledger."""
    choice = Choice(
        text="Yes", reasoning="Hm", tool_calls=calls('{"a": 1}'), finish_reason=FinishReason.TOOL_CALLS
    )
    ask: dict[str, Any] = ASKING | THINKING
    for pieces in ([], pieces_of(choice, 1)[:3]):
        server.says(choice, pieces=pieces)
        with client.messages.stream(**ask) as stream:
            assert stream.get_final_message().to_dict() == client.messages.create(**ask).to_dict()


def test_a_stream_that_fails_never_looks_complete(server: ScriptedServer, client: Anthropic) -> None:
    server.says(Choice(text="Hello", tool_calls=calls("{}")))
    server.fails = RequestRefused("The engine died.", status=503, kind="server_error", code="engine_failed")
    kinds: list[str] = []
    with pytest.raises(APIStatusError, match="The engine died"):
        kinds.extend(event.type for event in client.messages.create(**ASKING, stream=True))
    assert "message_stop" not in kinds
    assert kinds.count("content_block_start") == 1  # the text; half a call is never handed over


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_errors_have_the_types_of_the_protocol(status: int, kind: str) -> None:
    shown = MessagesDialect().error(RequestRefused("No.", status=status))
    assert shown == {"type": "error", "error": {"type": kind, "message": "No."}}


def test_the_sdk_raises_its_own_errors(server: ScriptedServer, client: Anthropic) -> None:
    for status, expected in ((400, BadRequestError), (401, AuthenticationError), (429, RateLimitError)):
        server.fails = RequestRefused("No.", status=status)
        with pytest.raises(expected, match="No"):
            client.messages.create(**ASKING)


def test_a_context_overflow_is_said_in_the_words_that_clients_look_for() -> None:
    shown = MessagesDialect().error(RequestRefused("9 of 8 tokens.", code="context_length_exceeded"))
    assert shown["error"]["message"].startswith("prompt is too long")
    assert shown["error"]["code"] == "context_length_exceeded"


# ---- what a client sends back ------------------------------------------------------------------------------

words = st.text(st.characters(codec="utf-8"), max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(words | st.just("_raw"), json_values, max_size=3)
arguments_texts = objects.map(json.dumps) | words


@st.composite
def any_choice(draw: st.DrawFn) -> Choice:
    texts = draw(st.lists(arguments_texts, max_size=3))
    return Choice(text=draw(words), reasoning=draw(words), tool_calls=calls(*texts))


def said(message: Message) -> Message:
    """Without the thought, which is not part of the answer, and with arguments as what they mean."""
    kept = copy.deepcopy({key: value for key, value in message.items() if key != "reasoning_content"})
    for call in kept.get("tool_calls", ()):
        text = call["function"]["arguments"]
        try:
            call["function"]["arguments"] = json.loads(text or "{}")
        except json.JSONDecodeError:
            call["function"]["arguments"] = text
    return kept


@settings(max_examples=40, deadline=None)
@given(any_choice(), st.integers(1, 50), st.booleans())
@example(Choice(tool_calls=calls('{"_raw": "x"}', "x", "[]")), 1, False)
def test_what_a_client_sends_back_is_the_message_that_it_got(
    running: ScriptedServer, client: Anthropic, choice: Choice, size: int, thinks: bool
) -> None:
    running.says(choice, pieces=pieces_of(choice, size))
    ask: dict[str, Any] = ASKING | (THINKING if thinks else {})
    plain = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert final.to_dict() == plain.to_dict()
    for message in (plain, final):
        echo = {"role": "assistant", "content": [block.to_dict(mode="json") for block in message.content]}
        messages = parsed(messages=[QUESTION, echo, QUESTION]).messages
        assert len(messages) == 3
        assert said(messages[1]) == said(choice.message())
        assert messages[1].get("reasoning_content", "") == (choice.reasoning if thinks else "")


# ---- any JSON ----------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Rules"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "text", "text": "Yes"},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"_raw": "x"}},
                {"type": "server_tool_use", "id": "b", "name": "web_search", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
            ],
        },
        {"role": "system", "content": "More rules"},
    ],
    "tools": [WEATHER, WEB_SEARCH],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive"},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
    "temperature": 1,
    "top_k": 5,
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
    request = CallRequest(dialect=Dialect.MESSAGES, body={})
    try:
        request = MessagesDialect().parse(body)
    except RequestRefused as error:
        refused = error
    if refused is not None:
        assert 400 <= refused.status < 500
        orjson.dumps(MessagesDialect().error(refused))
        return
    choice = Choice(text="Hi", reasoning="Hm", tool_calls=calls("{}"))
    answer = Answer(id="msg_1", model="m", created=1, choices=[choice])
    orjson.dumps(MessagesDialect().reply(request, answer))


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


def test_a_tool_input_too_deep_to_be_written_is_refused() -> None:
    deep: Any = 1
    for _ in range(600):
        deep = {"a": deep}
    block = {"type": "tool_use", "id": "a", "name": "f", "input": deep}
    error = refusal(messages=[{"role": "assistant", "content": [block]}, QUESTION])
    assert error.param == "messages[0].content[0].input"


# ---- an upstream of this protocol --------------------------------------------------------------------------


def upstream_reply(choice: Choice, **fields: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 3}
    answer = Answer(id="msg_up", model="big", created=7, choices=[choice], usage=usage)
    return MessagesDialect().reply(parsed(**THINKING), answer) | fields


def from_chat(**fields: Any) -> CallRequest:
    return ChatDialect().parse({"model": "m", "messages": [QUESTION]} | fields)


def heard_events(request: CallRequest, sent: bytes) -> tuple[list[Piece], Answer]:
    reader = MessagesUpstream().reader(request)
    pieces: list[Piece] = []
    for block in sent.split(b"\n\n")[:-1]:
        assert not reader.complete
        name, _, data = block.partition(b"\n")
        pieces += reader.feed(name.removeprefix(b"event: ").decode(), data.removeprefix(b"data: "))
    assert reader.complete
    return pieces, reader.answer()


def test_an_upstream_gets_the_body_as_it_was_sent() -> None:
    request = parsed(tools=[WEB_SEARCH], something_new=[1], temperature=0.5)
    assert MessagesUpstream().body(request, capture=frozenset({"token_ids"})) == request.body
    request.model, request.max_tokens = "other", 5
    changed = MessagesUpstream().body(request, capture=frozenset())
    assert (changed["model"], changed["max_tokens"]) == ("other", 5)


def test_an_upstreams_reply_goes_through_and_is_understood() -> None:
    choice = Choice(text="Yes", reasoning="Hm", tool_calls=calls('{"a":1}', "{}"))
    choice.finish_reason = FinishReason.TOOL_CALLS
    reply = upstream_reply(choice)
    answer = MessagesUpstream().read(parsed(), reply)
    assert answer.choices[0].message() == choice.message()
    assert answer.choices[0].reasoning == "Hm"
    assert answer.choices[0].finish_reason is FinishReason.TOOL_CALLS
    assert answer.usage == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 3}
    assert "return_token_ids" in answer.no_ids_because
    assert MessagesDialect().reply(parsed(), answer) is reply
    assert answer.id == "msg_up"


def test_an_upstreams_events_go_through_unchanged() -> None:
    choice = Choice(text="Yes 🎈", reasoning="Hm", tool_calls=calls('{"a":1}'))
    answer = Answer(id="msg_up", model="big", created=7, choices=[choice])
    sent = b"".join(streamed(parsed(stream=True, **THINKING), answer, pieces_of(choice)))
    pieces, heard = heard_events(parsed(stream=True), sent)
    assert b"".join(piece.raw or b"" for piece in pieces) == sent
    assert heard.choices[0].message() == choice.message()
    assert heard.id == "msg_up"


def test_a_chat_client_is_answered_by_an_upstream_of_this_protocol() -> None:
    choice = Choice(text="Yes 🎈", reasoning="Hm", tool_calls=calls('{"a":1}', "{}"))
    request = from_chat(stream=True)
    answer = Answer(id="msg_up", model="big", created=7, choices=[choice])
    sent = b"".join(streamed(parsed(stream=True, **THINKING), answer, pieces_of(choice)))
    pieces, heard = heard_events(request, sent)
    assert all(piece.raw is None for piece in pieces)
    assert "".join(piece.text for piece in pieces) == "Yes 🎈"
    assert "".join(piece.reasoning for piece in pieces) == "Hm"
    parts = [piece.tool_call for piece in pieces if piece.tool_call is not None]
    assert "".join(part.arguments for part in parts if part.index == 0) == '{"a":1}'
    assert [(part.index, part.name) for part in parts if part.name] == [(0, "weather"), (1, "weather")]
    assert heard.id.startswith("chatcmpl-")
    assert heard.raw is None
    assert heard.choices[0].message() == choice.message()


def test_a_chat_request_is_translated() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    request = from_chat(
        messages=[
            {"role": "system", "content": "Rules"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "b"}]},
            {"role": "tool", "tool_call_id": "a", "content": "sunny"},
            {"role": "tool", "tool_call_id": "b", "content": "snow"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
                ],
            },
        ],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        stop="END",
        temperature=0.5,
    )
    body = MessagesUpstream().body(request, capture=frozenset({"logprobs"}))
    said_back = MessagesDialect().parse(body)  # our own reader understands it as the same conversation
    assert [message["role"] for message in said_back.messages] == [
        message["role"] for message in request.messages
    ]
    assert said_back.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"city":"Rome"}'
    assert said_back.messages[-1] == request.messages[-1]
    assert said_back.tool_choice == request.tool_choice
    assert said_back.parallel_tool_calls is False
    assert (said_back.stop, said_back.temperature) == (["END"], 0.5)
    assert said_back.max_tokens
    assert len(body["messages"]) == 3


@pytest.mark.parametrize("fields", [{"n": 2}, {"seed": 1}, {"logprobs": True}, {"presence_penalty": 1}])
def test_what_the_protocol_cannot_express_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as caught:
        MessagesUpstream().body(from_chat(**fields), capture=frozenset())
    assert caught.value.param == next(iter(fields))
    assert caught.value.status == 400


def test_an_upstreams_errors_keep_status_and_kind() -> None:
    body = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
    error = MessagesUpstream().error_of(529, body, {"Retry-After": "3"})
    assert (error.status, error.kind, error.message, error.retry_after) == (
        529,
        "overloaded_error",
        "Overloaded",
        "3",
    )
    assert MessagesUpstream().error_of(502, b"<html>", {}).status == 502


def test_an_upstream_that_drops_or_fails_on_the_way_is_not_complete() -> None:
    choice = Choice(text="Yes and more")
    answer = Answer(id="msg_up", model="big", created=7, choices=[choice])
    events = events_of(streamed(parsed(stream=True), answer, pieces_of(choice)))
    reader = MessagesUpstream().reader(parsed(stream=True))
    for event in events[:5]:
        reader.feed(event["type"], orjson.dumps(event))
    assert not reader.complete
    assert reader.answer().choices[0].text == "Yes an"
    said_error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    assert reader.feed("error", orjson.dumps(said_error)) == []
    assert reader.error is not None
    assert reader.error.status == 529
    assert not reader.complete
