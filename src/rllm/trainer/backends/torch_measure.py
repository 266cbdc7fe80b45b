"""The loss of a model on rows that it is not trained on: one forward pass, without gradients.

rows ──► micro-batches ──► hidden states ──► logits of some tokens at a time ──► loss, token accuracy
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rllm.models.batching import WeightedRow, micro_batches
from rllm.trainer.backends.logprobs import tokens_at_once
from rllm.types.sample import TrainingSample


@dataclass(kw_only=True, slots=True, frozen=True)
class RowMeasures:
    """Means over the labelled tokens of all rows."""

    loss: float
    """-log π(token), in nats."""
    token_accuracy: float
    """Share of the tokens that are the most likely ones."""
    num_tokens: int


def measure_rows(
    model: Any, samples: Sequence[TrainingSample], *, micro_batch_tokens: int, logits_mb: float
) -> RowMeasures:
    """Raises ValueError where no row has a labelled token."""
    device = next(model.parameters()).device
    rows = [
        WeightedRow(index=index, sample=sample, weights_T=sample.trainable_T.astype(np.float64))
        for index, sample in enumerate(samples)
    ]
    chunk = tokens_at_once(model, logits_mb)
    total_loss, num_right, num_tokens = 0.0, 0, 0
    with torch.no_grad():
        for batch in micro_batches(rows, micro_batch_tokens, device):
            hidden_U_D = batch.states(model)
            columns_U = [
                (
                    F.cross_entropy(
                        logits_C_V := model.logits(hidden_C_D).float(), targets_C, reduction="none"
                    ),
                    logits_C_V.argmax(dim=-1) == targets_C,
                )
                for hidden_C_D, targets_C in zip(
                    hidden_U_D.split(chunk), batch.targets_U.split(chunk), strict=True
                )
            ]
            loss_M, is_right_M = (
                batch.of_tokens(torch.cat(column)) for column in zip(*columns_U, strict=True)
            )
            total_loss += float(loss_M.sum())
            num_right += int(is_right_M.sum())
            num_tokens += len(loss_M)
    if not num_tokens:
        raise ValueError(f"None of {len(samples)} rows has a labelled token; there is nothing to measure.")
    return RowMeasures(
        loss=total_loss / num_tokens, token_accuracy=num_right / num_tokens, num_tokens=num_tokens
    )
