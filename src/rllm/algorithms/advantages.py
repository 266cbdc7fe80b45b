"""Rewards in, one advantage per attempt out. Pure functions, one registry.

What is compared with each other is either the attempts at one task, or all attempts of a step; always those
of one role.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rllm.errors import ConfigError

FloatArray = NDArray[np.float64]


def grpo_advantages(rewards_G: FloatArray, *, eps: float = 1e-6) -> FloatArray:
    """A_i = (r_i - mean(r)) / (std(r) + eps), over the G attempts at one task.

    Shao et al. 2024 (arXiv:2402.03300), outcome supervision. `std` is the population one (ddof = 0); verl
    divides by the sample one (ddof = 1), which is larger by sqrt(G / (G - 1)). Equal rewards give zeros:
    nothing to compare, so nothing to learn. A group of one gives zero as well.
    """
    centered_G = rewards_G - rewards_G.mean()
    return centered_G / (rewards_G.std() + eps)


def dr_grpo_advantages(rewards_G: FloatArray) -> FloatArray:
    """A_i = r_i - mean(r).

    Liu et al. 2025 (arXiv:2503.20783), section 3: no division by the standard deviation.
    """
    return rewards_G - rewards_G.mean()


def reinforce_plus_plus_advantages(rewards_B: FloatArray, *, eps: float = 1e-6) -> FloatArray:
    """A_i = (r_i - mean(r)) / (std(r) + eps), over all attempts of a step by one role, whatever their task.

    Hu et al. 2025 (arXiv:2501.03262), without its KL term, normalised over attempts instead of tokens. A task
    that fails in every attempt is learned from: there is no group that could tie.
    """
    return grpo_advantages(rewards_B, eps=eps)


def reinforce_advantages(rewards_B: FloatArray) -> FloatArray:
    """A_i = r_i.

    Williams 1992, without a baseline: what is paid is done more often, also by all attempts alike.
    """
    return rewards_B


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimator:
    """A rule, and what it compares."""

    estimate: Callable[[FloatArray], FloatArray]
    within_groups: bool = True
    """The attempts at one task; otherwise all attempts of a step by the role."""
    has_baseline: bool = True
    """Rewards are compared with each other, so equal ones teach nothing."""


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(estimate=grpo_advantages),
    "dr_grpo": Estimator(estimate=dr_grpo_advantages),
    "reinforce_plus_plus": Estimator(estimate=reinforce_plus_plus_advantages, within_groups=False),
    "reinforce": Estimator(estimate=reinforce_advantages, within_groups=False, has_baseline=False),
}


def estimator_named(name: str) -> Estimator:
    if name not in ESTIMATORS:
        raise ConfigError(f"There is no advantage estimator `{name}`; choose one of {', '.join(ESTIMATORS)}.")
    return ESTIMATORS[name]
