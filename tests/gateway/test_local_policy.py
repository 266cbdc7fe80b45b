"""Calls answered by the built-in engine: enforced or refused, captured with ids, one growing conversation."""

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import InferenceError, PartialAnswer, RequestRefused
from rllm.gateway import draw_numbers
from rllm.gateway.draw_numbers import DrawNumbers
from rllm.gateway.local import LocalPolicy
from rllm.inference.local.client import LocalClient
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.models.builtin import create_model
from rllm.models.directory import load_model
from rllm.types.messages import FinishReason
from rllm.types.wire import Answer, CallRecord, CallRequest, Choice, Dialect, Piece, ToolChoice, ToolMode

sys.path.insert(0, str(Path(__file__).parent))
from fake_upstream import Session
from polling import eventually

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def ask(*said: str, **how: Any) -> CallRequest:
    """User and assistant in turn."""
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)
    ]
    return CallRequest(dialect=Dialect.CHAT, body={}, **{"messages": messages, **how})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    create_model(path, "tiny", 0)
    return path


@pytest.fixture
async def policy(model_path: Path) -> AsyncIterator[LocalPolicy]:
    client = LocalClient(load_model(model_path), num_slots=16, max_context=256)
    yield LocalPolicy(client, "tiny")
    await client.close()


async def streamed(policy: LocalPolicy, request: CallRequest, session: Session) -> tuple[Answer, list[Piece]]:
    pieces: list[Piece] = []

    async def emit(piece: Piece) -> None:
        pieces.append(piece)

    return await policy.answer(request, session, emit), pieces


async def test_the_next_prompt_of_a_session_begins_with_every_id_seen_so_far(policy: LocalPolicy) -> None:
    session = Session()
    first = (await policy.answer(ask("go", max_tokens=9), session)).choices[0]
    second = (await policy.answer(ask("go", first.text, "on", max_tokens=9), session)).choices[0]
    seen = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(seen)] == seen
    assert (second.conversation, second.segment) == (first.conversation, first.segment)
    assert len(first.completion_ids) == len(first.logprobs) == len(first.policy_versions) == 9


async def test_a_rewritten_history_begins_a_segment_that_says_why(policy: LocalPolicy) -> None:
    session = Session()
    await policy.answer(ask("go", max_tokens=5), session)
    choice = (await policy.answer(ask("go", "never said", "on", max_tokens=5), session)).choices[0]
    assert (choice.segment, choice.segment_reason) == (1, "history_rewritten")


async def test_a_session_that_was_forgotten_goes_on_from_its_records(policy: LocalPolicy) -> None:
    session = Session()
    first = (await policy.answer(ask("go", max_tokens=6), session)).choices[0]
    record = CallRecord(
        id="x",
        session="s",
        messages=ask("go").messages,
        response=first.message(),
        prompt_ids=first.prompt_ids,
        completion_ids=first.completion_ids,
    )
    request = ask("go", first.text, "on", max_tokens=6)
    kept = (await policy.answer(request, session)).choices[0]
    rebuilt = (await policy.answer(request, Session(records=[record]))).choices[0]
    assert rebuilt.prompt_ids == kept.prompt_ids
    assert rebuilt.completion_ids == kept.completion_ids


async def test_draws_depend_on_the_prompt_and_not_on_the_order_of_arrival(policy: LocalPolicy) -> None:
    async def answers(order: list[str]) -> dict[str, list[int]]:
        session = Session(seed=3)
        done = await asyncio.gather(*(policy.answer(ask(text, max_tokens=8), session) for text in order))
        return {text: each.choices[0].completion_ids for text, each in zip(order, done, strict=True)}

    assert await answers(["a", "b", "c"]) == await answers(["c", "a", "b"])


async def test_the_same_prompt_asked_twice_is_answered_by_other_draws(policy: LocalPolicy) -> None:
    session = Session()
    once, again = [(await policy.answer(ask("go", max_tokens=16), session)).choices[0] for _ in range(2)]
    assert once.completion_ids != again.completion_ids
    assert once.prompt_ids == again.prompt_ids


