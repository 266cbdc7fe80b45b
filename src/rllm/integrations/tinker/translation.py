"""An update in the service's terms: a loss by name, and rows whose numbers carry the weights.

    Loss ──► ServiceLoss: name, bounds          TrainingSample + weights of its tokens ──► arrays of a datum

A service adds up the losses of all tokens of all rows. Ours are Σ weight · term, with weights that were fixed
for the whole update, and every term here is a product with the advantage: so advantage · weight in place of
the advantage gives exactly our loss, whatever the aggregation, and 0 masks a token.

SkyRL's server adds up differently: the mean over rows of each row's mean over its tokens (`row_means`). Its
numbers are multiplied by rows · tokens of the row, which gives the same sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllm.algorithms.losses import ImitationLoss, Loss, PolicyLoss
from rllm.algorithms.surrogates import ClippedRatio, ClippedWeight, ImportanceRatio, PolicyGradient
from rllm.errors import ConfigError
from rllm.types.sample import TrainingSample

Arrays = Mapping[str, NDArray[Any]]
"""By the names of a datum: `target_tokens`, and `weights`, or `logprobs` and `advantages`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ServiceLoss:
    """A loss by the service's name for it."""

    name: str
    bounds: dict[str, float] = field(default_factory=dict[str, float])
    """`clip_low_threshold` and `clip_high_threshold` of the importance ratio, of losses that have them."""
    is_imitation: bool = False
    """Every trained token counts alike, whatever its advantage is."""


def service_loss(loss: Loss, *, row_means: bool) -> ServiceLoss:
    """The service's loss with the gradient of `loss`. Raises ConfigError where it has none.

    -A · log π is a cross-entropy with the weight A. Where rows are averaged by their weights, that would
    divide by them again, so there it is a CISPO whose bounds hold the ratio at 1.
    """
    linear = "cispo" if row_means else "cross_entropy"
    linear_bounds = _bounds(0.0, 0.0) if row_means else {}
    if isinstance(loss, ImitationLoss):
        return ServiceLoss(name=linear, bounds=linear_bounds, is_imitation=True)
    if isinstance(loss, PolicyLoss):
        surrogate = loss.surrogate
        if isinstance(surrogate, ClippedRatio) and not surrogate.dual_clip:
            return ServiceLoss(name="ppo", bounds=_bounds(surrogate.clip_low, surrogate.clip_high))
        if isinstance(surrogate, ClippedWeight):
            return ServiceLoss(name="cispo", bounds=_bounds(surrogate.clip_low, surrogate.clip_high))
        if isinstance(surrogate, ImportanceRatio):
            return ServiceLoss(name="importance_sampling")
        if isinstance(surrogate, PolicyGradient):
            return ServiceLoss(name=linear, bounds=linear_bounds)
    raise ConfigError(f"A Tinker service has no loss like {type(loss).__name__}; choose another.")


def update_arrays(
    rows: Sequence[tuple[TrainingSample, NDArray[np.float64]]], loss: ServiceLoss, *, row_means: bool
) -> list[Arrays]:
    """The arrays that the service gets for each (row, [T] weights of its tokens)."""
    return [
        _row_arrays(sample, weights_T, loss, scale=len(rows) * (sample.num_tokens - 1) if row_means else 1)
        for sample, weights_T in rows
    ]


def scoring_arrays(sample: TrainingSample) -> Arrays:
    """The arrays of a row that is only scored: a cross-entropy of no weight."""
    targets = sample.token_ids_T[1:]
    return {"target_tokens": targets, "weights": np.zeros(len(targets), dtype=np.float32)}


def _row_arrays(
    sample: TrainingSample, weights_T: NDArray[np.float64], loss: ServiceLoss, *, scale: int
) -> Arrays:
    """A datum has what comes after each token: everything is shifted by one."""
    factor_T = weights_T * scale if loss.is_imitation else weights_T * scale * sample.advantages_T
    targets, factors = sample.token_ids_T[1:], factor_T[1:].astype(np.float32)
    if loss.name == "cross_entropy":
        return {"target_tokens": targets, "weights": factors}
    return {"target_tokens": targets, "logprobs": sample.logprobs_T[1:], "advantages": factors}


def _bounds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": 1.0 - low, "clip_high_threshold": 1.0 + high}
