"""Scores of token rows by a model, without changing it: log-probabilities, and values of a critic."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rllm.distributed import RankGroup
from rllm.models.batching import PackedBatch, micro_batches
from rllm.models.packing import WeightedRow, fewest, rank_shares
from rllm.trainer.backends.logprobs import selected_logprobs, tokens_at_once
from rllm.trainer.backends.sharding import computing_device, in_step, is_sharded
from rllm.types.sample import TrainingSample


def score_rows(
    model: Any,
    samples: Sequence[TrainingSample],
    *,
    micro_batch_tokens: int,
    logits_mb: float,
    share_prefixes: bool = True,
    ranks: RankGroup,
) -> list[NDArray[np.float32]]:
    """One [T] array per sample: log-probability of each trainable token at its sampling temperature, 0
    elsewhere. `model` is a `CausalModel`, of a policy, a reference or a teacher. Each of `ranks` computes its
    share of the rows, and all of them have the result."""

    chunk = tokens_at_once(model, logits_mb)

    def logprobs(batch: PackedBatch) -> Tensor:
        temperature_U = None if batch.plain else batch.temperature_U
        logprobs_U, _ = selected_logprobs(
            model, batch.states(model), batch.targets_U, temperature_U, chunk=chunk
        )
        return batch.of_tokens(logprobs_U)

    return _per_row(model, samples, logprobs, micro_batch_tokens, share_prefixes, ranks)


def value_rows(
    model: Any,
    value_head: nn.Module,
    samples: Sequence[TrainingSample],
    *,
    micro_batch_tokens: int,
    share_prefixes: bool,
    ranks: RankGroup,
) -> list[NDArray[np.float32]]:
    """One [T] array per sample: the critic's expectation before each trainable token, 0 elsewhere."""

    def values(batch: PackedBatch) -> Tensor:
        return batch.of_tokens(value_head(batch.states(model)))

    return _per_row(model, samples, values, micro_batch_tokens, share_prefixes, ranks)


def _per_row(
    model: Any,
    samples: Sequence[TrainingSample],
    of_batch: Callable[[PackedBatch], Tensor],
    micro_batch_tokens: int,
    share_prefixes: bool,
    ranks: RankGroup,
) -> list[NDArray[np.float32]]:
    values_by_row = [np.zeros(sample.num_tokens, dtype=np.float32) for sample in samples]
    rows = [
        WeightedRow(index=index, sample=sample, weights_T=sample.trainable_T.astype(np.float64))
        for index, sample in enumerate(samples)
    ]
    device = computing_device(model)

    def batches(rows: Sequence[WeightedRow]) -> Iterator[PackedBatch]:
        return micro_batches(rows, micro_batch_tokens, device, share_prefixes=share_prefixes)

    # Those of all ranks: a rank that has no rows of its own still computes a spare one.
    trained_rows = [row for row in rows if len(row.places)]
    if ranks.size > 1:
        # Ranks that split a model compute each pass together, on the same rows. A whole model, such as a
        # reference beside it, computes other rows on each rank.
        share = ranks.with_same_part() if model.is_split else ranks
        rows = rank_shares(rows, share.size, share_prefixes=share_prefixes)[share.rank]
    each: Iterator[tuple[PackedBatch, bool]] = ((batch, True) for batch in batches(rows))
    if is_sharded(model) and trained_rows:
        each = in_step(batches(rows), lambda: batches(fewest(trained_rows, False)), ranks)
    with torch.no_grad(), ranks.inside_torch():
        for batch, counts in each:
            values_M = of_batch(batch).float().cpu().numpy()
            if counts:
                for row, place, value in zip(batch.row_M, batch.place_M, values_M, strict=True):
                    values_by_row[row][place] = value
            ranks.beat()
    if is_sharded(model):
        # FSDP keeps its root gathered behind a forward pass, for a backward pass that never comes here.
        model.reshard()
    if ranks.size > 1:
        for theirs in ranks.gather({row.index: values_by_row[row.index] for row in rows}):
            for index, values_T in theirs.items():
                values_by_row[index] = values_T
    return values_by_row
