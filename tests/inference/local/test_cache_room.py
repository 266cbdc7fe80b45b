"""A cache that holds so many tokens and no more: who finds no room waits or is read anew, and nothing else
changes."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.inference.local import cache as cache_module
from rllm.inference.local.cache import KVCache
from rllm.inference.local.client import LocalClient
from rllm.inference.local.engine import EngineCounts
from rllm.models.directory import LoadedModel
from rllm.types import SamplingParams
from rllm.types.messages import ModelOutput

Serve = Callable[..., LocalClient]
Until = Callable[..., Any]
ROOM = 256
"""What one conversation of the longest context takes, with shelves of 32, 64, 128 and 256 tokens."""


@pytest.fixture(autouse=True, scope="module")
def small_shelves() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "FIRST_SHELF", 32)
        yield


def prompt_of(length: int, seed: int) -> list[int]:
    draws = Random(seed)
    return [draws.randrange(3, 250) for _ in range(length)]


async def played(client: LocalClient, number: int, turns: list[tuple[int, int]]) -> list[ModelOutput]:
    """A conversation: so many new tokens and so many sampled ones a turn, as long as the context lasts."""
    outputs: list[ModelOutput] = []
    ids: list[int] = []
    async with client.session(("played", number)) as session:
        for turn, (num_new, num_sampled) in enumerate(turns):
            ids = [*ids, *prompt_of(num_new, 100 * number + turn)]
            if len(ids) >= client.max_context:
                break
            sampling = SamplingParams(max_tokens=num_sampled, seed=number, temperature=0.8)
            output = await session.respond_to_ids(ids, sampling)
            outputs.append(output)
            ids = [*ids, *output.completion_ids]
    return outputs


def require_same(outputs: list[ModelOutput], expected: list[ModelOutput]) -> None:
    assert [each.completion_ids for each in outputs] == [each.completion_ids for each in expected]
    for mine, other in zip(outputs, expected, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert mine.finish_reason == other.finish_reason
        assert len(mine.policy_versions) == len(mine.completion_ids)


TURNS = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=3)


@pytest.fixture
def most_places(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Places of any cache after it was asked for room."""
    places: list[int] = []
    fit = KVCache._fit

    def fitted(self: KVCache, *args: Any, **kwargs: Any) -> bool:
        has_room = fit(self, *args, **kwargs)
        places.append(self.num_tokens)
        assert self.num_tokens <= self.max_tokens
        return has_room

    monkeypatch.setattr(KVCache, "_fit", fitted)
    return places


async def play_all(
    model: LoadedModel, conversations: Sequence[Sequence[tuple[int, int]]], **options: Any
) -> tuple[list[list[ModelOutput]], EngineCounts]:
    client = LocalClient(model, max_context=ROOM, **options)
    try:
        async with asyncio.timeout(60):
            playing = (played(client, number, turns) for number, turns in enumerate(conversations))
            return await asyncio.gather(*playing), client.engine.counts
    finally:
        await client.close()


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    conversations=st.lists(TURNS, min_size=1, max_size=9),
    num_slots=st.integers(1, 9),
    cache_tokens=st.sampled_from([ROOM, ROOM + 32, 2 * ROOM, 3 * ROOM]),
    max_prefill_tokens=st.sampled_from([1, 24, 8192]),
    lockstep=st.booleans(),
)
def test_whatever_room_there_is_the_answers_are_the_same(
    endless: LoadedModel,
    most_places: list[int],
    conversations: list[list[tuple[int, int]]],
    num_slots: int,
    cache_tokens: int,
    max_prefill_tokens: int,
    lockstep: bool,
) -> None:
    expected, _ = asyncio.run(play_all(endless, conversations, num_slots=16))
    most_places.clear()
    options: dict[str, Any] = {
        "num_slots": num_slots,
        "cache_tokens": cache_tokens,
        "max_prefill_tokens": max_prefill_tokens,
        "lockstep": lockstep,
    }
    outputs, counts = asyncio.run(play_all(endless, conversations, **options))
    assert max(most_places) <= cache_tokens
    for mine, other in zip(outputs, expected, strict=True):
        require_same(mine, other)
    calls = [each for part in outputs for each in part]
    assert counts.accepted == counts.finished == len(calls)
    assert counts.prompt_tokens == sum(len(each.prompt_ids) for each in calls)
    assert counts.sampled_tokens == sum(len(each.completion_ids) for each in calls)


