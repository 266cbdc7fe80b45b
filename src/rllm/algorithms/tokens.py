"""The input and the output of a loss: one term for each trained token of a micro-batch.

samples ──► backend: forward pass ──► TokenInputs [M] ──► Loss.terms [M] ──► Σ weight · term ──► backward
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rllm.algorithms.aggregation import Aggregation
from rllm.types.sample import TrainingSample


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenInputs:
    """The M trained tokens of a micro-batch, row after row, as a loss sees them.

    All tokens of a row are in one micro-batch, and so are all rows of a group if the loss needs whole groups.
    """

    new_M: Tensor
    """Log-probability under the weights that are updated, in nats; carries the gradient."""
    old_M: Tensor
    """Under the weights before the first update of the step."""
    advantages_M: Tensor
    weights_M: Tensor
    """The factor of each token's term; see `token_weights`."""
    row_M: Tensor
    """Which of the R rows each token belongs to, in ascending order."""
    group_R: Tensor
    """Which group (attempts at one task by one role, or the two sides of a preference) each row belongs
    to."""
    entropy_M: Tensor | None = None
    """Entropy of the policy where the token was sampled; carries the gradient. Only if the loss needs it."""
    measured_entropy_M: Tensor | None = None
    """The same without gradient, where somebody looks at it."""
    rollout_M: Tensor | None = None
    """The sampler's log-probability at the time of sampling; None where `old_M` is just that."""
    ref_M: Tensor | None = None
    """Under the reference policy, or the teacher."""
    divergence_M: Tensor | None = None
    """The divergence between the teacher's distribution and the student's where the token was sampled;
    carries the gradient. Only for `WholeVocabulary`."""
    teacher_M: Tensor | None = None
    """The teacher's log-probability of the token; with `divergence_M`."""
    new_values_M: Tensor | None = None
    """The critic's values; carries the gradient."""
    values_M: Tensor | None = None
    """The critic's values before the first update of the step."""
    returns_M: Tensor | None = None
    chosen_M: Tensor | None = None
    """1 where `clip_cov` or `kl_cov` treats the token apart, 0 elsewhere."""


class Loss(Protocol):
    """One term for each trained token."""

    @property
    def aggregation(self) -> Aggregation: ...

    @property
    def needs_every_row(self) -> bool:
        """False: rows with advantage 0 have gradient 0 and need not be computed."""
        ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def needs_whole_groups(self) -> bool:
        """True: terms of a row depend on other rows of its group. False: a group that is larger than the
        token budget may be split. A row is never split."""
        ...

    def terms(self, tokens: TokenInputs) -> Tensor:
        """[M] loss of each token, not weighted yet."""
        ...

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        """[M] what to report of each token; its mean over the tokens of an update becomes a metric."""
        ...


def has_gradient(sample: TrainingSample, loss: Loss) -> bool:
    """Whether the row has a part in the gradient of the loss."""
    return loss.needs_every_row or bool(sample.advantages_T.any())


def row_sums(values_M: Tensor, row_M: Tensor) -> tuple[Tensor, Tensor]:
    """[M] the sum over each token's row, in float64 and without gradient; [M] how many tokens the row has.

    `row_M` ascends. Every row is summed by itself, in order: nothing else in the micro-batch plays a part.
    """
    length_R = torch.bincount(row_M)
    sum_R = torch.segment_reduce(values_M.detach().double(), "sum", lengths=length_R)
    return sum_R[row_M], length_R[row_M]


def row_means(values_M: Tensor, row_M: Tensor) -> Tensor:
    """[M] the mean over each token's row, without gradient."""
    sums_M, counts_M = row_sums(values_M, row_M)
    return (sums_M / counts_M).to(values_M.dtype)
