"""The measures of a loss, as means with the weights of the loss itself.

A backend reports means over tokens. Of a loss whose terms are those of pairs the mean over pairs is wanted,
so that a long pair counts no more than a short one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.algorithms.aggregation import Aggregation, token_weights
from rllm.algorithms.tokens import Loss, TokenInputs
from rllm.types.sample import TrainingSample


class MeasuredLoss:
    """A `Loss` for one update that keeps Σ weight · measure of all its micro-batches in `means`."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.means: dict[str, float] = {}

    @property
    def aggregation(self) -> Aggregation:
        return self._loss.aggregation

    @property
    def needs_every_row(self) -> bool:
        return self._loss.needs_every_row

    @property
    def needs_entropy(self) -> bool:
        return self._loss.needs_entropy

    @property
    def needs_whole_groups(self) -> bool:
        return self._loss.needs_whole_groups

    def terms(self, tokens: TokenInputs) -> Tensor:
        return self._loss.terms(tokens)

    @torch.no_grad()
    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        """Nothing: `means` has it."""
        for name, values_M in self._loss.measures(tokens).items():
            self.means[name] = self.means.get(name, 0.0) + float((values_M * tokens.weights_M).sum())
        return {}


def scored_tokens(
    samples: Sequence[TrainingSample], scores: Sequence[NDArray[np.float32]], aggregation: Aggregation
) -> TokenInputs:
    """All trained tokens of `samples` as a loss sees them, with the log-probabilities that `score` gave:
    without gradient, for measuring."""
    numbers: dict[tuple[str, str], int] = {}
    groups = [numbers.setdefault(sample.group_key, len(numbers)) for sample in samples]
    masks = [sample.trainable_T for sample in samples]
    rows = [np.full(int(mask_T.sum()), row) for row, mask_T in enumerate(masks)]

    def column(values: Sequence[NDArray[np.generic]]) -> Tensor:
        trainable_values = [values_T[mask_T] for values_T, mask_T in zip(values, masks, strict=True)]
        return torch.from_numpy(np.concatenate(trainable_values))

    references = [sample.ref_logprobs_T for sample in samples]
    reference_rows = [reference_T for reference_T in references if reference_T is not None]
    return TokenInputs(
        new_M=column(scores),
        old_M=column([sample.logprobs_T for sample in samples]),
        advantages_M=column([sample.advantages_T for sample in samples]),
        weights_M=column(token_weights(samples, aggregation)),
        row_M=torch.from_numpy(np.concatenate(rows)),
        group_R=torch.tensor(groups),
        ref_M=column(reference_rows) if len(reference_rows) == len(samples) else None,
    )
