"""Rewards of the attempts at one task in, one advantage per attempt out. Pure functions, one registry."""

from collections.abc import Callable

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


ESTIMATORS: dict[str, Callable[[FloatArray], FloatArray]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
}


def estimator_named(name: str) -> Callable[[FloatArray], FloatArray]:
    if name not in ESTIMATORS:
        raise ConfigError(f"There is no advantage estimator `{name}`; choose one of {', '.join(ESTIMATORS)}.")
    return ESTIMATORS[name]
