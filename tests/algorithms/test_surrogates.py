"""Every surrogate against a scalar reference, finite differences and verl; all of them where new = old."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.algorithms.aggregation import Aggregation, FixedLength, token_weights
from rllm.algorithms.surrogates import (
    ClippedRatio,
    ClippedWeight,
    DivergenceMask,
    GeometricMean,
    ImportanceRatio,
    PolicyGradient,
    SequenceRatio,
    SoftGate,
    Surrogate,
    Tapered,
)
from rllm.algorithms.tokens import TokenInputs
from rllm.types.sample import TrainingSample

Row = list[tuple[float, float, float]]
"""(new, old, advantage) of each token."""

LOW, HIGH, DUAL = 0.2, 0.28, 3.0
SURROGATES: dict[str, Surrogate] = {
    "ppo": ClippedRatio(clip_low=LOW, clip_high=HIGH),
    "dual clip": ClippedRatio(clip_low=LOW, clip_high=HIGH, dual_clip=DUAL),
    "policy_gradient": PolicyGradient(),
    "gspo": SequenceRatio(clip_low=LOW, clip_high=HIGH),
    "cispo": ClippedWeight(clip_low=LOW, clip_high=HIGH),
    "gmpo": GeometricMean(clip_low=LOW, clip_high=HIGH),
    "sapo": SoftGate(positive=1.0, negative=1.05),
    "dppo_tv": DivergenceMask(clip_low=LOW, clip_high=HIGH),
    "dppo_kl": DivergenceMask(clip_low=LOW, clip_high=HIGH, kl=True),
    "topr": Tapered(),
    "importance_sampling": ImportanceRatio(),
}
OF_ROWS = ("gspo", "gmpo")


def scalar(name: str, row: Row) -> list[tuple[float, float]]:
    """(term, slope of the term with respect to its own token's log-probability) of each token of a row."""
    ratios = [math.exp(new - old) for new, old, _ in row]
    if name == "gspo":
        mean = math.prod(ratios) ** (1 / len(row))
        return [_clipped(mean, a, math.inf) for _, _, a in row]
    if name == "topr":
        tapered = min(1.0, math.prod(ratios))
        weights = [tapered if a < 0 else 1.0 for _, _, a in row]
        return [(-w * a * new, -w * a) for w, (new, _, a) in zip(weights, row, strict=True)]
    if name == "gmpo":
        held = [
            min(r, math.exp(HIGH)) if a > 0 else max(r, math.exp(-LOW))
            for r, (_, _, a) in zip(ratios, row, strict=True)
        ]
        mean = math.prod(held) ** (1 / len(row))
        return [
            (-a * mean, -a * mean if h == r else 0.0)
            for h, r, (_, _, a) in zip(held, ratios, row, strict=True)
        ]
    return [_of_token(name, r, *token) for r, token in zip(ratios, row, strict=True)]


def _of_token(name: str, r: float, new: float, old: float, a: float) -> tuple[float, float]:
    if name in ("ppo", "dual clip"):
        return _clipped(r, a, DUAL if name == "dual clip" else math.inf)
    if name == "policy_gradient":
        return -a * new, -a
    if name == "importance_sampling":
        return -r * a, -r * a
    if name == "cispo":
        weight = min(max(r, 1 - LOW), 1 + HIGH)
        return -weight * a * new, -weight * a
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * r
    p, q = math.exp(old), math.exp(new)
    moved = abs(p - q) if name == "dppo_tv" else p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    beyond = (a > 0 and r > 1 and moved > HIGH) or (a < 0 and r < 1 and moved > LOW)
    return -r * a, 0.0 if beyond else -r * a


def _clipped(r: float, a: float, dual: float) -> tuple[float, float]:
    if a > 0:
        return (-a * (1 + HIGH), 0.0) if r > 1 + HIGH else (-a * r, -a * r)
    if r < 1 - LOW:
        return -a * (1 - LOW), 0.0
    return (-a * dual, 0.0) if r > dual else (-a * r, -a * r)


def inputs(rows: list[Row], new_M: Tensor | None = None) -> TokenInputs:
    """The rows as one micro-batch; `new_M` in place of theirs."""
    new, old, advantages = (
        torch.tensor(column, dtype=torch.float64)
        for column in zip(*[t for row in rows for t in row], strict=True)
    )
    return TokenInputs(
        new_M=new if new_M is None else new_M,
        old_M=old,
        advantages_M=advantages,
        weights_M=torch.ones_like(old),
        row_M=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows])),
        group_R=torch.zeros(len(rows), dtype=torch.int64),
    )


