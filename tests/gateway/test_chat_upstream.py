"""A server of chat completions answers: what it is asked, what is read from its replies and streams."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from rllm.errors import RequestRefused
from rllm.gateway.dialects.chat import ChatDialect, ChatReader, ChatUpstream
from rllm.types.messages import FinishReason
from rllm.types.wire import (
    Answer,
    CallRequest,
    Dialect,
    Piece,
    ToolChoice,
    ToolMode,
    WireToolCall,
)

sys.path.insert(0, str(Path(__file__).parent))
from chat_client import EVERYTHING, HELLO, WEATHER, parsed
from dialect_server import DialectServer, any_json, places


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


def test_a_reply_that_is_none_is_a_bad_gateway(subtests: pytest.Subtests) -> None:
    for reply in [
        {},
        {"choices": []},
        {"choices": {}},
        {"choices": [1]},
        {"choices": [{"index": 0}]},
        {"choices": [{"message": "Hi"}]},
        {"error": {"message": "No", "code": "x"}},
        {"error": "No"},
        [],
    ]:
        with subtests.test(reply=reply):
            with pytest.raises(RequestRefused) as caught:
                ChatUpstream().read(parsed(), reply)
            assert caught.value.status == 502


@given(place=st.sampled_from(list(places(vllm_reply()))), value=any_json, streamed=st.booleans())
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
    with DialectServer(ChatDialect(), "/v1/chat/completions", answer.id) as server:
        server.answer, server.pieces = answer, pieces
        async with (
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client,
            client.chat.completions.stream(**HELLO, n=2) as stream,
        ):
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


def test_a_context_overflow_has_one_code_whatever_the_engine(subtests: pytest.Subtests) -> None:
    for message in [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "Your input exceeds the context window of this model.",
        "the request exceeds the available context size (4096 tokens)",
    ]:
        for wrapped in (True, False):
            with subtests.test(message=message, wrapped=wrapped):
                said = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
                body = orjson.dumps({"error": said} if wrapped else {"object": "error"} | said)
                error = ChatUpstream().error_of(400, body, {})
                assert (error.status, error.code, error.kind) == (
                    400,
                    "context_length_exceeded",
                    "BadRequestError",
                )
                assert error.message == message


def test_an_upstream_error_keeps_status_code_type_param_and_retry_after() -> None:
    said = {"message": "Slow down", "type": "tokens", "param": "p", "code": "rate_limit_exceeded"}
    error = ChatUpstream().error_of(429, orjson.dumps({"error": said}), {"retry-AFTER": "7"})
    assert (error.status, error.code, error.kind, error.param) == (429, "rate_limit_exceeded", "tokens", "p")
    assert (error.message, error.retry_after) == ("Slow down", "7")


def test_an_error_in_any_form_is_wrapped(subtests: pytest.Subtests) -> None:
    for status, body, expected in [
        (503, b"<html>busy</html>", "<html>busy</html>"),
        (500, b"", "500"),
        (500, b"\xff\xfe", "500"),
        (404, b'{"detail":"Not Found"}', "Not Found"),
        (422, b'{"detail":[{"loc":["n"]}]}', "loc"),
        (400, b'{"error":"bad"}', "bad"),
        (400, b"[1]", "[1]"),
        (302, b"moved", "302"),
    ]:
        with subtests.test(status=status, body=body, expected=expected):
            error = ChatUpstream().error_of(status, body, {})
            assert expected in error.message
            assert error.status == (502 if status == 302 else status)
            assert len(ChatUpstream().error_of(status, b"x" * 10**6, {}).message) < 3_000
