"""Importance weights against scalar formulas and verl; what is unbiased, exactly."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.correction import (
    LEVELS,
    MODES,
    Correction,
    correction_weights_M,
    importance_ratios_M,
    out_of_bounds_M,
)
from rllm.algorithms.losses import policy_loss
from rllm.config.algorithm import AlgorithmConfig
from rllm.errors import ConfigError

LOW, HIGH = 0.6, 1.7
Rows = list[list[tuple[float, float]]]
"""(rollout, old) of each token."""


def _rows() -> Rows:
    rng = random.Random(1)
    return [[(rng.uniform(-2, 0), rng.uniform(-2, 0)) for _ in range(rng.randint(1, 6))] for _ in range(60)]


def _columns(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    rollout, old = (
        torch.tensor(column, dtype=torch.float64)
        for column in zip(*[token for row in rows for token in row], strict=True)
    )
    return rollout, old, torch.tensor([index for index, row in enumerate(rows) for _ in row])


def _scalar(row: list[tuple[float, float]], level: str, mode: str) -> list[float]:
    ratios = [math.exp(old) / math.exp(rollout) for rollout, old in row]
    product = math.prod(ratios)
    whole = {"sequence": product, "geometric": product ** (1 / len(row))}
    each = [whole.get(level, ratio) for ratio in ratios]
    if mode == "truncate":
        return [min(max(ratio, LOW), HIGH) for ratio in each]
    return [ratio if LOW <= ratio <= HIGH else 0.0 for ratio in each]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_of_the_formula_to_the_tenth_digit(level: str, mode: str) -> None:
    rows = _rows()
    rollout, old, row_M = _columns(rows)
    old.requires_grad_()
    correction = Correction(mode=mode, level=level, low=LOW, high=HIGH)
    weights = correction.weights_M(rollout, old, row_M)
    expected = [weight for row in rows for weight in _scalar(row, level, mode)]
    assert weights.tolist() == pytest.approx(expected, abs=1e-10)
    assert not weights.requires_grad
    changed = out_of_bounds_M(rollout, old, row_M, correction)
    ratios = importance_ratios_M(rollout, old, row_M, level)
    assert ((weights != ratios) == changed).all()
    assert 0.1 < changed.double().mean() < 0.9


def test_a_sampler_that_agrees_is_not_corrected(subtests: pytest.Subtests) -> None:
    for level in LEVELS:
        for mode in MODES:
            with subtests.test(level=level, mode=mode):
                _, old, row_M = _columns(_rows())
                weights = correction_weights_M(old, old, row_M, level=level, mode=mode, low=LOW, high=HIGH)
                assert weights.tolist() == [1.0] * len(old)


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.5, 1.0)])
def test_a_ratio_on_a_bound_is_within(low: float, high: float) -> None:
    columns = _columns([[(-1.0, -1.0)]])
    correction = Correction(mode="mask", level="token", low=low, high=high)
    assert correction.weights_M(*columns).tolist() == [1.0]
    assert out_of_bounds_M(*columns, correction).tolist() == [False]


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_depends_on_its_row_alone(level: str) -> None:
    rows = _rows()
    correction = Correction(mode="truncate", level=level, low=LOW, high=HIGH)
    together = correction.weights_M(*_columns(rows)).tolist()
    alone = [weight for row in rows for weight in correction.weights_M(*_columns([row])).tolist()]
    assert together == alone


def test_without_a_lower_bound_truncating_leaves_small_ratios_as_they_are() -> None:
    rollout, old = torch.tensor([-0.1, -9.0]), torch.tensor([-5.0, -0.1])
    weights = correction_weights_M(
        rollout, old, torch.tensor([0, 1]), level="token", mode="truncate", low=0.0, high=2.0
    )
    assert weights.tolist() == pytest.approx([math.exp(-4.9), 2.0])


@pytest.mark.parametrize(("mode", "weight"), [("truncate", 2.0), ("mask", 0.0)])
def test_a_product_too_large_for_a_float_is_bounded_like_any_other(mode: str, weight: float) -> None:
    rollout, old = torch.full((400,), -3.0), torch.full((400,), -0.5)
    weights = correction_weights_M(
        rollout, old, torch.zeros(400, dtype=torch.int64), level="sequence", mode=mode, low=0.0, high=2.0
    )
    assert weights.unique().tolist() == [weight]


def test_verls_sequence_weights_are_ours(verl_losses: dict[str, Any]) -> None:
    oracle = verl_losses["correction"]
    mask = torch.tensor(verl_losses["mask"], dtype=torch.bool)
    old, new = (torch.tensor(verl_losses[name], dtype=torch.float64)[mask] for name in ("old", "new"))
    row_M = torch.nonzero(mask)[:, 0]
    weights = correction_weights_M(old, new, row_M, level="sequence", mode="truncate", low=0.0, high=2.0)
    by_row = torch.stack([weights[row_M == row][0] for row in range(len(mask))])
    assert float(weights.mean()) == pytest.approx(oracle["rollout_is_mean"], rel=1e-6)
    assert float(by_row.mean()) == pytest.approx(oracle["rollout_is_seq_mean"], rel=1e-6)
    assert float(by_row.std()) == pytest.approx(oracle["rollout_is_seq_std"], rel=1e-6)
    assert float(by_row.min()) == pytest.approx(oracle["rollout_is_seq_min"], rel=1e-6)
    largest = importance_ratios_M(old, new, row_M, "sequence").max()
    assert float(largest) == pytest.approx(oracle["rollout_is_max"], rel=1e-6)


class TwoTurns:
    """Answers of two tokens out of three, the second by a distribution that depends on the first."""

    policy = torch.tensor([[0.2, -0.3, 0.5], [1.0, 0.0, -1.0], [0.1, 0.4, -0.2], [-0.6, 0.3, 0.0]]).double()
    sampler = policy + torch.tensor([[0.3, -0.2, 0.1], [-0.4, 0.2, 0.0], [0.2, 0.0, -0.3], [0.0, -0.5, 0.4]])
    answers = tuple(itertools.product(range(3), repeat=2))

    @classmethod
    def logprobs(cls, logits: Tensor) -> Tensor:
        """[9, 2] of each token of each answer."""
        tables = logits.log_softmax(1)
        return torch.stack(
            [torch.stack((tables[0, first], tables[first + 1, second])) for first, second in cls.answers]
        )

    @classmethod
    def reward(cls) -> Tensor:
        return torch.tensor(
            [float(first * 2 - second == 1) - 0.1 * second for first, second in cls.answers]
        ).double()

    @classmethod
    def exact(cls) -> Tensor:
        """The policy's own gradient of its expected reward."""
        logits = cls.policy.clone().requires_grad_()
        (cls.logprobs(logits).sum(1).exp() * cls.reward()).sum().backward()
        assert logits.grad is not None
        return logits.grad

    @classmethod
    def estimated(cls, **bounds: Any) -> Tensor:
        """What the sampler's answers, corrected, come to on average."""
        logits = cls.policy.clone().requires_grad_()
        new, rollout = cls.logprobs(logits), cls.logprobs(cls.sampler)
        row_M = torch.arange(9).repeat_interleave(2)
        weights = correction_weights_M(rollout.flatten(), new.detach().flatten(), row_M, **bounds).view(9, 2)
        probability = rollout.sum(1).exp()
        (probability * cls.reward() * (weights * new).sum(1)).sum().backward()
        assert logits.grad is not None
        return logits.grad