def _some_rows(num_rows: int = 300) -> list[Row]:
    """Up to six tokens each, one in eight without an advantage, ratios from e^-3 to e^3."""
    rng = random.Random(3)

    def token() -> tuple[float, float, float]:
        advantage = rng.choice((0.0, *[rng.uniform(-2, 2)] * 7))
        return rng.uniform(-3, -0.01), rng.uniform(-3, -0.01), advantage

    return [[token() for _ in range(rng.randint(1, 6))] for _ in range(num_rows)]


def _terms_and_slopes(surrogate: Surrogate, rows: list[Row]) -> tuple[list[float], list[float]]:
    new = inputs(rows).new_M.clone().requires_grad_()
    terms = surrogate.terms(inputs(rows, new))
    terms.sum().backward()
    assert new.grad is not None
    return terms.tolist(), new.grad.tolist()


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_terms_and_slopes_are_those_of_the_formula_to_the_tenth_digit(name: str) -> None:
    rows = _some_rows()
    terms, slopes = _terms_and_slopes(SURROGATES[name], rows)
    expected = [pair for row in rows for pair in scalar(name, row)]
    assert terms == pytest.approx([value for value, _ in expected], abs=1e-10)
    assert slopes == pytest.approx([slope for _, slope in expected], abs=1e-10)
    closed = sum(slope == 0.0 for _, slope in expected) / len(expected)
    assert 0.1 < closed < 0.7  # both sides of every bound are seen


def _smooth_rows(name: str, rng: random.Random) -> list[Row]:
    """Rows with one advantage each, no token of which is within 1e-3 of a bound."""
    rows: list[Row] = []
    while len(rows) < 12:
        advantage = rng.choice((-1.5, -0.4, 0.7, 2.0))
        olds = [rng.uniform(-3, -0.1) for _ in range(rng.randint(1, 5))]
        row = [(min(old + rng.uniform(-0.9, 1.5), -0.01), old, advantage) for old in olds]
        if _far_from_bounds(name, row):
            rows.append(row)
    return rows


def _far_from_bounds(name: str, row: Row) -> bool:
    shifted = [
        [(new + (shift if index == at else 0.0), old, a) for index, (new, old, a) in enumerate(row)]
        for at in range(len(row))
        for shift in (-1e-3, 1e-3)
    ]
    closed = [[slope == 0.0 for _, slope in scalar(name, each)] for each in (row, *shifted)]
    return all(each == closed[0] for each in closed)


@pytest.mark.parametrize("name", sorted({*SURROGATES} - {"cispo", "topr"}))
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """CISPO and TOPR are left out: their weight is a constant by definition, so the loss has another
    slope."""
    surrogate = SURROGATES[name]
    rows = _smooth_rows(name, random.Random(5))
    new_M = inputs(rows).new_M
    _, slopes = _terms_and_slopes(surrogate, rows)
    assert len(slopes) > 20
    for step, slope in zip(1e-5 * torch.eye(len(new_M), dtype=torch.float64), slopes, strict=True):
        above, below = (_loss(name, surrogate, rows, new_M + sign * step) for sign in (1, -1))
        assert slope == pytest.approx((above - below) / 2e-5, rel=1e-6, abs=1e-9)


def _loss(name: str, surrogate: Surrogate, rows: list[Row], new_M: Tensor) -> float:
    """Sum of the terms, where a masked term of DPPO is one that stays."""
    moved = inputs(rows, new_M)
    terms_M = surrogate.terms(moved)
    if name.startswith("dppo"):
        terms_M = terms_M[~surrogate.clipped_M(moved)]
    return float(terms_M.sum())


def test_a_row_far_from_the_policy_that_sampled_it_is_clipped_whole() -> None:
    for name in ("ppo", "gspo", "gmpo"):
        row = [(-0.1, -0.9, 1.0), (-0.1, -0.9, 1.0)]
        assert SURROGATES[name].clipped_M(inputs([row])).tolist() == [True, True]


