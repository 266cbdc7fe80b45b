"""Text completions: what clients send is understood, what they get is what OpenAI's own SDK reads."""

import asyncio
import copy
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI, OpenAI
from openai.types import Completion

from rllm.errors import RequestRefused
from rllm.gateway.dialects.completions import CompletionsDialect, CompletionsReader, CompletionsUpstream
from rllm.types.messages import FinishReason
from rllm.types.wire import Answer, CallRequest, Choice, Dialect, Piece, TokenLogprob

sys.path.insert(0, str(Path(__file__).parent))
from dialect_server import any_json, places

EVERYTHING = frozenset({"logprobs", "token_ids", "usage"})
ONCE = {"model": "m", "prompt": "Once"}


def parsed(**fields: Any) -> CallRequest:
    return CompletionsDialect().parse(ONCE | fields)


# ---- what clients send -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("Once", "Once"), ([1, 2], [1, 2]), (["Once"], "Once"), ([[1, 2]], [1, 2])],
)
def test_a_prompt_is_text_or_ids(prompt: Any, read: Any) -> None:
    request = parsed(prompt=prompt)
    assert request.prompt == read
    assert request.messages == []


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], ["a", [1]]])
def test_several_prompts_in_one_call_are_refused_with_what_to_do(prompt: Any) -> None:
    with pytest.raises(RequestRefused, match=r"list of 2; .*one prompt") as caught:
        parsed(prompt=prompt)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_a_bad_value_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for fields, param in [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
    ]:
        with subtests.test(fields=fields, param=param):
            with pytest.raises(RequestRefused) as caught:
                parsed(**fields)
            assert (caught.value.status, caught.value.param) == (400, param)


def test_what_changes_the_answer_is_kept_for_the_engine_to_decide() -> None:
    assert parsed(suffix="end", best_of=3, n=2).penalties == {"suffix": "end", "best_of": 3}
    assert parsed(suffix="", best_of=2, n=2, echo=True).penalties == {}
    assert parsed(echo=True, logprobs=0).penalties == {"echo": True}  # the prompt's log-probabilities


def test_log_probabilities_are_asked_for_by_a_number() -> None:
    assert (parsed().logprobs, parsed(logprobs=None).logprobs) == (False, False)
    assert (parsed(logprobs=0).logprobs, parsed(logprobs=0).top_logprobs) == (True, 0)
    assert (parsed(logprobs=3).logprobs, parsed(logprobs=3).top_logprobs) == (True, 3)


# ---- what clients get --------------------------------------------------------------------------------------


def answer_of(*choices: Choice) -> Answer:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0}
    return Answer(id="cmpl-1", model="m", created=1_700_000_000, choices=list(choices), usage=usage)


def logprob(text: str) -> TokenLogprob:
    return TokenLogprob(token_id=7, text=text, logprob=-0.5, top=[(8, "x", -0.2), (9, "x", -3.0)])


def test_a_reply_is_what_the_sdk_knows_as_a_completion() -> None:
    choice = Choice(
        text=" upon", token_logprobs=[logprob(" up"), logprob("on")], finish_reason=FinishReason.LENGTH
    )
    reply = CompletionsDialect().reply(parsed(logprobs=1), answer_of(choice))
    completion = Completion.model_validate(json.loads(orjson.dumps(reply)), strict=True)
    first = completion.choices[0]
    assert (first.text, first.finish_reason) == (" upon", "length")
    assert first.logprobs is not None
    assert first.logprobs.tokens == [" up", "on"]
    assert first.logprobs.token_logprobs == [-0.5, -0.5]
    assert first.logprobs.text_offset == [0, 3]
    assert first.logprobs.top_logprobs == [{"x": -0.2, " up": -0.5}, {"x": -0.2, "on": -0.5}]
    assert completion.usage is not None
    assert completion.usage.total_tokens == 3


def test_log_probabilities_and_ids_come_only_when_asked_for() -> None:
    choice = Choice(text="a", prompt_ids=[1], completion_ids=[2], token_logprobs=[logprob("a")])
    silent = CompletionsDialect().reply(parsed(), answer_of(choice))["choices"][0]
    assert silent == {"text": "a", "index": 0, "logprobs": None, "finish_reason": "stop"}
    asked = CompletionsDialect().reply(parsed(return_token_ids=True), answer_of(choice))["choices"][0]
    assert (asked["prompt_token_ids"], asked["token_ids"]) == ([1], [2])


