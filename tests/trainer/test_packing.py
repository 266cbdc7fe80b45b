"""Which rows go together: full micro-batches, whole groups where asked, little padding, whatever the
order."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.losses import ImitationLoss, PolicyLoss
from rllm.models.batching import micro_batches
from rllm.models.packing import PrefixTree, WeightedRow, bucket_order, buckets, fullest, packed_trees
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.sample import NOT_SAMPLED, TrainingSample

Make = Callable[..., Any]
CPU = torch.device("cpu")


def _row(length: int, group: str, attempt: int = 0, prompt: int = 4) -> TrainingSample:
    sampled_T = np.arange(length) >= prompt
    return TrainingSample(
        token_ids_T=np.where(
            sampled_T, np.random.default_rng((length, attempt)).integers(40, size=length), 1
        ),
        policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
        logprobs_T=np.where(sampled_T, -3.7, 0.0).astype(np.float32),
        advantages_T=np.where(sampled_T, 1.0, 0.0).astype(np.float32),
        group_key=(group, "agent"),
        order_key=(group, attempt, 0, 0),
    )


def _weighted(samples: list[TrainingSample]) -> list[WeightedRow]:
    return [
        WeightedRow(index=index, sample=each, weights_T=each.trainable_T.astype(np.float64))
        for index, each in enumerate(samples)
    ]


def _long_tail(num: int, seed: int, group_size: int = 1) -> list[TrainingSample]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5.5, 1.0, num), 16, 4000).astype(int)
    return [_row(length, f"g{i // group_size}", i % group_size, 12) for i, length in enumerate(lengths)]


def _prefix_groups_of(samples: list[TrainingSample]) -> list[PrefixTree]:
    return [
        group for groups in packed_trees(_weighted(samples), 10**9, whole_groups=True) for group in groups
    ]


@pytest.mark.parametrize("group_size", [1, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_long_tail_of_lengths_fills_micro_batches_to_99_percent_of_the_bound(
    seed: int, group_size: int
) -> None:
    samples = _long_tail(2048, seed, group_size)
    packed = packed_trees(_weighted(samples), 16_384)
    tokens = [sum(group.num_tokens for group in groups) for groups in packed]
    assert max(tokens) <= 16_384
    assert sum(tokens[:-1]) >= 0.99 * 16_384 * (len(tokens) - 1)
    bound = sum(group.num_tokens for group in _prefix_groups_of(samples))
    assert sum(tokens) <= 1.01 * bound


@pytest.mark.parametrize("group_size", [1, 8])
def test_attention_pads_little_of_a_long_tail(group_size: int) -> None:
    samples = _long_tail(256, 3, group_size)
    batches = list(micro_batches(_weighted(samples), 16_384, CPU))
    padded = sum(batch.attention.num_products for batch in batches)
    bare = sum(len(each.token_ids_T) ** 2 for each in samples)
    assert padded < 1.25 * bare
    alone = sum(len({*batch.row_M}) * max(batch.place_M) ** 2 for batch in batches)
    assert padded < 0.6 * alone  # what padding to the longest row of each micro-batch would take


@given(st.lists(st.integers(1, 30), max_size=9), st.integers(0, 80))
def test_no_other_choice_of_sizes_fills_the_room_better(sizes: list[int], room: int) -> None:
    chosen = fullest(sizes, room)
    assert len(set(chosen)) == len(chosen)
    sums = {0}
    for size in sizes:
        sums |= {each + size for each in sums}
    assert sum(sizes[index] for index in chosen) == max(each for each in sums if each <= room)


@given(
    st.lists(st.tuples(st.integers(5, 60), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(8, 90),
    st.booleans(),
)
def test_every_row_is_in_one_micro_batch_and_none_is_too_full(
    shapes: list[tuple[int, int]], max_tokens: int, whole_groups: bool
) -> None:
    rows = _weighted([_row(length, f"g{group}", index) for index, (length, group) in enumerate(shapes)])
    packed = packed_trees(rows, max_tokens, whole_groups=whole_groups)
    assert sorted(row.index for groups in packed for group in groups for row in group.rows) == list(
        range(len(rows))
    )
    for groups in packed:
        alone = len(groups) == 1 and (whole_groups or len(_branches_of(groups[0])[1]) == 1)
        assert alone or sum(group.num_tokens for group in groups) <= max_tokens


@pytest.mark.parametrize("group_size", [2, 8])
@pytest.mark.parametrize("prompt", [12, 250])
def test_long_prompts_that_are_shared_fill_micro_batches_to_98_percent_of_the_bound(
    prompt: int, group_size: int
) -> None:
    rng, budget, num_groups = np.random.default_rng(4), 8192, 256
    own = np.clip(rng.lognormal(5.7, 0.9, (num_groups, group_size)), 2, 4000).astype(int)
    samples = [
        _row(prompt + int(length), f"g{group}", attempt, prompt)
        for group, lengths in enumerate(own)
        for attempt, length in enumerate(lengths)
    ]
    packed = packed_trees(_weighted(samples), budget)
    suffixes, shared = own.sum(axis=1), prompt - 1
    least = suffixes.sum() + (shared * -(-suffixes // (budget - shared))).sum()
    assert -(-least // budget) >= 0.98 * len(packed)
    computed = sum(group.num_tokens for groups in packed for group in groups)
    assert computed <= 1.01 * least


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(0, 40))
def test_buckets_are_the_cheapest_runs(shapes: list[tuple[int, int]], overhead: int) -> None:
    prefixes, lengths = (np.array(column) for column in zip(*shapes, strict=True))
    order = bucket_order(prefixes, lengths)
    prefixes, lengths = prefixes[order], lengths[order]

    def cost(runs: list[int]) -> float:
        total, first = 0.0, 0
        for size in runs:
            part = slice(first, first + size)
            wide = lengths[part].max()
            total += overhead + size * wide * (prefixes[part].max() + wide)
            first += size
        return total

    def all_runs(num: int) -> list[list[int]]:
        return [[num]] + [[*head, num - cut] for cut in range(1, num) for head in all_runs(cut)]

    runs = buckets(prefixes, lengths, overhead)
    assert sum(runs) == len(lengths)
    # Rows of one kind and length are never torn apart, which may cost where a smaller prompt is among them.
    together = min(cost(each) for each in all_runs(len(lengths)) if _keeps_shapes(each, prefixes, lengths))
    assert cost(runs) == together


def _keeps_shapes(runs: list[int], prefixes: Any, lengths: Any) -> bool:
    kinds = np.frexp(prefixes.astype(float))[1]
    return all(
        (kinds[end - 1], lengths[end - 1]) != (kinds[end], lengths[end]) for end in np.cumsum(runs)[:-1]
    )


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def _laid_out(tree: PrefixTree) -> int:
    """Keys of rows that go on from others, by the rows themselves."""
    ids = [tuple(row.sample.token_ids_T[: row.last]) for row in tree.rows]
    keys = 0
    for index, path in enumerate(ids):
        shared = max((_num_common(path, other) for other in ids[:index]), default=0)
        keys += len(path) if 0 < shared < len(path) else 0
    return keys


def test_keys_that_are_laid_out_for_many_branches_are_bounded_by_the_tokens_of_a_micro_batch() -> None:
    """Turns that see a history and not what was thought before: each branches off it."""
    history, samples = list(range(10, 160)), list[TrainingSample]()
    for turn, place in enumerate(range(10, 150)):
        ids = [*history[:place], 500 + turn, 700 + turn, 900]
        sampled_T = np.arange(len(ids)) >= place
        samples.append(
            TrainingSample(
                token_ids_T=np.array(ids),
                policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
                logprobs_T=np.where(sampled_T, -1.0, 0.0).astype(np.float32),
                advantages_T=sampled_T.astype(np.float32),
                group_key=("task", "agent"),
                order_key=("task", 0, 0, turn),
            )
        )
    (whole,) = packed_trees(_weighted(samples), 10**9)
    assert _laid_out(whole[0]) > 16 * 400
    packed = packed_trees(_weighted(samples), 400)
    assert sum(len(tree.rows) for trees in packed for tree in trees) == len(samples)
    for trees in packed:
        assert sum(tree.num_tokens for tree in trees) <= 400
        assert sum(map(_laid_out, trees)) <= 16 * 400
    assert len(packed) <= 1 + _laid_out(whole[0]) // (8 * 400), "and they are well filled"


def _branches_of(tree: PrefixTree) -> tuple[int, list[range]]:
    return tree.branches(range(len(tree.rows)))


def test_a_group_larger_than_the_budget_is_split_and_its_prompt_is_in_every_part() -> None:
    rows = _weighted([_row(30, "g", attempt, 20) for attempt in range(8)])
    packed = packed_trees(rows, 60)
    assert [[len(group.rows) for group in groups] for groups in packed] == [[4], [4]]
    assert {_branches_of(group)[0] for groups in packed for group in groups} == {20}


def test_a_group_that_a_loss_needs_whole_is_not_split() -> None:
    rows = _weighted([*(_row(30, "g", attempt, 20) for attempt in range(8)), _row(9, "h")])
    packed = packed_trees(rows, 40, whole_groups=True)
    assert sorted(len(group.rows) for groups in packed for group in groups) == [1, 8]
    unshared = packed_trees(rows, 40, whole_groups=True, share_prefixes=False)
    assert sorted(len(group.rows) for groups in unshared for group in groups) == [1, 8]


@pytest.mark.parametrize("max_tokens", [1, 50, 120, 10_000])
def test_the_same_rows_in_another_order_are_the_same_update_to_the_last_bit(
    decoder: Make, backend: Make, batch: list[TrainingSample], max_tokens: int
) -> None:
    def weights(rows: list[TrainingSample]) -> list[torch.Tensor]:
        learner: TorchBackend = backend(decoder(2), micro_batch_tokens=max_tokens)
        learner.update(rows, PolicyLoss(), 1e-2)
        return [each.detach() for each in learner.model.parameters()]

    expected = weights(batch)
    for seed in range(3):
        found = weights(random.Random(seed).sample(batch, len(batch)))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("max_tokens", [64, 600, 10_000])
def test_buckets_change_no_gradient(decoder: Make, backend: Make, max_tokens: int) -> None:
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(5, 20, 30), 90, 95, 120]
    samples = [_row(int(length), f"g{i // 3}", i % 3, 4 + i % 3 // 2) for i, length in enumerate(lengths)]

    def gradient(**how: Any) -> list[torch.Tensor]:
        model = decoder(2).double()
        backend(model, max_grad_norm=1e12, **how).update(samples, ImitationLoss(), 0.0)
        return [each.grad for each in model.parameters()]

    one_by_one = gradient(micro_batch_tokens=1, share_prefixes=False)
    for how in (
        {"micro_batch_tokens": max_tokens},
        {"share_prefixes": False, "micro_batch_tokens": max_tokens},
    ):
        for one, other in zip(gradient(**how), one_by_one, strict=True):
            assert (one - other).abs().max() <= 1e-10