def test_a_ratio_on_a_bound_is_not_clipped() -> None:
    on_policy = inputs([[(-0.5, -0.5, 1.0), (-0.5, -0.5, -1.0)]])
    assert not ClippedRatio(clip_low=0.0, clip_high=0.0).clipped_M(on_policy).any()


def test_where_nobody_was_paid_nothing_is_masked() -> None:
    for name in ("dppo_tv", "dppo_kl"):
        row = [(-0.1, -2.0, 0.0), (-2.0, -0.1, 0.0)]
        assert not SURROGATES[name].clipped_M(inputs([row])).any()
        assert SURROGATES[name].clipped_M(inputs([[(-0.1, -2.0, 1.0), (-2.0, -0.1, -1.0)]])).all()


def test_in_the_first_update_every_surrogate_has_the_plain_policy_gradient(subtests: pytest.Subtests) -> None:
    for name in sorted(SURROGATES):
        with subtests.test(name=name):
            fresh = [[(new, new, advantage) for new, _, advantage in row] for row in _some_rows()]
            advantages_M = inputs(fresh).advantages_M
            _, slopes = _terms_and_slopes(SURROGATES[name], fresh)
            assert slopes == pytest.approx((-advantages_M).tolist(), abs=1e-12)
            assert not SURROGATES[name].clipped_M(inputs(fresh)).any()


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_where_the_advantage_is_zero_there_is_nothing_to_learn(name: str) -> None:
    tied = [[(new, old, 0.0) for new, old, _ in row] for row in _some_rows()]
    terms, slopes = _terms_and_slopes(SURROGATES[name], tied)
    assert {*map(abs, terms)} == {*map(abs, slopes)} == {0.0}
    assert not SURROGATES[name].needs_every_row
    if name.startswith("dppo"):  # of the bounds, those that look at the sign
        assert not SURROGATES[name].clipped_M(inputs(tied)).any()


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_row_of_turns_with_different_advantages_gives_each_turn_its_own(name: str) -> None:
    rows: list[Row] = [[(-1.0, -1.05, 2.0), (-0.5, -0.55, -1.0)]]
    _, (first, second) = _terms_and_slopes(SURROGATES[name], rows)
    assert (first, second) == pytest.approx((-2.0 * math.exp(0.05), math.exp(0.05)))


def test_bounds_are_the_papers_unless_they_are_set() -> None:
    assert (ClippedRatio().clip_low, ClippedRatio().clip_high, ClippedRatio().dual_clip) == (0.2, 0.2, 0.0)
    assert (SequenceRatio().clip_low, SequenceRatio().clip_high) == (3e-4, 4e-4)
    assert (GeometricMean().clip_low, GeometricMean().clip_high) == (0.4, 0.4)
    weight = ClippedWeight().terms(inputs([[(-9.0, -0.1, 1.0), (-0.1, -9.0, 1.0)]]))
    assert weight.tolist() == pytest.approx([9.0 * math.exp(-8.9), 5 * 0.1])


MODES: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": FixedLength(num_tokens=12),
}
"""verl's name, ours. Its `token-sum` is `token_mean` times the number of tokens."""
THEIR_NAME = {"vanilla": "dual clip", "gpg": "policy_gradient", "geo_mean": "gmpo"}


