"""Law 6 for losses: micro-batches, the order of rows, and tokens that nobody sampled change neither loss nor
gradient. The backend's own tests ask the same of forward passes (tests/trainer/test_torch_backend.py)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rllm.algorithms.aggregation import FixedLength, token_weights
from rllm.algorithms.correction import LEVELS, MODES, Correction
from rllm.algorithms.losses import ActorCriticLoss, ImitationLoss, Loss, PolicyLoss, TokenInputs, ValueLoss
from rllm.algorithms.surrogates import OwnFunction, surrogate_named
from rllm.config.algorithm import LOSSES, AlgorithmConfig
from rllm.types.sample import TrainingSample

COLUMNS = (
    *("new", "old", "advantages", "entropy", "rollout", "ref", "new_values", "values", "returns"),
    "chosen",
)
LEAVES = ("new", "entropy", "new_values")
"""The columns that carry a gradient."""


@dataclass(kw_only=True)
class Row:
    """Trained tokens, and the places of the others among them."""

    group: str
    columns: dict[str, list[float]]
    untrained: list[int] = field(default_factory=list)
    """How many untrained tokens stand before each trained one."""

    @property
    def num_tokens(self) -> int:
        return len(self.columns["new"])

    @property
    def flags(self) -> list[bool]:
        return [flag for before in self.untrained for flag in (*[False] * before, True)]


def _rows(rng: random.Random) -> list[Row]:
    def column(name: str, size: int) -> list[float]:
        if name == "chosen":
            return [float(rng.random() < 0.3) for _ in range(size)]
        low, high = (-2.0, 2.0) if name == "advantages" else (-2.5, -0.05)
        return [rng.uniform(low, high) for _ in range(size)]

    sizes = [rng.randint(1, 5) for _ in range(rng.randint(2, 6))]
    return [
        Row(
            group=rng.choice("ab"),
            columns={name: column(name, size) for name in COLUMNS},
            untrained=[0] * size,
        )
        for size in sizes
    ]


def _group_centred(tokens: TokenInputs) -> Tensor:
    """A user's loss whose terms depend on the other rows of the group: advantages less their mean."""
    group_M = tokens.group_R[tokens.row_M]
    sums = torch.zeros(len(tokens.group_R) + 1, dtype=torch.float64).index_add(
        0, group_M, tokens.advantages_M
    )
    counts = torch.zeros_like(sums).index_add(0, group_M, torch.ones_like(tokens.advantages_M))
    return -(tokens.advantages_M - (sums / counts)[group_M]) * tokens.new_M


EVERY: dict[str, Loss] = {
    **{f"{name} alone": PolicyLoss(surrogate=surrogate_named(AlgorithmConfig(loss=name))) for name in LOSSES},
    **{
        f"{level} {mode}": PolicyLoss(
            aggregation="sequence_mean",
            correction=Correction(mode=mode, level=level, low=0.7, high=1.5),
            entropy_coef=0.1,
            kl_coef=0.2,
            kl_kind="k3+",
        )
        for level in LEVELS
        for mode in MODES
    },
    "sums": PolicyLoss(aggregation="sequence_sum"),
    "fixed length": PolicyLoss(aggregation=FixedLength(num_tokens=7)),
    "groups": PolicyLoss(aggregation="group_mean"),
    "value": ValueLoss(clip=0.3),
    "actor and critic": ActorCriticLoss(
        policy=PolicyLoss(entropy_coef=0.1), value=ValueLoss(clip=0.2), coef=0.5
    ),
    "imitation": ImitationLoss(),
    "own": PolicyLoss(surrogate=OwnFunction(name="own", function=_group_centred)),
}


def _loss_and_gradient(
    loss: Loss, rows: Sequence[Row], batches: Sequence[Sequence[int]], flagged: Callable[..., TrainingSample]
) -> tuple[float, dict[tuple[str, int], list[float]]]:
    """Summed over the micro-batches; the gradient by (column, row), of trained tokens."""
    samples = [flagged(row.flags, row.group) for row in rows]
    weights = token_weights(samples, loss.aggregation)
    total, gradient = 0.0, dict[tuple[str, int], list[float]]()
    for batch in batches:
        columns = {
            f"{name}_M": torch.tensor([x for r in batch for x in rows[r].columns[name]], dtype=torch.float64)
            for name in COLUMNS
        }
        for name in LEAVES:
            columns[f"{name}_M"].requires_grad_()
        sizes = torch.tensor([rows[r].num_tokens for r in batch])
        weights_M = torch.cat([torch.from_numpy(weights[r][samples[r].trainable_T]) for r in batch])
        inputs = TokenInputs(
            weights_M=weights_M,
            row_M=torch.arange(len(batch)).repeat_interleave(sizes),
            group_R=torch.tensor([ord(rows[r].group) - ord("a") for r in batch]),
            **columns,
        )
        part = (loss.terms(inputs) * weights_M).sum()
        part.backward()
        total += float(part.detach())
        for name in LEAVES:
            slopes = columns[f"{name}_M"].grad
            for r, each in zip(
                batch, (slopes if slopes is not None else weights_M * 0).split(sizes.tolist()), strict=True
            ):
                gradient[name, r] = each.tolist()
    return total, gradient


def _assert_same(found: Any, expected: Any, order: Sequence[int] | None = None) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-10)
    for (name, row), slopes in found[1].items():
        at = row if order is None else order[row]
        assert slopes == pytest.approx(expected[1][name, at], abs=1e-10)


@pytest.mark.parametrize("name", sorted(EVERY))
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_micro_batches_order_and_untrained_tokens_change_neither_loss_nor_gradient(
    flagged: Callable[..., TrainingSample], name: str, seed: int
) -> None:
    rng, loss = random.Random(seed), EVERY[name]
    rows = _rows(rng)
    whole = [range(len(rows))]
    expected = _loss_and_gradient(loss, rows, whole, flagged)
    assert any(any(slopes) for slopes in expected[1].values())

    by_group = [[r for r, row in enumerate(rows) if row.group == group] for group in "ab"]
    alone = by_group if loss.needs_whole_groups else [[r] for r in whole[0]]
    _assert_same(_loss_and_gradient(loss, rows, [each for each in alone if each], flagged), expected)

    order = rng.sample(range(len(rows)), len(rows))
    shuffled = [rows[r] for r in order]
    cut = len(rows) if loss.needs_whole_groups else rng.randint(1, len(rows) - 1)
    halves = [each for each in (range(cut), range(cut, len(rows))) if each]
    _assert_same(_loss_and_gradient(loss, shuffled, halves, flagged), expected, order)

    for row in rows:
        row.untrained = [rng.choice((0, 0, 1, 3)) for _ in row.untrained]
    _assert_same(_loss_and_gradient(loss, rows, whole, flagged), expected)
