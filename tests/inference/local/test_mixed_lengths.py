"""Rows of very different lengths in one batch: each gets what it gets alone, and short ones do not pay for
long ones."""

import asyncio
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.inference.local.cache import KVCache
from rllm.inference.local.client import LocalClient
from rllm.inference.local.forward import DecodeRows, PromptRow, PromptRows, forward, prefill
from rllm.models.directory import LoadedModel
from rllm.types.messages import ModelOutput, SamplingParams

Serve = Callable[..., LocalClient]
LENGTHS = [190, 3, 3, 64, 5, 130, 2, 2, 2, 40, 3, 7, 150, 4, 4, 4]
CLOSE = 1e-5


def _ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


async def _together(client: LocalClient) -> list[ModelOutput]:
    """Conversations of two turns, the second of which goes on from what the first has read.

    All are open before the first asks: lockstep waits for conversations that are there.
    """
    all_open = asyncio.Barrier(len(LENGTHS))

    async def talk(number: int, length: int) -> list[ModelOutput]:
        async with client.session(("talk", number)) as session:
            await all_open.wait()
            ids, outputs = _ids(length, number), list[ModelOutput]()
            for turn in range(2):
                sampling = SamplingParams(max_tokens=6 + number % 3, seed=100 * number + turn)
                outputs.append(await session.respond_to_ids(ids, sampling))
                ids = [*ids, *outputs[-1].completion_ids, *_ids(3 + 20 * (number % 2), 7 * number)]
            return outputs

    talks = await asyncio.gather(*(talk(number, length) for number, length in enumerate(LENGTHS)))
    return [output for outputs in talks for output in outputs]


async def test_mixed_with_others_a_conversation_is_what_it_is_alone(
    endless: LoadedModel, serve: Serve
) -> None:
    mixed = await _together(serve(endless, num_slots=len(LENGTHS), max_context=256))
    alone = await _together(serve(endless, num_slots=1, max_context=256))
    for one, other in zip(mixed, alone, strict=True):
        assert one.completion_ids == other.completion_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE)


async def test_under_lockstep_mixed_batches_repeat_to_the_last_bit(
    endless: LoadedModel, serve: Serve
) -> None:
    first, second = [
        await _together(serve(endless, num_slots=16, max_context=256, lockstep=True)) for _ in range(2)
    ]
    assert [each.logprobs for each in first] == [each.logprobs for each in second]
    assert [each.completion_ids for each in first] == [each.completion_ids for each in second]


def _cache(loaded: LoadedModel, num_slots: int, max_context: int = 256) -> KVCache:
    """A cache of which all slots are taken."""
    cache = KVCache(
        num_layers=loaded.num_layers,
        num_slots=num_slots,
        num_kv_heads=loaded.num_kv_heads,
        max_context=max_context,
        head_dim=loaded.head_dim,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    for _ in range(num_slots):
        assert cache.allocate(1) is not None
    return cache


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 120), st.booleans()), min_size=1, max_size=10), st.randoms())
def test_any_mixture_in_any_slots_is_each_row_alone(
    endless: LoadedModel, rows: list[tuple[int, bool]], draws: Random
) -> None:
    """Some rows have read a part before; slots are scattered; then a few steps of decoding."""
    slots = sorted(draws.sample(range(24), len(rows)))
    mixed, logits = _cache(endless, 24), list[torch.Tensor]()
    with torch.inference_mode():
        parts = [
            (slot, _ids(length, slot), 9 if early else 0)
            for slot, (length, early) in zip(slots, rows, strict=True)
        ]
        for slot, ids, known in parts:
            if 0 < known < len(ids):
                prefill(endless.model, mixed, [PromptRow(mixed.slots[slot], ids[:known])])
        order = list(range(len(parts)))
        draws.shuffle(order)
        asked = [parts[place] for place in order]
        news = [PromptRow(mixed.slots[slot], ids[len(mixed.slots[slot].ids) :]) for slot, ids, _ in asked]
        together = forward(endless.model, mixed, None, None, PromptRows(endless.model, mixed, news))
        for place, (slot, ids, _) in enumerate(asked):
            single = _cache(endless, 1)
            logits.append(prefill(endless.model, single, [PromptRow(single.slots[0], ids)])[0])
            assert (together[place] - logits[-1]).abs().max() < 1e-4, slot
        taken, positions = [mixed.slots[slot] for slot in slots], np.array([len(ids) for _, ids, _ in parts])
        mixed.require(taken, positions + 1)
        decoding = DecodeRows(mixed, taken, positions)
        tokens = torch.arange(3, 3 + len(parts))
        for step in range(2):
            if step:
                mixed.require(taken, positions + 1 + step)
                decoding.advance()
            together = forward(endless.model, mixed, decoding, tokens + step, None)
        for row, (_, ids, _) in enumerate(parts):
            single = _cache(endless, 1)
            read = [*ids, int(tokens[row]), int(tokens[row]) + 1]
            (expected,) = prefill(endless.model, single, [PromptRow(single.slots[0], read)])
            assert (together[row] - expected).abs().max() < 1e-4


def test_padding_is_bounded_by_what_is_real(endless: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long prompt beside 63 short ones, and then a step of all: pairs that attention is given, padded
    ones included, against those that are there."""
    lengths = [250, *[16] * 63]
    cache = _cache(endless, 64)
    pairs: list[int] = []
    attention, product = torch.nn.functional.scaled_dot_product_attention, torch.baddbmm

    def attend(q: torch.Tensor, k: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        pairs.append(q.shape[0] * q.shape[2] * k.shape[2])
        return attention(q, k, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def multiply(bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, **kwargs: float) -> torch.Tensor:
        pairs.append(q.shape[0] // cache.num_kv_heads * k.shape[2])
        return product(bias, q, k, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(torch, "baddbmm", multiply)
    with torch.inference_mode():
        rows = [
            PromptRow(slot, _ids(length, length)) for slot, length in zip(cache.slots, lengths, strict=True)
        ]
        prefill(endless.model, cache, rows)
        squares = sum(length**2 for length in lengths)
        assert max(pairs) < 1.2 * squares
        pairs.clear()
        cache.require(cache.slots, np.array(lengths) + 1)
        decoding = DecodeRows(cache, cache.slots, np.array(lengths))
        forward(endless.model, cache, decoding, torch.full((64,), 5), None)
        padded = len(lengths) * cache.shelves[0].room_for(max(lengths) + 1)
        assert sum(pairs) < 0.3 * padded * endless.num_layers
