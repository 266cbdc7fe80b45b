"""Rows of an output layer that belong to no token of the tokenizer.

Embeddings are often padded to a round number of rows (Qwen2.5: 151,936 rows, 151,665 tokens). A padded id
has no text, so it must not be sampled. Its logit is the same constant in the sampler, the trainer and in
scoring, so that all of them share one distribution and their log-probabilities agree.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

UNUSED_LOGIT = -1e4
"""Low enough for a probability of exactly 0 in float32. Finite, because the terms of an entropy or a
divergence multiply a probability by a log-probability, and 0 · -inf is not a number."""


def mask_unused_rows(model: Any, token_ids: Collection[int]) -> None:
    """Let `model` give UNUSED_LOGIT to every id of its vocabulary that is not in `token_ids`."""
    num_rows: int = model.vocab_size
    ids = sorted(set(range(num_rows)) - set(token_ids))
    if ids and ids[0] == num_rows - len(ids):  # padding, which takes no list of ids
        model.num_used_rows = ids[0]
    elif ids:
        model.unused_ids = torch.tensor(ids, device=next(model.parameters()).device)


def with_unused_rows_masked(
    logits_N_V: Tensor, num_used_rows: int | None, unused_ids: Tensor | None
) -> Tensor:
    """[N, V] `logits_N_V`, changed in place from `num_used_rows` on, or at `unused_ids`."""
    if num_used_rows is None and unused_ids is None:
        return logits_N_V
    return _Masked.apply(logits_N_V, num_used_rows, unused_ids)


class _Masked(torch.autograd.Function):
    """Gradients pass as they are: a probability of 0 has none. So no copy of them is made."""

    @staticmethod
    def forward(ctx: Any, logits_N_V: Tensor, num_used_rows: int | None, unused_ids: Tensor | None) -> Tensor:
        ctx.mark_dirty(logits_N_V)
        if num_used_rows is not None:
            logits_N_V[:, num_used_rows:] = UNUSED_LOGIT
        if unused_ids is not None:
            logits_N_V.index_fill_(1, unused_ids, UNUSED_LOGIT)
        return logits_N_V

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None
