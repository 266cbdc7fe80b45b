"""Weights that make up for tokens which were sampled by another policy than the one that is updated.

    sampler (its kernels, its precision, older weights)   rollout_M
    trainer, before the first update of the step          old_M       ─ old / rollout ──► weight of the term
    trainer, now                                          new_M       ─ new / old ──────► the loss's own ratio

ρ = exp(old - rollout), over a token, or a row's tokens together. The weights carry no gradient and depend on
their row alone, so they are the same in every split into micro-batches. A term that is masked still counts in
the denominator of the aggregation; verl leaves rejected tokens out of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rllm.algorithms.tokens import row_means, row_sums
from rllm.errors import ConfigError, choices_of

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")


@dataclass(kw_only=True, slots=True, frozen=True)
class Correction:
    """Correction of a loss; see `correction_weights_M`."""

    mode: str
    level: str = "token"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"There is no correction `{self.mode}`; {choices_of(self.mode, MODES)}.")
        if self.level not in LEVELS:
            raise ConfigError(
                f"There is no level `{self.level}` of correction; {choices_of(self.level, LEVELS)}."
            )
        if not 0.0 <= self.low < self.high:
            raise ConfigError(
                f"`algorithm.correction_low` is {self.low} and `algorithm.correction_high` {self.high}; the "
                "first must be 0 or more, and below the second."
            )

    def weights_M(self, rollout_M: Tensor, old_M: Tensor, row_M: Tensor) -> Tensor:
        return correction_weights_M(
            rollout_M, old_M, row_M, level=self.level, mode=self.mode, low=self.low, high=self.high
        )


def importance_ratios_M(rollout_M: Tensor, old_M: Tensor, row_M: Tensor, level: str) -> Tensor:
    """[M] ρ of each token's `level`: its own, the product over its row, or the geometric mean over its row.

    A product that is too large for a float is infinite, so it is truncated or masked like other large ones.
    """
    log_ratio_M = (old_M - rollout_M).detach()
    if level == "token":
        return log_ratio_M.exp()
    if level == "sequence":
        return row_sums(log_ratio_M, row_M)[0].exp().to(old_M.dtype)
    if level == "geometric":
        return row_means(log_ratio_M, row_M).exp()
    raise ConfigError(f"There is no level `{level}` of correction; {choices_of(level, LEVELS)}.")


def correction_weights_M(
    rollout_M: Tensor, old_M: Tensor, row_M: Tensor, *, level: str, mode: str, low: float, high: float
) -> Tensor:
    """[M] weight of each token's term, without gradient.

    `truncate`: ρ cut to [low, high]. With low = 0 this is truncated importance sampling: Ionides 2008; per
    token Espeholt et al. 2018 (IMPALA, arXiv:1802.01561), and Yao et al. 2025 ("Your efficient RL framework
    secretly brings you off-policy RL training") for samplers that differ from the trainer. `mask`: ρ where
    low <= ρ <= high, and 0 elsewhere. Per token this is IcePop (Ling team 2025, arXiv:2510.18855, with [0.5,
    5]); per sequence the masked importance sampling of Liu et al. 2025 ("When speed kills stability").

    `sequence` is unbiased without bounds and varies more the longer the row; `token` leaves out how likely
    the row was to get that far; `geometric` (ρ of the row to the power of 1 / its tokens) is a measure of the
    row's mismatch that does not grow with its length, no unbiased weight. verl's geometric mask has weight 1
    inside the bounds; ours has ρ, which is within them.
    """
    ratio_M = importance_ratios_M(rollout_M, old_M, row_M, level)
    if mode == "truncate":
        return ratio_M.clamp(low, high)
    if mode == "mask":
        return torch.where(_inside(ratio_M, low, high), ratio_M, torch.zeros_like(ratio_M))
    raise ConfigError(f"There is no correction `{mode}`; {choices_of(mode, MODES)}.")


def out_of_bounds_M(rollout_M: Tensor, old_M: Tensor, row_M: Tensor, correction: Correction) -> Tensor:
    """[M] whether the token's weight is another than its ρ."""
    return ~_inside(
        importance_ratios_M(rollout_M, old_M, row_M, correction.level), correction.low, correction.high
    )


def _inside(ratio_M: Tensor, low: float, high: float) -> Tensor:
    return (low <= ratio_M) & (ratio_M <= high)
