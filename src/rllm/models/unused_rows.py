"""Rows of an output layer that belong to no token of the tokenizer.

Embeddings are often padded to a round number of rows (Qwen2.5: 151,936 rows, 151,665 tokens). A padded id
has no text, so it must not be sampled. Its logit is the same constant in the sampler, the trainer and in
scoring, so that all of them share one distribution and their log-probabilities agree.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

UNUSED_LOGIT = -1e4
"""Low enough for a probability of exactly 0 in float32. Finite, because the terms of an entropy or a
divergence multiply a probability by a log-probability, and 0 · -inf is not a number."""


def mask_unused_rows(model: nn.Module, token_ids: Collection[int]) -> None:
    """Let `model` give UNUSED_LOGIT to every id of its vocabulary that is not in `token_ids`."""
    ids = sorted(set(range(model.vocab_size)) - set(token_ids))  # type: ignore[arg-type]
    if ids:
        device = next(model.parameters()).device
        model.unused_ids = torch.tensor(ids, device=device)


def with_unused_rows_masked(logits_N_V: Tensor, unused_ids: Tensor | None) -> Tensor:
    """[N, V] `logits_N_V`, changed in place."""
    return logits_N_V if unused_ids is None else logits_N_V.index_fill_(1, unused_ids, UNUSED_LOGIT)
