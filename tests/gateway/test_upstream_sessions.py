"""Interleaved conversations of one session, told apart by the ids that another server made of them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.gateway.upstream import UpstreamPolicy
from rllm.gateway.upstream.continuity import MAX_BEGINNINGS, MAX_ENDS, Continuity
from rllm.types.wire import CallRecord, CallRequest, Choice, Dialect, WireToolCall

sys.path.insert(0, str(Path(__file__).parent))
import fake_upstream as fake


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with fake.FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def policy(server: Any) -> AsyncIterator[UpstreamPolicy]:
    policy = UpstreamPolicy([server.url])
    await policy.start()
    yield policy
    await policy.close()


async def place_of(policy: UpstreamPolicy, session: Any, *said: str, **fields: Any) -> tuple[int, int, str]:
    answer = await policy.answer(fake.chat(*said, **fields), session)
    choice = answer.choices[0]
    session.records.append(record_of(fake.chat(*said, **fields), choice))
    return choice.conversation, choice.segment, choice.segment_reason


def record_of(request: CallRequest, choice: Choice) -> CallRecord:
    return CallRecord(
        id="x",
        session="s",
        messages=request.messages,
        tools=request.tools,
        response=choice.message(),
        prompt_ids=choice.prompt_ids,
        completion_ids=choice.completion_ids,
        conversation=choice.conversation,
        segment=choice.segment,
        segment_reason=choice.segment_reason,
    )


async def test_a_conversation_that_only_grows_stays_in_its_segment(policy: UpstreamPolicy) -> None:
    session = fake.Session()
    assert await place_of(policy, session, "one") == (0, 0, "first")
    assert await place_of(policy, session, "one", "ok", "two") == (0, 0, "first")
    assert await place_of(policy, session, "one", "ok", "two", "ok", "three") == (0, 0, "first")


async def test_conversations_that_take_turns_are_told_apart(policy: UpstreamPolicy) -> None:
    session = fake.Session()
    for said in (["a"], ["b"], ["c"]):
        await place_of(policy, session, *said)
    assert await place_of(policy, session, "b", "ok", "more") == (1, 0, "first")
    assert await place_of(policy, session, "c", "ok", "more") == (2, 0, "first")
    assert await place_of(policy, session, "a", "ok", "more") == (0, 0, "first")
    assert await place_of(policy, session, "b", "ok", "more", "ok", "x") == (1, 0, "first")


async def test_a_fork_and_a_retry_are_branches_of_one_segment(policy: UpstreamPolicy) -> None:
    session = fake.Session()
    await place_of(policy, session, "one")
    assert await place_of(policy, session, "one") == (0, 0, "first")
    assert await place_of(policy, session, "one", "ok", "left") == (0, 0, "first")
    assert await place_of(policy, session, "one", "ok", "right") == (0, 0, "first")


async def test_a_rewritten_history_begins_a_segment(policy: UpstreamPolicy) -> None:
    session = fake.Session()
    await place_of(policy, session, "one")
    await place_of(policy, session, "one", "ok", "two")
    assert await place_of(policy, session, "one", "changed", "two") == (0, 1, "history_rewritten")
    assert await place_of(policy, session, "one", "changed", "two", "ok", "3") == (
        0,
        1,
        "history_rewritten",
    )
    assert await place_of(policy, session, "summary", "ok", "go on") == (0, 2, "history_rewritten")
    assert await place_of(policy, session, "something else") == (1, 0, "first")


async def test_text_that_goes_on_with_other_ids_was_retokenized(server: Any, policy: UpstreamPolicy) -> None:
    session = fake.Session()
    await place_of(policy, session, "one")
    server.script = [fake.say("ok", prompt="user:one\nassistant:o-k\nuser:two\nassistant:")]
    assert await place_of(policy, session, "one", "ok", "two") == (0, 1, "retokenized")


async def test_other_tools_are_named_as_the_reason(server: Any, policy: UpstreamPolicy) -> None:
    session = fake.Session()
    await place_of(policy, session, "one")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    server.script = [fake.say("ok", prompt="tools\nuser:one\nassistant:ok\nuser:two\nassistant:")]
    assert await place_of(policy, session, "one", "ok", "two", tools=[tool]) == (0, 1, "tools_changed")


async def test_without_ids_the_text_alone_decides(server: Any, policy: UpstreamPolicy) -> None:
    session = fake.Session()
    policy.capture = frozenset()
    assert await place_of(policy, session, "one") == (0, 0, "first")
    assert await place_of(policy, session, "other") == (1, 0, "first")
    assert await place_of(policy, session, "one", "ok", "two") == (0, 0, "first")
    assert await place_of(policy, session, "one", "changed", "two") == (0, 1, "history_rewritten")


async def test_what_was_forgotten_is_built_anew_from_the_ledger(policy: UpstreamPolicy) -> None:
    session = fake.Session()
    for said in (["a"], ["b"], ["b", "changed", "more"]):
        await place_of(policy, session, *said)
    session.state.clear()
    assert await place_of(policy, session, "a", "ok", "more") == (0, 0, "first")
    assert await place_of(policy, session, "b", "changed", "more", "ok", "x") == (1, 1, "history_rewritten")
    assert await place_of(policy, session, "new") == (2, 0, "first")
    assert await place_of(policy, session, "b", "again", "more") == (1, 2, "history_rewritten")


async def test_200_sessions_at_once_do_not_mix(policy: UpstreamPolicy) -> None:
    async def play(number: int) -> list[tuple[int, int, str]]:
        session = fake.Session(id=str(number))
        said = [f"task {number % 7}"]
        places: list[tuple[int, int, str]] = []
        for turn in range(3):
            places.append(await place_of(policy, session, *said))
            said += ["ok", f"turn {turn}"]
        return places

    assert all(places == [(0, 0, "first")] * 3 for places in await asyncio.gather(*map(play, range(200))))


def bare(prompt: str | list[int]) -> CallRequest:
    return CallRequest(dialect=Dialect.COMPLETIONS, body={}, prompt=prompt)


def ask(known: Continuity, request: CallRequest, prompt: list[int], *answers: Choice) -> tuple[int, int, str]:
    asked = known.place(request, prompt)
    for answer in answers:
        known.record(asked, answer)
    return asked.place.conversation.number, asked.place.segment, asked.place.reason


def test_bare_prompts_go_on_by_ids_or_by_text() -> None:
    known = Continuity()
    assert ask(known, bare([1, 2]), [1, 2], Choice(completion_ids=[3])) == (0, 0, "first")
    assert ask(known, bare([1, 2, 3, 4]), [1, 2, 3, 4]) == (0, 0, "first")
    assert ask(known, bare([1, 2, 4]), [1, 2, 4]) == (1, 0, "first")
    assert ask(known, bare("Once"), [], Choice(text=" upon")) == (2, 0, "first")
    assert ask(known, bare("Once upon a"), []) == (2, 0, "first")
    assert ask(known, bare("Once"), []) == (2, 0, "first")


def test_messages_are_the_same_when_a_model_would_read_the_same() -> None:
    known = Continuity()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
    first = CallRequest(dialect=Dialect.CHAT, body={}, messages=[{"role": "user", "content": "x"}])
    asked = known.place(first, [])
    known.record(asked, Choice(tool_calls=[WireToolCall(id="1", name="f", arguments='{"b": 1, "a": 2}')]))
    echoed = {**call, "function": {"name": "f", "arguments": '{"a":2,"b":1}'}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": None},
        {"role": "assistant", "content": "", "tool_calls": [echoed], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]
    later = CallRequest(dialect=Dialect.CHAT, body={}, messages=messages)
    assert ask(known, later, []) == (0, 0, "first")


@pytest.mark.parametrize("arguments", ["{not json", "[" * 300 + "]" * 300, "[" * 5_000, "", "3"])
def test_arguments_that_are_no_json_are_compared_as_text(arguments: str) -> None:
    known = Continuity()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    first = CallRequest(dialect=Dialect.CHAT, body={}, messages=messages[:1])
    ask(known, first, [], Choice(tool_calls=[WireToolCall(id="1", name="f", arguments=arguments)]))
    later = CallRequest(dialect=Dialect.CHAT, body={}, messages=messages)
    assert ask(known, later, []) == (0, 0, "first")


def test_images_are_compared_as_they_are() -> None:
    known = Continuity()
    image = {"type": "image_url", "image_url": {"url": "data:,a"}}
    for number in range(2):
        url = {**image, "image_url": {"url": f"data:,{number}"}}
        request = CallRequest(dialect=Dialect.CHAT, body={}, messages=[{"role": "user", "content": [url]}])
        assert ask(known, request, [])[0] == number


def test_memory_of_a_long_session_is_bounded() -> None:
    known = Continuity()
    for number in range(2 * MAX_ENDS):
        prompt = [number, 1]
        ask(known, bare(prompt), prompt, Choice(completion_ids=[2]))
        request = CallRequest(
            dialect=Dialect.CHAT, body={}, messages=[{"role": "user", "content": f"{number}"}]
        )
        ask(known, request, [], Choice(text="a"))
    assert len(known._prompts) <= MAX_ENDS
    assert len(known._ids._places) <= MAX_ENDS
    assert len(known._ids._lengths) <= MAX_ENDS
    assert len(known._answers) <= MAX_ENDS
    assert len(known._index) <= MAX_BEGINNINGS


@given(st.lists(st.lists(st.sampled_from([1, 2, 9]), min_size=1, max_size=5), min_size=1, max_size=30))
def test_the_longest_known_beginning_decides(calls: list[list[int]]) -> None:
    """Against a search through all earlier calls."""
    known = Continuity()
    ends: list[tuple[list[int], tuple[int, int, str]]] = []
    prompts: dict[tuple[int, ...], tuple[int, int, str]] = {}
    for prompt in calls:
        place = ask(known, bare(prompt), prompt, Choice(completion_ids=[9]))
        held = [(len(end), number) for number, (end, _) in enumerate(ends) if prompt[: len(end)] == end]
        expected = prompts.get(tuple(prompt)) or (ends[max(held)[1]][1] if held else None)
        if expected is not None:
            assert place == expected
        else:
            assert place[2] == "first"
        prompts[tuple(prompt)] = place
        ends.append(([*prompt, 9], place))
    assert known.num_conversations == len({place[0] for place in prompts.values()})
