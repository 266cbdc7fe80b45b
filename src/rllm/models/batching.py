"""Token rows ──► packed micro-batches: no padding in the linear layers, a shared prompt computed once.

    group g:   prefix (P tokens, shared by all its rows)         one copy in the flat row of tokens
               ├── suffix of row 1 (C1 tokens)                   sees the prefix and itself
               ├── suffix of row 2 (C2 tokens)
               └── …
    tokens_N = prefix 1, prefix 2, …, suffix 1, suffix 2, …      in the order of their buckets

The keys and values of a prefix are computed once, and the gradients of all rows meet in it: the same gradient
as without sharing, at a fraction of the work. Which rows go together is decided in `rllm.models.packing`,
how they see each other in `rllm.models.batching_attention`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.models.batching_attention import PackedAttention
from rllm.models.packing import PrefixGroup, WeightedRow, bucket_order, packed_groups
from rllm.types.sample import TrainingSample

OPTIONAL_COLUMNS = ("rollout_logprobs", "ref_logprobs", "values", "returns", "chosen")
"""Of a sample, where it has them."""


@dataclass(kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch as flat tensors, and its attention."""

    tokens_N: Tensor
    positions_N: Tensor
    predicted_by_M: Tensor
    """[M] places in N whose hidden state predicts each trained token."""
    targets_M: Tensor
    old_logprobs_M: Tensor
    advantages_M: Tensor
    weights_M: Tensor
    temperature_M: Tensor
    plain: bool
    """All of them are 1."""
    row_M: NDArray[np.int64]
    """[M] index of the sample that each trained token belongs to."""
    place_M: NDArray[np.int64]
    """[M] position of each trained token in its sample."""
    rank_M: Tensor
    """[M] which of the R rows of the micro-batch each trained token belongs to."""
    group_R: Tensor
    """[R] which group each row belongs to."""
    optional: dict[str, Tensor]
    """[M] columns that only some samples have, such as `ref_logprobs`."""
    attention: PackedAttention


def micro_batches(
    rows: Sequence[WeightedRow],
    max_tokens: int,
    device: torch.device,
    *,
    share_prefixes: bool = True,
    whole_groups: bool = False,
) -> Iterator[PackedBatch]:
    """Micro-batches of at most `max_tokens` tokens; see `packed_groups` for what may be larger. The same rows
    in another order give the same micro-batches."""
    for groups in packed_groups(rows, max_tokens, share_prefixes=share_prefixes, whole_groups=whole_groups):
        yield _pack(groups, device)


def _pack(groups: Sequence[PrefixGroup], device: torch.device) -> PackedBatch:
    groups = sorted(groups, key=lambda group: (-group.prefix_length, group.key))
    prefix_lengths = [group.prefix_length for group in groups]
    members = [(number, row) for number, group in enumerate(groups) for row in group.rows]
    shared_S = np.array([prefix_lengths[number] for number, _ in members])
    lengths_S = np.array([row.last for _, row in members]) - shared_S
    order = bucket_order(shared_S, lengths_S)
    members = [members[index] for index in order.tolist()]
    shared_S, lengths_S = shared_S[order], lengths_S[order]
    rows = [row for _, row in members]
    heads = [group.rows[0].sample.token_ids_T[: group.prefix_length] for group in groups]
    tails = [
        row.sample.token_ids_T[start : row.last] for start, row in zip(shared_S.tolist(), rows, strict=True)
    ]
    sizes = np.concatenate((np.array(prefix_lengths), lengths_S))
    begins = np.cumsum(sizes) - sizes
    # Where a token stands less where it stands in its row.
    shifts = begins - np.concatenate((np.zeros(len(groups), dtype=np.int64), shared_S))
    trained_values = trained_columns(rows, shifts[len(groups) :], device)
    return PackedBatch(
        tokens_N=torch.from_numpy(np.concatenate((*heads, *tails))).to(device),
        positions_N=torch.from_numpy(np.arange(int(sizes.sum())) - np.repeat(shifts, sizes)).to(device),
        attention=PackedAttention(
            prefix_lengths,
            lengths_S.tolist(),
            [number for number, _ in members],
            [row.places - (start + 1) for start, row in zip(shared_S.tolist(), rows, strict=True)],
            device,
        ),
        **trained_values,
    )


def trained_columns(
    rows: Sequence[WeightedRow], shifts_R: NDArray[np.int64], device: torch.device
) -> dict[str, Any]:
    """The fields of a `PackedBatch` about its trained tokens, by name. `shifts_R` lead from a place in a row
    to one in the flat row of tokens."""
    samples = [row.sample for row in rows]
    counts_R = np.array([len(row.places) for row in rows])
    sizes_R = np.array([sample.num_tokens for sample in samples])
    place_M = np.concatenate([row.places for row in rows])
    among_all_M = place_M + np.repeat(np.cumsum(sizes_R) - sizes_R, counts_R)
    temperature_R = np.array([sample.temperature for sample in samples], dtype=np.float32)
    number_of: dict[tuple[str, str], int] = {}

    def of_each(columns: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(columns)[among_all_M]).to(device)

    def repeat(numbers_R: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.repeat(numbers_R, counts_R)).to(device)

    return {
        "predicted_by_M": torch.from_numpy(place_M + np.repeat(shifts_R - 1, counts_R)).to(device),
        "targets_M": of_each([sample.token_ids_T for sample in samples]),
        "old_logprobs_M": of_each([sample.logprobs_T for sample in samples]),
        "advantages_M": of_each([sample.advantages_T for sample in samples]),
        "weights_M": of_each([row.weights_T for row in rows]),
        "temperature_M": repeat(temperature_R),
        "plain": bool((temperature_R == 1.0).all()),
        "row_M": np.repeat([row.index for row in rows], counts_R),
        "place_M": place_M,
        "rank_M": repeat(np.arange(len(rows))),
        "group_R": torch.tensor(
            [number_of.setdefault(sample.group_key, len(number_of)) for sample in samples], device=device
        ),
        "optional": {
            name: of_each(columns)
            for name in OPTIONAL_COLUMNS
            if (columns := _columns_of_all(samples, f"{name}_T"))
        },
    }


def _columns_of_all(samples: Sequence[TrainingSample], name: str) -> list[NDArray[Any]]:
    """The optional column of each sample; nothing where none has it."""
    columns = [column for sample in samples if (column := getattr(sample, name)) is not None]
    if columns and len(columns) < len(samples):
        raise ValueError(
            f"{len(columns)} of {len(samples)} samples have {name.removesuffix('_T')}; all must, or none."
        )
    return columns
