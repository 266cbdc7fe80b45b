"""`ScriptedClient` as a `TokenClient`: what tests of a gateway stand on."""

import asyncio
from typing import Any

import pytest

from rllm.errors import ContextLengthError, InferenceError
from rllm.inference import ScriptedAnswer, ScriptedClient
from rllm.inference.client import TokenClient, TokenPiece
from rllm.inference.reading import as_it_may_come_back
from rllm.inference.token_session import TokenSession
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams

PROMPT = [7, 8, 9]


async def _streamed(
    client: TokenClient, sampling: SamplingParams = SamplingParams()
) -> tuple[ModelOutput, list[TokenPiece]]:
    pieces: list[TokenPiece] = []
    return await client.generate_ids(PROMPT, sampling, on_piece=pieces.append), pieces


async def test_calls_by_ids_take_the_answers_in_order_and_keep_the_prompt_as_given() -> None:
    client = ScriptedClient(["Right", "Down"], policy_version=4)
    outputs = [await client.generate_ids([1, number], SamplingParams()) for number in (2, 3)]
    assert [output.text for output in outputs] == ["Right", "Down"]
    assert [output.prompt_ids for output in outputs] == client.prompts == [[1, 2], [1, 3]]
    assert outputs[1].completion_ids == [*client.tokenizer.encode("Down"), 0]
    assert outputs[1].policy_versions == [4] * 5
    with pytest.raises(InferenceError, match="2 answers and turn 3"):
        await client.generate_ids(PROMPT, SamplingParams())


async def test_a_function_answers_by_the_text_of_the_prompt() -> None:
    def answer(messages: list[dict[str, str]]) -> str | ScriptedAnswer | Exception:
        asked = messages[-1]["content"]
        return InferenceError("down") if "fail" in asked else ScriptedAnswer(text=asked.upper())

    client = ScriptedClient(answer)  # pyright: ignore[reportArgumentType]
    prompts = {text: client.tokenizer.encode(text) for text in ("one", "two", "fail")}
    one, two, failed = await asyncio.gather(
        *(client.generate_ids(prompt, SamplingParams()) for prompt in prompts.values()),
        return_exceptions=True,
    )
    assert isinstance(one, ModelOutput)
    assert isinstance(two, ModelOutput)
    assert (one.text, two.text, str(failed)) == ("ONE", "TWO", "down")


@pytest.mark.parametrize("text", ["", "a", "Go to the right, then down."])
async def test_pieces_add_up_to_the_answer(text: str) -> None:
    answer = ScriptedAnswer(text=text, logprobs=[-0.5] * (len(text) + 1))
    output, pieces = await _streamed(ScriptedClient([answer]), SamplingParams(top_logprobs=3))
    assert "".join(piece.text for piece in pieces) == output.text == text
    assert [token for piece in pieces for token in piece.token_ids] == output.completion_ids
    assert [value for piece in pieces for value in piece.logprobs] == output.logprobs
    assert [each for piece in pieces for each in piece.top_logprobs] == output.top_logprobs
    assert output.top_logprobs == [[(token, -0.5)] for token in output.completion_ids]
    assert len(pieces) >= len(text) / 5


async def test_ids_set_by_hand_are_those_of_the_answer_and_of_its_pieces() -> None:
    answer = ScriptedAnswer(text="some longer text", token_ids=[5, 6, 7], logprobs=[-1.0, -2.0, -3.0])
    output, pieces = await _streamed(ScriptedClient([answer]))
    assert output.completion_ids == [token for piece in pieces for token in piece.token_ids] == [5, 6, 7]
    assert "".join(piece.text for piece in pieces) == output.text == "some longer text"


@pytest.mark.parametrize(
    ("text", "ids", "sampling", "pieces"),
    [
        ("abcdefgh", [5, 6, 7, 8, 0], {}, [("abcd", [5, 6]), ("efgh", [7, 8]), ("", [0])]),
        ("abcdefgh", [5, 6, 7, 8, 0], {"max_tokens": 3}, [("abcd", [5, 6]), ("ef", [7])]),
        ("abXYef", [5, 6, 7, 0], {"stop": ("XY",)}, [("ab", [5, 6])]),
        ("abcd", [5, 0], {"max_tokens": 1}, [("abcd", [5])]),
        ("a", [5, 6, 0], {"max_tokens": 1}, [("", [5])]),
    ],
)
async def test_the_text_is_spread_over_the_ids_that_are_set_by_hand(
    text: str, ids: list[int], sampling: dict[str, Any], pieces: list[tuple[str, list[int]]]
) -> None:
    client = ScriptedClient([ScriptedAnswer(text=text, token_ids=ids)])
    output, said = await _streamed(client, SamplingParams(**sampling))
    assert output.text == "".join(part for part, _ in pieces)
    assert output.completion_ids == [token for _, part in pieces for token in part]
    assert [(each.text, each.token_ids) for each in said if each.text or each.token_ids] == pieces


