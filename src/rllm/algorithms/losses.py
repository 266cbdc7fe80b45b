"""Per-token losses of one update, as sums with weights that were fixed before the batch was split.

loss = Σ_tokens weight_T · term_T, where the weights of an update sum to 1. Because the weights know the whole
update, the sum over micro-batches, in any split and order, is the loss of the whole; there is no mean of
means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.errors import ConfigError
from rllm.types.sample import TrainingSample


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenInputs:
    """The M trained tokens of a micro-batch, row after row, as a loss sees them.

    All tokens of a row, and all rows of a group, are in one micro-batch.
    """

    new_M: Tensor
    """Log-probability under the weights that are updated, in nats; carries the gradient."""
    old_M: Tensor
    """Under the weights before the first update of the step."""
    advantages_M: Tensor
    weights_M: Tensor
    """What the term of each token is multiplied by; see `token_weights`."""
    row_M: Tensor
    """Which of the R rows each token belongs to, in ascending order."""
    group_R: Tensor
    """Which group (attempts at one task by one role, or the two sides of a preference) each row belongs
    to."""
    entropy_M: Tensor | None = None
    """Entropy of the policy where the token was sampled; carries the gradient. Only if the loss needs it."""
    rollout_M: Tensor | None = None
    """What the sampler said when it sampled; None where `old_M` is just that."""
    ref_M: Tensor | None = None
    """Under the reference policy, or the teacher."""
    new_values_M: Tensor | None = None
    """The critic's values; carries the gradient."""
    values_M: Tensor | None = None
    """The critic's values before the first update of the step."""
    returns_M: Tensor | None = None


class Loss(Protocol):
    """One term for each trained token."""

    @property
    def aggregation(self) -> str: ...

    @property
    def needs_every_row(self) -> bool:
        """False: rows with advantage 0 have gradient 0 and need not be computed."""
        ...

    @property
    def needs_entropy(self) -> bool: ...

    def terms(self, tokens: TokenInputs) -> Tensor:
        """[M] loss of each token, not weighted yet."""
        ...

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        """[M] what to report of each token; its mean over the tokens of an update becomes a metric."""
        ...


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

    def terms(self, tokens: TokenInputs) -> Tensor:
        ratio_M = torch.exp(tokens.new_M - tokens.old_M)
        clipped_M = ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        terms_M = -torch.minimum(ratio_M * tokens.advantages_M, clipped_M * tokens.advantages_M)
        return terms_M if tokens.entropy_M is None else terms_M - self.entropy_coef * tokens.entropy_M

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        log_ratio_M = tokens.new_M - tokens.old_M
        ratio_M = log_ratio_M.exp()
        clipped_M = (ratio_M < 1.0 - self.clip_low) | (ratio_M > 1.0 + self.clip_high)
        measures = {
            "ratio_mean": ratio_M,
            "clipped_frac": clipped_M.float(),
            "kl": ratio_M - 1.0 - log_ratio_M,
        }
        return measures if tokens.entropy_M is None else measures | {"entropy": tokens.entropy_M}


@dataclass(kw_only=True, slots=True, frozen=True)
class ImitationLoss:
    """Cross-entropy of the demonstrated tokens: -log π(token)."""

    aggregation: str = "token_mean"

    needs_every_row = True
    needs_entropy = False

    def terms(self, tokens: TokenInputs) -> Tensor:
        """[M] negative log-likelihood of each demonstrated token; nothing else plays a part."""
        return -tokens.new_M

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        return {}


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