@asynccontextmanager
async def served(
    answer: Answer, pieces: Sequence[Piece], error: RequestRefused | None = None
) -> AsyncIterator[str]:
    dialect = CompletionsDialect()

    async def respond(http: web.Request) -> web.StreamResponse:
        request = dialect.parse(await http.json())
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(http)
        writer = dialect.stream(request, answer.id, answer.model, answer.created)
        body = writer.begin() + b"".join(writer.piece(piece) for piece in pieces)
        await stream.write(body + (writer.end(answer) if error is None else writer.failed(error)))
        return stream

    app = web.Application()
    app.router.add_post("/v1/completions", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


async def chunks_of(
    answer: Answer, pieces: Sequence[Piece], error: RequestRefused | None = None, **fields: Any
) -> list[Completion]:
    async with served(answer, pieces, error) as url, AsyncOpenAI(base_url=url, api_key="any") as client:
        stream = await client.completions.create(**ONCE, stream=True, **fields)
        return [chunk async for chunk in stream]


async def test_the_sdk_reads_a_stream_with_two_choices_and_usage() -> None:
    answer = answer_of(
        Choice(index=0, text=" upon"), Choice(index=1, text=" more", finish_reason=FinishReason.LENGTH)
    )
    pieces = [Piece(text=" up"), Piece(choice=1, text=" mo"), Piece(text="on"), Piece(choice=1, text="re")]
    chunks = await chunks_of(answer, pieces, n=2, stream_options={"include_usage": True})
    assert {(chunk.id, chunk.object) for chunk in chunks} == {("cmpl-1", "text_completion")}
    for index, text, reason in ((0, " upon", "stop"), (1, " more", "length")):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(part.text for part in parts) == text
        assert [part.finish_reason for part in parts if part.finish_reason] == [reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_streamed_log_probabilities_know_where_their_tokens_start() -> None:
    pieces = [
        Piece(text=" up", logprobs=[logprob(" up")]),
        Piece(text="on a", logprobs=[logprob("on"), logprob(" a")]),
    ]
    answer = answer_of(Choice(text=" upon a"))
    chunks = await chunks_of(answer, pieces, logprobs=0)
    columns = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [column.text_offset for column in columns] == [[0], [3, 5]]
    silent = await chunks_of(answer, [*pieces, Piece(logprobs=[logprob("")])])
    assert all(chunk.choices[0].logprobs is None for chunk in silent)
    assert len(silent) == 3


async def test_a_stream_that_breaks_never_looks_like_a_clean_end() -> None:
    failure = RequestRefused("The engine is gone", status=502, kind="server_error")
    with pytest.raises(APIError, match="The engine is gone"):
        await chunks_of(answer_of(), [Piece(text=" up")], failure)


async def test_the_synchronous_sdk_reads_a_stream() -> None:
    def talk(url: str) -> str:
        with (
            OpenAI(base_url=url, api_key="any") as client,
            client.completions.create(**ONCE, stream=True) as chunks,
        ):
            return "".join(chunk.choices[0].text for chunk in chunks)

    async with served(answer_of(Choice(text=" upon")), [Piece(text=" upon")]) as url:
        assert await asyncio.to_thread(talk, url) == " upon"


# ---- upstreams ---------------------------------------------------------------------------------------------


def test_the_upstream_gets_the_body_as_it_was_sent_and_what_is_captured() -> None:
    body = ONCE | {"prompt": [1, 2], "suffix": "end", "odd": True, "stream": True}
    request = CompletionsDialect().parse(body)
    assert CompletionsUpstream().body(request, capture=frozenset()) == body
    assert CompletionsUpstream().body(request, capture=EVERYTHING) == body | {
        "logprobs": 1,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }


def test_log_probabilities_that_the_client_asks_for_are_left_as_they_are() -> None:
    assert CompletionsUpstream().body(parsed(logprobs=5), capture=EVERYTHING)["logprobs"] == 5


def test_messages_cannot_be_given_to_an_upstream_of_bare_prompts() -> None:
    request = CallRequest(dialect=Dialect.CHAT, body={}, messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(RequestRefused) as caught:
        CompletionsUpstream().body(request, capture=frozenset())
    assert caught.value.status == 400


def columns(tokens: Sequence[str], values: Sequence[float | None]) -> dict[str, Any]:
    top = [None if value is None else {token: value} for token, value in zip(tokens, values, strict=True)]
    return {"tokens": list(tokens), "token_logprobs": list(values), "top_logprobs": top, "text_offset": []}


def vllm_reply() -> dict[str, Any]:
    return {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 5,
        "model": "qwen",
        "choices": [
            {
                "index": 0,
                "text": " upon a",
                "logprobs": columns([" upon", " a"], [-0.1, -0.2]),
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": [3, 4],
                "prompt_logprobs": None,
                "prompt_token_ids": [1, 2],
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }


def test_a_reply_is_captured_and_only_what_was_asked_for_is_passed_on() -> None:
    answer = CompletionsUpstream().read(parsed(), vllm_reply())
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (" upon a", FinishReason.LENGTH)
    assert (choice.prompt_ids, choice.completion_ids, choice.logprobs) == ([1, 2], [3, 4], [-0.1, -0.2])
    assert answer.no_ids_because == ""
    expected = vllm_reply()
    del expected["choices"][0]["token_ids"], expected["choices"][0]["prompt_token_ids"]
    expected["choices"][0]["logprobs"] = None
    assert CompletionsDialect().reply(parsed(), answer) == expected
    asked = parsed(logprobs=1, return_token_ids=True)
    assert CompletionsUpstream().read(asked, vllm_reply()).raw == vllm_reply()


def test_the_log_probabilities_of_an_echoed_prompt_are_not_those_of_the_answer() -> None:
    reply = vllm_reply()
    reply["choices"][0]["text"] = "Once upon a"
    reply["choices"][0]["logprobs"] = columns(["On", "ce", " upon", " a"], [None, -9.0, -0.1, -0.2])
    choice = CompletionsUpstream().read(parsed(echo=True), reply).choices[0]
    assert (choice.completion_ids, choice.logprobs) == ([3, 4], [-0.1, -0.2])


@pytest.mark.parametrize("reply", [{}, [], {"choices": [{}]}, {"choices": [{"text": None}]}, {"error": "No"}])
def test_a_reply_that_is_none_is_a_bad_gateway(reply: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        CompletionsUpstream().read(parsed(), reply)
    assert caught.value.status == 502


@given(place=st.sampled_from(list(places(vllm_reply()))), value=any_json)
def test_any_reply_is_an_answer_or_an_error(place: tuple[Any, ...], value: Any) -> None:
    reply = copy.deepcopy(vllm_reply())
    holder: Any = reply
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    reader = CompletionsUpstream().reader(parsed(logprobs=1))
    reader.feed("", json.dumps(reply).encode())
    for answer in (reader.answer(), read_or_none(reply)):
        for choice in answer.choices if answer else ():
            assert len(choice.completion_ids) == len(choice.logprobs) or answer.no_ids_because


def read_or_none(reply: dict[str, Any]) -> Answer | None:
    """None when the reply is refused."""
    try:
        return CompletionsUpstream().read(parsed(logprobs=1), reply)
    except RequestRefused:
        return None


def chunk(*choices: dict[str, Any], **fields: Any) -> bytes:
    shared = {"id": "cmpl-9", "object": "text_completion", "created": 5, "model": "qwen"}
    return orjson.dumps(shared | {"choices": list(choices)} | fields)


def part(index: int, text: str, ids: list[int], finish: str | None = None, **fields: Any) -> dict[str, Any]:
    logprobs = columns(["t"] * len(ids), [-token / 10 for token in ids])
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish,
        "token_ids": ids,
    } | fields


VLLM_STREAM = [
    chunk(part(0, " up", [11], prompt_token_ids=[1, 2])),
    chunk(part(1, " a", [21], prompt_token_ids=[1, 2])),
    chunk(part(0, "on", [12, 13])),
    chunk(part(1, " time", [22], "length")),
    chunk(part(0, "", [14], "stop")),
    chunk(usage={"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}),
    b"[DONE]",
]


def read(request: CallRequest, events: Sequence[bytes]) -> tuple[CompletionsReader, list[bytes]]:
    reader = CompletionsUpstream().reader(request)
    assert isinstance(reader, CompletionsReader)
    return reader, [piece.raw or b"" for data in events for piece in reader.feed("", data)]


def test_interleaved_choices_of_a_stream_are_put_together() -> None:
    reader, sent = read(parsed(n=2, stream=True), VLLM_STREAM)
    assert reader.complete
    answer = reader.answer()
    first, second = answer.choices
    assert (first.text, first.finish_reason) == (" upon", FinishReason.STOP)
    assert (first.prompt_ids, first.completion_ids) == ([1, 2], [11, 12, 13, 14])
    assert first.logprobs == [-1.1, -1.2, -1.3, -1.4]
    assert (second.text, second.finish_reason) == (" a time", FinishReason.LENGTH)
    assert (second.completion_ids, second.logprobs) == ([21, 22], [-2.1, -2.2])
    assert (answer.id, answer.no_ids_because, answer.usage["completion_tokens"]) == ("cmpl-9", "", 6)
    passed_on = b"".join(sent)
    assert b"token_ids" not in passed_on
    assert b"token_logprobs" not in passed_on
    assert b"usage" not in passed_on
    assert passed_on.endswith(b"data: [DONE]\n\n")


def test_a_client_that_asked_for_everything_gets_the_bytes_of_the_stream() -> None:
    usage = {"include_usage": True}
    request = parsed(n=2, stream=True, stream_options=usage, logprobs=1, return_token_ids=True)
    _, sent = read(request, VLLM_STREAM)
    assert sent == [b"data: " + data + b"\n\n" for data in VLLM_STREAM]


def test_a_stream_that_ends_early_or_with_an_error_is_not_complete() -> None:
    request = parsed(n=2, stream=True)
    for num_events in range(len(VLLM_STREAM)):
        assert read(request, VLLM_STREAM[:num_events])[0].complete == (num_events >= 5)
    broken = [*VLLM_STREAM[:3], b'{"error":{"message":"gone","code":500}}', *VLLM_STREAM[3:]]
    reader, _ = read(request, broken)
    assert not reader.complete
    assert reader.error is not None
    assert (reader.error.status, reader.error.message) == (500, "gone")