def test_a_session_counts_a_bounded_number_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_numbers, "MAX_PROMPTS", 2)
    numbers = DrawNumbers()
    assert [numbers.take(digest) for digest in (b"a", b"b", b"a", b"c", b"a")] == [0, 0, 1, 0, 2]
    numbers.give_back(b"b", 0)
    assert numbers.take(b"b") == 0, "the one that was asked longest ago was forgotten"


def test_the_number_of_a_call_that_failed_beside_others_is_that_of_the_next() -> None:
    numbers = DrawNumbers()
    taken = [numbers.take(b"a") for _ in range(3)]
    for number in reversed(taken[:2]):
        numbers.give_back(b"a", number)
    assert [numbers.take(b"a") for _ in range(3)] == [0, 1, 3]


async def test_a_call_that_failed_or_was_cancelled_is_drawn_again_as_if_it_had_not_been() -> None:
    """So that failures do not change a run, also not after a restart: the ledger counts what was answered."""

    async def seeds(policy: LocalPolicy, session: Session) -> list[int | None]:
        return [(await policy.answer(ask("Hi"), session)).choices[0].seed for _ in range(2)]

    held = ScriptedAnswer(text="a", wait_for=asyncio.Event().wait)
    policy, session = (
        LocalPolicy(ScriptedClient([InferenceError("down"), held, "a", "b"]), "m"),
        Session(seed=7),
    )
    with pytest.raises(RequestRefused, match="down"):
        await policy.answer(ask("Hi"), session)
    cancelled = asyncio.create_task(policy.answer(ask("Hi"), session))
    await eventually(lambda: policy.health()["in_flight"])
    cancelled.cancel()
    await asyncio.wait({cancelled})
    undisturbed = LocalPolicy(ScriptedClient(["a", "b"]), "m")
    assert await seeds(policy, session) == await seeds(undisturbed, Session(seed=7))


async def test_calls_of_a_session_are_prepared_one_after_the_other_also_where_one_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, session = LocalPolicy(ScriptedClient(lambda messages: "a"), "m"), Session()
    prepare, may_end = policy._prepare, threading.Event()
    events: list[str] = []

    def noted(request: CallRequest, *more: Any) -> Any:
        kind = "long" if len(request.messages[0]["content"]) > 9 else "short"
        events.append(f"{kind} begins")
        if kind == "long":
            may_end.wait(20)
        prepared = prepare(request, *more)
        events.append(f"{kind} ends")
        return prepared

    await policy.answer(ask("first"), session)
    monkeypatch.setattr(policy, "_prepare", noted)
    long = asyncio.create_task(policy.answer(ask("a " * 4500), session))
    await eventually(lambda: events)
    long.cancel()
    short = asyncio.create_task(policy.answer(ask("b"), session))
    await asyncio.wait({short}, timeout=0.1)
    may_end.set()
    await short
    await asyncio.wait({long})
    assert events == ["long begins", "long ends", "short begins", "short ends"]
    assert long.cancelled()
    await policy.close()


async def test_a_request_with_a_seed_is_repeatable(policy: LocalPolicy) -> None:
    once, again = [
        (await policy.answer(ask("go", max_tokens=8, seed=5), Session(seed=seed))).choices[0]
        for seed in (1, 2)
    ]
    assert once.completion_ids == again.completion_ids


async def test_every_choice_is_its_own_sample(policy: LocalPolicy) -> None:
    answer = await policy.answer(ask("go", max_tokens=12, n=4), Session())
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({tuple(choice.completion_ids) for choice in answer.choices}) == 4
    assert answer.usage["completion_tokens"] == sum(len(each.completion_ids) for each in answer.choices)


