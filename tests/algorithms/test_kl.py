"""KL estimates against scalar formulas, verl, and exact expectations over a small vocabulary."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.algorithms.kl import KL_KINDS, AdaptiveKL, kl_rewards, kl_terms
from rllm.config import algorithm as config_algorithm
from rllm.errors import ConfigError

GAPS = torch.linspace(-4.0, 4.0, 81, dtype=torch.float64)
VALUES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "mse": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": lambda d: abs(d),
}
SLOPES = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "mse": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "abs": lambda d: math.copysign(1.0, d) if abs(d) > 1e-12 else 0.0,
}


def _terms(new: Tensor, ref: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The terms, and their gradient."""
    new = new.clone().requires_grad_()
    terms = kl_terms(new, ref, kind)
    terms.sum().backward()
    assert new.grad is not None
    return terms.detach(), new.grad


@pytest.mark.parametrize("kind", KL_KINDS)
def test_values_and_slopes_are_those_of_the_formula_to_the_tenth_digit(kind: str) -> None:
    ref = torch.full_like(GAPS, -2.0)
    terms, slopes = _terms(ref + GAPS, ref, kind)
    plain = kind.removesuffix("+")
    slope_of = SLOPES["k2" if kind.endswith("+") else plain]
    gaps = ((ref + GAPS) - ref).tolist()
    assert terms.tolist() == pytest.approx([VALUES[plain](d) for d in gaps], abs=1e-10)
    assert slopes.tolist() == pytest.approx([slope_of(d) for d in gaps], abs=1e-10)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "mse"])
def test_the_gradient_is_the_slope_of_the_value(kind: str) -> None:
    ref = torch.full_like(GAPS, -2.0)
    new = ref + GAPS + 0.013  # away from the corner of abs
    _, slopes = _terms(new, ref, kind)
    difference = (kl_terms(new + 1e-5, ref, kind) - kl_terms(new - 1e-5, ref, kind)) / 2e-5
    assert slopes.tolist() == pytest.approx(difference.tolist(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("theirs", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"])
def test_values_and_gradients_are_verls(verl_losses: dict[str, Any], theirs: str) -> None:
    mask = torch.tensor(verl_losses["mask"], dtype=torch.bool)
    new, ref, value, grad = (
        torch.tensor(each, dtype=torch.float64)[mask]
        for each in (verl_losses["new"], verl_losses["ref"], *verl_losses["kl"][theirs].values())
    )
    terms, slopes = _terms(new, ref, {"kl": "k1", "low_var_kl": "k3"}.get(theirs, theirs))
    assert (terms - value).abs().max() < 1e-6
    assert (slopes - grad).abs().max() < 1e-6


def test_a_large_gap_is_not_cut_as_it_is_in_verl() -> None:
    new, ref = torch.tensor([-30.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    terms, slopes = _terms(new, ref, "k3")
    assert terms.item() == pytest.approx(math.exp(29) - 30)  # verl: 10
    assert slopes.item() == pytest.approx(1 - math.exp(29))  # verl: 0


class Vocabulary:
    """A policy and a reference over five tokens; expectations are sums over all of them."""

    logits = torch.tensor([0.3, -1.1, 0.8, 0.0, -0.4], dtype=torch.float64)
    ref = torch.tensor([-0.5, 0.2, 0.1, 0.9, -1.3], dtype=torch.float64).log_softmax(0)

    @classmethod
    def expected(cls, kind: str) -> tuple[float, Tensor]:
        """Mean of the estimate over tokens of the policy, and what the mean gradient of the loss is."""
        logits = cls.logits.clone().requires_grad_()
        logprobs = logits.log_softmax(0)
        mean = (logprobs.exp().detach() * kl_terms(logprobs, cls.ref, kind)).sum()
        mean.backward()
        assert logits.grad is not None
        return float(mean.detach()), logits.grad

    @classmethod
    def exact(cls, *, reverse: bool) -> tuple[float, Tensor]:
        """KL(policy, reference), or KL(reference, policy) if `reverse`, and its gradient."""
        logits = cls.logits.clone().requires_grad_()
        new = logits.log_softmax(0)
        kl = (cls.ref.exp() * (cls.ref - new)).sum() if reverse else (new.exp() * (new - cls.ref)).sum()
        kl.backward()
        assert logits.grad is not None
        return float(kl.detach()), logits.grad


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_the_mean_of_k1_and_k3_is_the_divergence(kind: str) -> None:
    assert Vocabulary.expected(kind)[0] == pytest.approx(Vocabulary.exact(reverse=False)[0], abs=1e-12)


def test_as_a_loss_k1_teaches_nothing_k2_the_divergence_and_k3_the_other_one() -> None:
    divergence, other = (Vocabulary.exact(reverse=reverse)[1] for reverse in (False, True))
    assert (divergence - other).abs().max() > 0.05
    assert Vocabulary.expected("k1")[1].abs().max() < 1e-12
    assert (Vocabulary.expected("k3")[1] - other).abs().max() < 1e-12
    for kind in ("k2", "mse", "k1+", "k3+", "abs+"):
        assert (Vocabulary.expected(kind)[1] - divergence).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [kind for kind in KL_KINDS if not kind.endswith("+")])
def test_what_is_paid_is_what_the_loss_would_be(kind: str) -> None:
    new, ref = np.linspace(-3, -0.1, 9, dtype=np.float32), np.linspace(-0.2, -2.5, 9, dtype=np.float32)
    paid = kl_rewards(new, ref, kind)
    assert paid.dtype == np.float64
    expected = kl_terms(torch.from_numpy(new).double(), torch.from_numpy(ref).double(), kind)
    assert paid.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_a_gradient_is_refused_where_there_is_none_and_so_is_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match=r"'k3\+'.*gradient"):
        kl_rewards(np.zeros(1), np.zeros(1), "k3+")
    with pytest.raises(ConfigError, match=r"KL.*`k4`.*k1, k2, k3"):
        kl_terms(torch.zeros(1), torch.zeros(1), "k4")


def test_what_the_configuration_offers_is_what_there_is() -> None:
    assert set(config_algorithm.KL_KINDS) == set(KL_KINDS)


def test_the_coefficient_rises_above_the_target_and_falls_below_it_within_bounds() -> None:
    control = AdaptiveKL(coef=0.1, target=0.05)
    coefs = []
    for kl in (0.055, 5.0, 0.0, 0.05):
        control.update(kl)
        coefs.append(control.coef)
    assert coefs == pytest.approx([0.101, 0.101 * 1.02, 0.101 * 1.02 * 0.98, 0.101 * 1.02 * 0.98])


def test_a_resumed_controller_goes_on_where_it_was() -> None:
    whole = AdaptiveKL(coef=0.2, target=0.05, horizon=3)
    coef = 0.2
    for kl in (0.3, 0.0, 0.02, 0.09):
        whole.update(kl)
        resumed = AdaptiveKL(coef=coef, target=0.05, horizon=3)
        resumed.update(kl)
        coef = resumed.coef
    assert whole.coef == coef != 0.2


def test_the_controller_brings_the_divergence_to_its_target() -> None:
    """A policy whose divergence is 1 / (1 + coef): the coefficient finds 1 / target - 1."""
    control = AdaptiveKL(coef=0.5, target=0.1, horizon=5)
    for _ in range(400):
        control.update(1 / (1 + control.coef))
    assert control.coef == pytest.approx(9.0, rel=1e-3)
