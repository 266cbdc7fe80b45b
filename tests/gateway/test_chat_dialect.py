"""Chat completions: what clients get is what OpenAI's own SDK reads."""

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from rllm.errors import RequestRefused
from rllm.gateway.dialects.chat import ChatDialect
from rllm.types.messages import FinishReason
from rllm.types.wire import (
    Answer,
    Choice,
    Piece,
    TokenLogprob,
    ToolCallPiece,
    WireToolCall,
)

sys.path.insert(0, str(Path(__file__).parent))
from chat_client import HELLO, WEATHER, parsed
from dialect_server import DialectServer


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


@contextmanager
def served(
    answer: Answer, pieces: Sequence[Piece] = (), error: RequestRefused | None = None
) -> Iterator[str]:
    """A server that answers every call with `answer`, or breaks off with `error` after `pieces`."""
    with DialectServer(ChatDialect(), "/v1/chat/completions", answer.id) as server:
        server.answer, server.pieces, server.fails = answer, list(pieces), error
        yield f"{server.url}/v1"


@asynccontextmanager
async def client_of(
    answer: Answer, pieces: Sequence[Piece] = (), error: RequestRefused | None = None
) -> AsyncIterator[AsyncOpenAI]:
    with served(answer, pieces, error) as url:
        async with AsyncOpenAI(base_url=url, api_key="any") as client:
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
        with served(answer, pieces) as url:
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
