"""Per-token losses of one update, as sums with weights that were fixed before the batch was split.

loss = Σ_tokens weight_T · term_T, where the weights of an update sum to 1. Because the weights know the whole
update, the sum over micro-batches, in any split and order, is the loss of the whole; there is no mean of
means.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.errors import ConfigError
from rllm.types.sample import TrainingSample


@dataclass(kw_only=True, slots=True, frozen=True)
class PolicyLoss:
    """Clipped policy gradient: -min(ρ A, clip(ρ, 1 - low, 1 + high) A), with ρ = exp(new - old).

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; different bounds are DAPO's clip-higher
    (arXiv:2503.14476).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: str = "token_mean"
    entropy_coef: float = 0.0
    """Weight of the policy's entropy, in nats, in what is maximised (Mnih et al. 2016, arXiv:1602.01783)."""

    @property
    def needs_every_row(self) -> bool:
        """Without entropy, rows with advantage 0 have gradient 0 and need not be computed."""
        return self.entropy_coef > 0.0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0.0

    def terms(
        self, new_T: Tensor, old_T: Tensor, advantages_T: Tensor, entropy_T: Tensor | None = None
    ) -> Tensor:
        """[T] unweighted loss of each trained token."""
        ratio_T = torch.exp(new_T - old_T)
        clipped_T = ratio_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        terms_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
        return terms_T if entropy_T is None else terms_T - self.entropy_coef * entropy_T


@dataclass(kw_only=True, slots=True, frozen=True)
class ImitationLoss:
    """Cross-entropy of the demonstrated tokens: -log π(token)."""

    aggregation: str = "token_mean"

    needs_every_row = True
    needs_entropy = False

    def terms(
        self, new_T: Tensor, old_T: Tensor, advantages_T: Tensor, entropy_T: Tensor | None = None
    ) -> Tensor:
        """[T] negative log-likelihood of each demonstrated token; nothing else plays a part."""
        return -new_T


Loss = PolicyLoss | ImitationLoss


def token_weights(samples: Sequence[TrainingSample], aggregation: str) -> list[NDArray[np.float64]]:
    """One [T] array per sample, 0 at untrained tokens, summing to 1 over the update.

    `token_mean`: every trained token counts the same. `sequence_mean`: every sequence with a trained token
    counts the same.
    """
    trainable = [sample.trainable_T for sample in samples]
    counts = [int(mask_T.sum()) for mask_T in trainable]
    if aggregation == "token_mean":
        scale = 1.0 / max(1, sum(counts))
        return [mask_T.astype(np.float64) * scale for mask_T in trainable]
    if aggregation == "sequence_mean":
        share = 1.0 / max(1, sum(count > 0 for count in counts))
        return [
            mask_T.astype(np.float64) * (share / max(1, count))
            for mask_T, count in zip(trainable, counts, strict=True)
        ]
    raise ConfigError(f"There is no aggregation `{aggregation}`; choose token_mean or sequence_mean.")