@pytest.mark.usefixtures("most_places")
def test_a_run_in_little_room_is_the_same_to_the_last_bit_when_it_is_repeated(endless: LoadedModel) -> None:
    conversations = [[(20 + 7 * number, 50), (5, 30)] for number in range(8)]
    options: dict[str, Any] = {"num_slots": 8, "cache_tokens": 2 * ROOM, "lockstep": True}
    first, _ = asyncio.run(play_all(endless, conversations, **options))
    second, _ = asyncio.run(play_all(endless, conversations, **options))
    assert [[each.logprobs for each in part] for part in first] == [
        [each.logprobs for each in part] for part in second
    ]


async def test_weights_that_change_while_some_wait_for_room_are_those_of_the_tokens_that_come_after(
    endless: LoadedModel, serve: Serve, until: Until, most_places: list[int]
) -> None:
    client = serve(endless, max_context=ROOM, num_slots=8, cache_tokens=ROOM)
    calls = [
        asyncio.ensure_future(
            client.generate_ids(prompt_of(60, seed), SamplingParams(max_tokens=120, seed=seed))
        )
        for seed in range(6)
    ]
    await until(lambda: client.engine.counts.sampled_tokens > 150)
    client.publish(7)
    for output in await asyncio.gather(*calls):
        assert len(output.completion_ids) == 120 == len(output.policy_versions) == len(output.logprobs)
        assert output.policy_versions == sorted(output.policy_versions)
    assert max(most_places) <= ROOM


async def test_who_is_cancelled_while_it_waits_for_room_keeps_what_it_has_and_the_others_go_on(
    endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless, max_context=ROOM, num_slots=4, cache_tokens=ROOM)
    calls = [
        asyncio.ensure_future(
            client.generate_ids(prompt_of(20, seed), SamplingParams(max_tokens=200, seed=seed))
        )
        for seed in range(4)
    ]
    await until(lambda: client.engine.counts.sampled_tokens > 300)
    for call in calls[1:]:
        call.cancel()
    (first, *others) = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, ModelOutput)
    assert len(first.completion_ids) == 200
    assert all(isinstance(each, asyncio.CancelledError) for each in others)
    await until(lambda: client.engine.num_in_flight == 0)
    assert client.engine.counts.cancelled == 3


def test_places_that_nobody_holds_go_to_who_needs_them_on_another_shelf() -> None:
    cache = KVCache(
        num_layers=1,
        num_slots=4,
        num_kv_heads=1,
        max_context=ROOM,
        head_dim=2,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_tokens=ROOM,
    )
    short = [cache.allocate(32) for _ in range(4)]
    assert cache.allocate(32) is None, "no more than its slots are taken at once"
    for slot in filter(None, short):
        cache.release(slot)
    assert cache.num_tokens == 4 * 32
    long = cache.allocate(ROOM)
    assert long is not None
    assert long.shelf.capacity == cache.num_tokens == ROOM
    assert cache.allocate(32) is None, "there is no place left"


async def test_a_long_conversation_sets_the_room_of_nobody_else(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless, max_context=ROOM, num_slots=64)
    sampling = SamplingParams(max_tokens=4)
    calls = [prompt_of(250, 1), *(prompt_of(16, seed) for seed in range(2, 33))]
    await asyncio.gather(*(client.generate_ids(ids, sampling) for ids in calls))
    assert client.engine._cache.num_tokens <= ROOM + 32 * 32


async def test_one_caller_takes_the_room_of_one(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless, max_context=ROOM, num_slots=64)
    await client.generate_ids(prompt_of(200, 1), SamplingParams(max_tokens=4))
    assert client.engine._cache.num_tokens <= ROOM


def test_less_room_than_one_conversation_takes_is_refused(endless: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"`inference.cache_tokens` is 255.* 256"):
        LocalClient(endless, max_context=250, cache_tokens=255)