class Verl:
    """One loss of verl beside ours on its inputs."""

    def __init__(
        self, data: dict[str, Any], loss: str, mode: str, flagged: Callable[..., TrainingSample]
    ) -> None:
        self.theirs = data["loss"][loss][mode]
        self.mask = torch.tensor(data["mask"], dtype=torch.bool)
        self.surrogate = SURROGATES[THEIR_NAME.get(loss, loss)]
        weights = token_weights([flagged(row) for row in data["mask"]], MODES[mode])
        self.weights_M = torch.from_numpy(np.stack([weights_T[1:] for weights_T in weights]))[self.mask]
        self.new_M, self.old_M, self.advantages_M = (
            torch.tensor(data[name], dtype=torch.float64)[self.mask] for name in ("new", "old", "advantages")
        )
        new_M = self.new_M.clone().requires_grad_()
        self.tokens = TokenInputs(
            new_M=new_M,
            old_M=self.old_M,
            advantages_M=self.advantages_M,
            weights_M=self.weights_M,
            row_M=torch.nonzero(self.mask)[:, 0],
            group_R=torch.arange(len(self.mask)),
        )
        loss_sum = (self.surrogate.terms(self.tokens) * self.weights_M).sum()
        loss_sum.backward()
        self.loss = float(loss_sum.detach())
        assert new_M.grad is not None
        self.grad_M = new_M.grad
        their_grad = torch.tensor(self.theirs["grad"], dtype=torch.float64)
        assert their_grad[~self.mask].abs().max() == 0.0
        self.their_grad_M = their_grad[self.mask]


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "gpg", "cispo"])
def test_values_and_gradients_are_verls(
    verl_losses: dict[str, Any], flagged: Callable[..., TrainingSample], loss: str, mode: str
) -> None:
    verl = Verl(verl_losses, loss, mode, flagged)
    assert verl.loss == pytest.approx(verl.theirs["loss"], abs=2e-7)
    assert (verl.grad_M - verl.their_grad_M).abs().max() < 1e-7
    total = verl_losses["loss"][loss]["token-sum"]["loss"] / int(verl.mask.sum())
    if mode == "token-mean":
        assert verl.loss == pytest.approx(total, abs=2e-7)


@pytest.mark.parametrize("loss", ["sapo", "geo_mean"])
def test_verl_takes_the_mean_over_rows_of_sapo_and_gmpo_whatever_is_asked(
    verl_losses: dict[str, Any], flagged: Callable[..., TrainingSample], loss: str
) -> None:
    verl = Verl(verl_losses, loss, "seq-mean-token-mean", flagged)
    assert verl.loss == pytest.approx(verl.theirs["loss"], abs=2e-7)
    assert (verl.grad_M - verl.their_grad_M).abs().max() < 1e-7
    assert len({each["loss"] for each in verl_losses["loss"][loss].values()}) == 1
    assert Verl(verl_losses, loss, "token-mean", flagged).loss != pytest.approx(verl.loss, abs=0.1)


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
def test_dppo_is_verls_but_for_its_value_and_the_weight_that_verl_cuts_at_three(
    verl_losses: dict[str, Any], flagged: Callable[..., TrainingSample], loss: str, mode: str
) -> None:
    verl = Verl(verl_losses, loss, mode, flagged)
    ratio_M = (verl.new_M - verl.old_M).exp()
    cut = ratio_M > verl_losses["dual_clip"]
    assert int(cut.sum()) == 1
    assert (verl.grad_M - verl.their_grad_M)[~cut].abs().max() < 1e-7
    factor = verl_losses["dual_clip"] / float(ratio_M[cut])
    assert float(verl.their_grad_M[cut]) == pytest.approx(float(verl.grad_M[cut]) * factor, rel=1e-6)
    closed = verl.surrogate.clipped_M(verl.tokens)
    assert float(closed.double().mean()) == pytest.approx(verl.theirs["clipped"])
    their_terms_M = -verl.advantages_M * ratio_M.clamp(max=3.0) * verl.new_M * ~closed
    assert float((their_terms_M * verl.weights_M).sum()) == pytest.approx(verl.theirs["loss"], abs=2e-7)


def test_what_verl_would_cut_overflows_here_so_that_it_is_seen() -> None:
    rows: list[Row] = [[(-0.1, -60.0, -1.0)]]
    assert SURROGATES["ppo"].terms(inputs(rows)).item() == pytest.approx(math.exp(59.9))
    far = inputs([[(-0.1, -900.0, -1.0)]])
    assert not torch.isfinite(SURROGATES["ppo"].terms(far)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_certain_token_has_a_finite_divergence(dtype: torch.dtype) -> None:
    old, new = torch.tensor([0.0, -1e-9, -0.7], dtype=dtype), torch.tensor([0.0, 0.0, 0.0], dtype=dtype)
    columns = inputs([[(0.0, 0.0, 1.0)] * 3])
    given = TokenInputs(
        new_M=new,
        old_M=old,
        advantages_M=columns.advantages_M.to(dtype),
        weights_M=columns.weights_M,
        row_M=columns.row_M,
        group_R=columns.group_R,
    )
    assert SURROGATES["dppo_kl"].clipped_M(given).tolist() == [False, False, True]
