"""The Messages protocol: what clients get is what Anthropic's own SDK reads."""

import copy
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from anthropic import (
    Anthropic,
    APIStatusError,
    AsyncAnthropic,
    AuthenticationError,
    BadRequestError,
    RateLimitError,
)
from anthropic.types import Message as AnthropicMessage
from hypothesis import example, given
from hypothesis import strategies as st

from rllm.errors import RequestRefused
from rllm.gateway.dialects.messages import MessagesDialect
from rllm.types.messages import FinishReason, Message
from rllm.types.wire import (
    Answer,
    Choice,
)

sys.path.insert(0, str(Path(__file__).parent))
from dialect_server import DialectServer, calls, events_of, json_values, pieces_of, stream_of, words
from messages_client import HELLO, QUESTION, THINKING, WEATHER, parsed

streamed = partial(stream_of, MessagesDialect())


@pytest.fixture(scope="module")
def running() -> Iterator[DialectServer]:
    with DialectServer(MessagesDialect(), "/v1/messages", "msg_1") as server:
        yield server


@pytest.fixture
def server(running: DialectServer) -> DialectServer:
    running.reset()
    return running


@pytest.fixture(scope="module")
def client(running: DialectServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=running.url, api_key="any", max_retries=0) as made:
        yield made


# ---- replies, read by the SDK ------------------------------------------------------------------------------


def test_the_sdk_reads_an_answer(server: DialectServer, client: Anthropic) -> None:
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


def test_where_all_was_cached_the_last_token_counts_as_read(server: DialectServer, client: Anthropic) -> None:
    server.says(Choice(text="yes"), usage={"prompt_tokens": 10, "completion_tokens": 1, "cached_tokens": 10})
    hi: Any = [{"role": "user", "content": "Hi"}]
    usage = client.messages.create(model="m", max_tokens=9, messages=hi).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (1, 9)


async def test_the_async_sdk_reads_answers_streams_and_counts(server: DialectServer) -> None:
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


def test_the_sdk_counts_tokens(server: DialectServer, client: Anthropic) -> None:
    count = client.messages.count_tokens(model="m", messages=[QUESTION], system="Be brief.")  # pyright: ignore
    assert count.input_tokens == len("Hi") + len("Be brief.")


def test_thoughts_are_shown_to_those_who_turned_them_on(server: DialectServer, client: Anthropic) -> None:
    server.says(Choice(text="Yes", reasoning="Hm. Well."))
    ask: dict[str, Any] = HELLO | THINKING
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
    server: DialectServer, client: Anthropic, choice: Choice, reason: str, sequence: str | None
) -> None:
    server.says(choice)
    message = client.messages.create(**HELLO)
    with client.messages.stream(**HELLO) as stream:
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


def test_an_empty_answer_still_has_a_text_block(server: DialectServer, client: Anthropic) -> None:
    server.says(Choice())
    assert client.messages.create(**HELLO).content[0].text == ""  # pyright: ignore
    with client.messages.stream(**HELLO) as stream:
        assert stream.get_final_message().content[0].text == ""  # pyright: ignore


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


def test_an_answer_that_is_already_known_is_streamed_whole(server: DialectServer, client: Anthropic) -> None:
    """As when a client tries again and gets the answer from the ledger."""
    choice = Choice(
        text="Yes", reasoning="Hm", tool_calls=calls('{"a": 1}'), finish_reason=FinishReason.TOOL_CALLS
    )
    ask: dict[str, Any] = HELLO | THINKING
    for pieces in ([], pieces_of(choice, 1)[:3]):
        server.says(choice, pieces=pieces)
        with client.messages.stream(**ask) as stream:
            assert stream.get_final_message().to_dict() == client.messages.create(**ask).to_dict()


def test_a_stream_that_fails_never_looks_complete(server: DialectServer, client: Anthropic) -> None:
    server.says(Choice(text="Hello", tool_calls=calls("{}")))
    server.fails = RequestRefused("The engine died.", status=503, kind="server_error", code="engine_failed")
    kinds: list[str] = []
    with pytest.raises(APIStatusError, match="The engine died"):
        kinds.extend(event.type for event in client.messages.create(**HELLO, stream=True))
    assert "message_stop" not in kinds
    assert kinds.count("content_block_start") == 1  # the text; half a call is never handed over


def test_errors_have_the_types_of_the_protocol(subtests: pytest.Subtests) -> None:
    for status, kind in [
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
    ]:
        with subtests.test(status=status, kind=kind):
            shown = MessagesDialect().error(RequestRefused("No.", status=status))
            assert shown == {"type": "error", "error": {"type": kind, "message": "No."}}


def test_the_sdk_raises_its_own_errors(server: DialectServer, client: Anthropic) -> None:
    for status, expected in ((400, BadRequestError), (401, AuthenticationError), (429, RateLimitError)):
        server.fails = RequestRefused("No.", status=status)
        with pytest.raises(expected, match="No"):
            client.messages.create(**HELLO)


def test_a_context_overflow_is_said_in_the_words_that_clients_look_for() -> None:
    shown = MessagesDialect().error(RequestRefused("9 of 8 tokens.", code="context_length_exceeded"))
    assert shown["error"]["message"].startswith("prompt is too long")
    assert shown["error"]["code"] == "context_length_exceeded"


# ---- what a client sends back ------------------------------------------------------------------------------

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


@given(any_choice(), st.integers(1, 50), st.booleans())
@example(Choice(tool_calls=calls('{"_raw": "x"}', "x", "[]")), 1, False)
def test_what_a_client_sends_back_is_the_message_that_it_got(
    running: DialectServer, client: Anthropic, choice: Choice, size: int, thinks: bool
) -> None:
    running.says(choice, pieces=pieces_of(choice, size))
    ask: dict[str, Any] = HELLO | (THINKING if thinks else {})
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