@pytest.mark.parametrize(
    "choice", [ToolChoice(mode=ToolMode.REQUIRED), ToolChoice(mode=ToolMode.NAMED, name="weather")]
)
async def test_a_required_tool_is_called_with_arguments_of_its_schema(
    policy: LocalPolicy, choice: ToolChoice
) -> None:
    request = ask("go", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    answer, pieces = await streamed(policy, request, Session())
    (made,) = answer.choices
    (call,) = made.tool_calls
    assert call.name == "weather"
    assert json.loads(call.arguments) in ({"city": "Oslo"}, {"city": "Rome"})
    assert made.finish_reason is FinishReason.TOOL_CALLS
    parts = [piece.tool_call for piece in pieces if piece.tool_call is not None]
    assert (parts[0].id, parts[0].name) == (call.id, call.name)
    assert "".join(part.arguments for part in parts) == call.arguments
    assert -1 in made.policy_versions, "tokens that the grammar forced are not the policy's"


async def test_json_by_schema_is_enforced(policy: LocalPolicy) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    choice = (await policy.answer(ask("go", response_schema=schema), Session())).choices[0]
    assert isinstance(json.loads(choice.text)["ok"], bool)


async def test_tools_that_may_not_be_called_are_not(policy: LocalPolicy) -> None:
    request = ask("go", tools=[WEATHER], tool_choice=ToolChoice(mode=ToolMode.NONE), max_tokens=20)
    choice = (await policy.answer(request, Session())).choices[0]
    assert choice.tool_calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_that_cannot_be_read_is_text_and_says_so(stream: bool) -> None:
    client = ScriptedClient(['<tool_call>\n{"name": "weather", "argu', "fine"])
    policy = LocalPolicy(client, "scripted")
    choices: list[Choice] = []
    for said in ("hi", "hello"):
        request = ask(said, tools=[WEATHER], stream=stream)
        answer, _ = await streamed(policy, request, Session())
        choices += answer.choices
    broken, whole = choices
    assert (broken.unparsed_markup, broken.tool_calls) == (True, [])
    assert "weather" in broken.text
    assert not whole.unparsed_markup


async def test_a_record_names_the_seed_that_drew_it(policy: LocalPolicy) -> None:
    session = Session(seed=5)
    choice = (await policy.answer(ask("go", max_tokens=9), session)).choices[0]
    again = (await policy.answer(ask("go", max_tokens=9, seed=choice.seed), Session())).choices[0]
    assert again.completion_ids == choice.completion_ids


async def test_streamed_text_is_the_text(policy: LocalPolicy) -> None:
    request = ask("go", max_tokens=40, seed=1, logprobs=True, top_logprobs=2)
    answer, pieces = await streamed(policy, request, Session())
    (choice,) = answer.choices
    assert "".join(piece.text for piece in pieces) == choice.text
    tokens = [token for piece in pieces for token in piece.logprobs]
    assert [token.token_id for token in tokens] == choice.completion_ids
    assert all(len(token.top) == 2 for token in tokens)
    assert [token.logprob for token in tokens] == choice.logprobs


async def test_sampling_of_the_session_wins_over_what_the_client_asks(policy: LocalPolicy) -> None:
    session = Session(sampling={"temperature": 1.3, "max_tokens": 3})
    choice = (await policy.answer(ask("go", temperature=0.0, max_tokens=50), session)).choices[0]
    assert (choice.temperature, len(choice.completion_ids)) == (1.3, 3)


async def test_a_conversation_without_room_is_a_context_overflow(policy: LocalPolicy) -> None:
    with pytest.raises(RequestRefused, match="context") as refused:
        await policy.answer(ask("word " * 400), Session())
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    "how",
    [
        {"penalties": {"frequency_penalty": 0.5}},
        {"penalties": {"logit_bias": {"5": 100}}},
        {"n": 0},
        {"n": 1000},
        {"top_logprobs": 50, "logprobs": True},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"tools": [WEATHER], "tool_choice": ToolChoice(mode=ToolMode.NAMED, name="other")},
        {"tool_choice": ToolChoice(mode=ToolMode.REQUIRED)},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"messages": [], "prompt": [10**9]},
        {"messages": [], "prompt": []},
    ],
)
async def test_what_cannot_be_honoured_is_refused(policy: LocalPolicy, how: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as refused:
        await policy.answer(ask("go", **how), Session())
    assert 400 <= refused.value.status < 500


async def test_a_text_completion_goes_on_from_text_or_ids(policy: LocalPolicy) -> None:
    tokenizer = policy.client.renderer.tokenizer
    how: dict[str, Any] = {"dialect": Dialect.COMPLETIONS, "body": {}, "max_tokens": 6, "seed": 2}
    by_text = await policy.answer(CallRequest(prompt="You are an agent", **how), Session())
    by_ids = await policy.answer(
        CallRequest(prompt=tokenizer.encode("You are an agent"), echo=True, **how), Session()
    )
    assert by_ids.choices[0].completion_ids == by_text.choices[0].completion_ids
    assert by_ids.choices[0].text == "You are an agent" + by_text.choices[0].text


async def test_an_engine_that_fails_on_the_way_leaves_a_partial_answer() -> None:
    client = ScriptedClient([ScriptedAnswer(text="a long answer that breaks", fail_after=2)])
    with pytest.raises(PartialAnswer):
        await streamed(LocalPolicy(client, "scripted"), ask("go"), Session())


async def test_an_abandoned_stream_stops_the_engine(policy: LocalPolicy) -> None:
    async def leave(piece: Piece) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await policy.answer(ask("go", max_tokens=200, n=3), Session(), leave)
    assert isinstance(policy.client, LocalClient)
    for _ in range(100):
        if policy.client.engine.num_in_flight == 0:
            break
        await asyncio.sleep(0.02)
    assert policy.client.engine.num_in_flight == 0
    assert policy.health()["in_flight"] == 0


async def test_without_seeds_none_is_told_and_none_is_taken() -> None:
    """For a server that ends with the first seed: the draws are its own."""
    policy = LocalPolicy(ScriptedClient(["a"]), "m", sends_seeds=False)
    answer = await policy.answer(ask("Hi", seed=None), Session(seed=7))
    assert answer.choices[0].seed is None
    with pytest.raises(RequestRefused, match="without --no-seeds") as refused:
        await policy.answer(ask("Hi", seed=3), Session())
    assert (refused.value.status, refused.value.param) == (400, "seed")


async def test_variables_for_the_chat_template_are_given_to_it_and_make_a_conversation_of_their_own(
    model_path: Path, tmp_path: Path
) -> None:
    """As `enable_thinking` of Qwen3, here the word at the beginning of every prompt."""
    directory = tmp_path / "moody"
    shutil.copytree(model_path, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    files = list(directory.glob("chat_template*"))
    template = files[0].read_text() if files else settings["chat_template"]
    moody = "{{ mood or '' }}" + template
    if files:
        files[0].write_text(moody)
    else:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": moody}))
    client = LocalClient(load_model(directory), num_slots=4, max_context=256)
    policy, session = LocalPolicy(client, "moody"), Session()
    encode = client.renderer.tokenizer.encode

    def with_mood(mood: str, *said: str) -> CallRequest:
        penalties = {"chat_template_kwargs": {"mood": mood}} if mood else {}
        return ask(*said, max_tokens=3, penalties=penalties)

    try:
        plain = (await policy.answer(with_mood("", "go"), session)).choices[0]
        sad = (await policy.answer(with_mood("sad", "go"), session)).choices[0]
        assert sad.prompt_ids == encode("sad") + plain.prompt_ids
        assert (plain.conversation, sad.conversation) == (0, 1)
        on = (await policy.answer(with_mood("sad", "go", sad.text, "on"), session)).choices[0]
        seen = sad.prompt_ids + sad.completion_ids
        assert (on.prompt_ids[: len(seen)], on.conversation, on.segment) == (seen, 1, 0)
        records = [
            CallRecord(
                id=str(number),
                session="s",
                messages=ask("go").messages,
                sampling={"chat_template_kwargs": {"mood": "sad"}} if number else {},
                response=choice.message(),
                prompt_ids=choice.prompt_ids,
                completion_ids=choice.completion_ids,
            )
            for number, choice in enumerate((plain, sad))
        ]
        again = with_mood("sad", "go", sad.text, "on")
        rebuilt = (await policy.answer(again, Session(records=records))).choices[0]
        assert (rebuilt.prompt_ids, rebuilt.conversation) == (on.prompt_ids, on.conversation)
        bad = ask("go", penalties={"chat_template_kwargs": {"messages": []}})
        with pytest.raises(RequestRefused, match="'messages'"):
            await policy.answer(bad, session)
    finally:
        await policy.close()
        await client.close()
