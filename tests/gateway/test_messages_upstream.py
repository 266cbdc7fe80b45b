"""A server of the Messages protocol answers: what it is asked, what is read from it."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from rllm.errors import RequestRefused
from rllm.gateway.dialects.chat import ChatDialect
from rllm.gateway.dialects.messages import MessagesDialect, MessagesUpstream
from rllm.types.messages import FinishReason
from rllm.types.wire import (
    Answer,
    CallRequest,
    Choice,
    Piece,
)

sys.path.insert(0, str(Path(__file__).parent))
from dialect_server import calls, events_of, pieces_of, stream_of
from messages_client import QUESTION, THINKING, WEB_SEARCH, parsed

streamed = partial(stream_of, MessagesDialect())


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
