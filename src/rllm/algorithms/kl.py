"""The divergence of the policy from a reference, token by token, from the sampled tokens alone.

d = log π(token) - log π_ref(token), for tokens sampled from π

    kind   value             mean of the value     gradient of the mean value, as a loss
    k1     d                 KL(π, π_ref)          0: as a loss it teaches nothing
    k2     d² / 2            close to KL           that of KL(π, π_ref)
    mse    another name of k2
    k3     exp(-d) - 1 + d   KL(π, π_ref), >= 0    that of KL(π_ref, π), the other way round
    abs    |d|
    k1+    d                 KL(π, π_ref)          that of k2: straight through
    k3+    exp(-d) - 1 + d   KL(π, π_ref), >= 0    that of k2: straight through
    abs+   |d|                                     that of k2: straight through

Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); GRPO (arXiv:2402.03300,
equation 4) has k3 in the loss. Which gradients are whose: Tang and Munos 2025 (arXiv:2506.09477); the tests
compute them exactly. The forms with `+` have the value of the kind and the gradient of k2. verl cuts d to ±20
and k3 to ±10; here nothing is cut, and a value that overflows is caught before the weights change.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.errors import ConfigError, choices_of

KL_KINDS = ("k1", "k2", "k3", "abs", "mse", "k1+", "k3+", "abs+")
STRAIGHT_THROUGH = "+"


def kl_terms(new_M: Tensor, ref_M: Tensor, kind: str) -> Tensor:
    """[M] the estimate of `kind` at each token; its gradient with respect to `new_M` is the kind's."""
    gap_M = new_M - ref_M.detach()
    if kind == "k1":
        return gap_M
    if kind in ("k2", "mse"):
        return 0.5 * gap_M.square()
    if kind == "k3":
        # Near 0 exp(-d) - 1 + d would lose most of its digits.
        return torch.expm1(-gap_M) + gap_M
    if kind == "abs":
        return gap_M.abs()
    if kind in KL_KINDS:
        value_M = kl_terms(new_M.detach(), ref_M, kind.removesuffix(STRAIGHT_THROUGH))
        carrier_M = 0.5 * gap_M.square()
        return value_M + (carrier_M - carrier_M.detach())
    raise ConfigError(f"There is no KL estimate `{kind}`; {choices_of(kind, KL_KINDS)}.")


def kl_rewards(
    logprobs_T: NDArray[np.floating], ref_logprobs_T: NDArray[np.floating], kind: str
) -> NDArray[np.float64]:
    """[T] the estimate of `kind` at each token, as something that is paid for: reward - coef · this.

    Ouyang et al. 2022 (arXiv:2203.02155), equation 2, with k1, which is unbiased there: its gradient comes
    from the advantage, not from the estimate. So the straight-through kinds are refused: nothing differs.
    """
    gap_T = np.asarray(logprobs_T, np.float64) - np.asarray(ref_logprobs_T, np.float64)
    if kind == "k1":
        return gap_T
    if kind in ("k2", "mse"):
        return 0.5 * gap_T**2
    if kind == "k3":
        return np.expm1(-gap_T) + gap_T
    if kind == "abs":
        return np.abs(gap_T)
    choices = ", ".join(each for each in KL_KINDS if not each.endswith(STRAIGHT_THROUGH))
    raise ConfigError(
        f"`algorithm.kl_kind` is {kind!r}, but a KL that is paid for as a reward has no gradient of its own; "
        f"choose one of {choices}."
    )


@dataclass(kw_only=True, slots=True)
class AdaptiveKL:
    """A coefficient that is raised while the KL is above its target, and lowered while it is below.

    coef ← coef · (1 + clip(KL / target - 1, -0.2, 0.2) / horizon), once a step: Ziegler et al. 2019
    (arXiv:1909.08593), section 2.2, where 1 / horizon is 0.1. verl's horizon is in samples. `coef` is all the
    state there is: a resumed run goes on with it.
    """

    coef: float
    target: float
    """In nats per token, like the KL it is compared with."""
    horizon: float = 10.0
    """In steps, 1 or more: the coefficient never changes its sign."""

    def update(self, kl: float) -> None:
        """`kl`: mean over the trained tokens of the step."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error / self.horizon