async def test_an_answer_by_ids_waits_and_is_on_record() -> None:
    gate = asyncio.Event()
    client = ScriptedClient([ScriptedAnswer(text="late", wait_for=gate.wait)])
    answer = asyncio.create_task(client.generate_ids(PROMPT, SamplingParams(seed=5)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not answer.done()
    gate.set()
    assert (await answer).text == "late"
    assert [each.seed for each in client.samplings] == [5]


@pytest.mark.parametrize("stop", ["Obs", "servation:", "n: 4", "t", "no such text"])
async def test_a_stop_text_ends_the_answer_and_is_never_part_of_a_piece(stop: str) -> None:
    text = "think\nObservation: 42"
    client = ScriptedClient([text] * 2)
    output, pieces = await _streamed(client, SamplingParams(stop=(stop,)))
    found = stop in text
    assert output.text == "".join(piece.text for piece in pieces) == text.partition(stop)[0]
    assert output.stop_sequence == (stop if found else None)
    assert output.finish_reason is FinishReason.STOP
    said = text[: text.find(stop) + len(stop)] if found else text + "\0"
    assert output.completion_ids == client.tokenizer.encode(said)
    assert [token for piece in pieces for token in piece.token_ids] == output.completion_ids
    async with client.session(("task", 0)) as session:
        spoken = await session.respond([{"role": "user", "content": "?"}], SamplingParams(stop=(stop,)))
    assert (spoken.text, spoken.completion_ids) == (output.text, output.completion_ids)


@pytest.mark.parametrize(
    ("limit", "text", "reason"), [(3, "Rig", "length"), (5, "Right", "length"), (6, "Right", "stop")]
)
async def test_the_limit_of_new_tokens_is_kept(limit: int, text: str, reason: str) -> None:
    output, pieces = await _streamed(ScriptedClient(["Right"]), SamplingParams(max_tokens=limit))
    assert (output.text, output.finish_reason, len(output.completion_ids)) == (text, reason, limit)
    assert "".join(piece.text for piece in pieces) == text


@pytest.mark.parametrize(("fail_after", "heard"), [(0, ""), (2, "Go to th"), (99, "Go to the end")])
async def test_an_engine_that_dies_in_mid_answer_has_said_some_pieces(fail_after: int, heard: str) -> None:
    client = ScriptedClient([ScriptedAnswer(text="Go to the end", fail_after=fail_after), "next"])
    pieces: list[TokenPiece] = []
    with pytest.raises(InferenceError, match=f"after {fail_after} pieces"):
        await client.generate_ids(PROMPT, SamplingParams(), on_piece=pieces.append)
    assert "".join(piece.text for piece in pieces) == heard
    assert (await client.generate_ids(PROMPT, SamplingParams())).text == "next"
    assert client.in_flight == 0


async def test_a_call_that_is_cancelled_between_two_pieces_is_over() -> None:
    more = asyncio.Event()
    heard = asyncio.Event()
    client = ScriptedClient([ScriptedAnswer(text="Go to the end", pause=more.wait)])
    task = asyncio.create_task(
        client.generate_ids(PROMPT, SamplingParams(), on_piece=lambda piece: heard.set())
    )
    await heard.wait()
    assert client.in_flight == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.in_flight == 0


async def test_a_scripted_call_of_a_tool_is_read_by_the_format_that_the_template_writes() -> None:
    renderer = ScriptedClient([]).renderer
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    assert "look" in renderer.tokenizer.decode(renderer.render([{"role": "user", "content": "?"}], [tool]))
    assert renderer.tool_format is not None
    text = 'Wait.\n<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
    parsed = renderer.tool_format.parse(text)
    assert parsed.content.strip() == "Wait."
    assert [(call.name, call.arguments) for call in parsed.calls] == [("look", '{"at": 3}')]


async def test_a_prompt_that_is_too_long_is_refused() -> None:
    client = ScriptedClient(["Right"], max_context=3)
    with pytest.raises(ContextLengthError, match=r"3 tokens .* 3"):
        await client.generate_ids(PROMPT, SamplingParams())


async def test_a_session_by_ids_reads_the_calls_of_tools_and_keeps_the_ids() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    text = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
    client = ScriptedClient([ScriptedAnswer(text=text, token_ids=[5, 6, 0]), text, "plain"], max_context=500)
    session = TokenSession(client)
    ask: list[Message] = [{"role": "user", "content": "?"}]
    first = await session.respond(ask, SamplingParams(), [tool])
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("look", {"at": 3})]
    more: list[Message] = [*ask, *as_it_may_come_back(first)[-1:], {"role": "user", "content": "more"}]
    num_tokens = session.prompt_tokens(more, [tool])
    second = await session.respond(more, SamplingParams(), [tool])
    assert second.prompt_ids[: len(first.prompt_ids) + 3] == [*first.prompt_ids, 5, 6, 0]
    assert len(second.prompt_ids) == num_tokens
    without = await TokenSession(client).respond(ask, SamplingParams())
    assert (without.text, without.tool_calls) == ("plain", [])
    long: list[Message] = [{"role": "user", "content": "a" * 600}]
    with pytest.raises(ContextLengthError):
        await session.respond(long, SamplingParams())
    with pytest.raises(ContextLengthError):
        session.prompt_tokens(long)
