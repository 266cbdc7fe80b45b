"""A server of the Responses protocol answers: what it is asked, what is read from it."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from rllm.errors import RequestRefused
from rllm.gateway.dialects.responses import ResponsesDialect, ResponsesUpstream
from rllm.types.messages import FinishReason
from rllm.types.wire import (
    Answer,
    CallRequest,
    Choice,
    Dialect,
)

sys.path.insert(0, str(Path(__file__).parent))
from dialect_server import calls, events_of, pieces_of, stream_of
from responses_client import WEB_SEARCH, parsed

streamed = partial(stream_of, ResponsesDialect())


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