def test_only_the_ratio_of_the_whole_answer_is_unbiased() -> None:
    exact = TwoTurns.exact()
    free = {"low": 0.0, "high": 1e9, "mode": "truncate"}
    bias = {level: float((TwoTurns.estimated(level=level, **free) - exact).abs().max()) for level in LEVELS}
    assert bias["sequence"] < 1e-12
    assert min(bias["token"], bias["geometric"]) > 1e-3
    uncorrected = TwoTurns.estimated(level="token", mode="truncate", low=1.0, high=1.0 + 1e-12)
    assert bias["token"] < float((uncorrected - exact).abs().max())


def test_bounds_trade_bias_for_variance() -> None:
    exact = TwoTurns.exact()
    errors = [
        float((TwoTurns.estimated(level="sequence", mode="truncate", low=0.0, high=high) - exact).abs().max())
        for high in (1.0, 1.3, 1.6, 5.0)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-12


def test_the_configuration_offers_every_correction(subtests: pytest.Subtests) -> None:
    for level in LEVELS:
        for mode in MODES:
            with subtests.test(level=level, mode=mode):
                config = AlgorithmConfig(correction=mode, correction_level=level, old_logprobs="trainer")
                config.validate()
                assert policy_loss(config).correction == Correction(mode=mode, level=level, low=0.0, high=2.0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`clip`.*truncate, mask"):
        Correction(mode="clip")
    with pytest.raises(ConfigError, match=r"`turn`.*token"):
        Correction(mode="mask", level="turn")
    with pytest.raises(ConfigError, match=r"correction_low` is 3\.0 and `algorithm.correction_high` 2\.0"):
        Correction(mode="mask", low=3.0)
    one = torch.zeros(1)
    with pytest.raises(ConfigError, match="no level `turn`"):
        importance_ratios_M(one, one, one.long(), "turn")
    with pytest.raises(ConfigError, match="no correction `clip`"):
        correction_weights_M(one, one, one.long(), level="token", mode="clip", low=0.0, high=2.0)
