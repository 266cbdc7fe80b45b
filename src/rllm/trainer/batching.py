"""Token rows ──► packed micro-batches: no padding in the linear layers, a shared prompt computed once.

    group g:   prefix (P tokens, shared by all its rows)         one copy in the flat row of tokens
               ├── suffix of row 1 (C1 tokens)                   sees the prefix and itself
               ├── suffix of row 2 (C2 tokens)
               └── …
    tokens_N = prefix 1, prefix 2, …, suffix 1, suffix 2, …      in the order of their buckets

The keys and values of a prefix are computed once, and the gradients of all rows meet in it: the same gradient
as without sharing, at a fraction of the work. Which rows go together is decided in `rllm.trainer.packing`,
how they see each other in `rllm.trainer.batching_attention`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.trainer.batching_attention import PackedAttention
from rllm.trainer.packing import PrefixGroup, WeightedRow, bucket_order, packed_groups

OPTIONAL_COLUMNS = ("rollout_logprobs", "ref_logprobs", "values", "returns")
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
    members = [(number, row) for number, group in enumerate(groups) for row in group.rows]
    shared = np.array([groups[number].prefix_length for number, _ in members])
    lengths = np.array([row.last for _, row in members]) - shared
    order = bucket_order(shared, lengths)
    prefixes = [group.rows[0].sample.token_ids_T[: group.prefix_length] for group in groups]
    positions = [np.arange(group.prefix_length) for group in groups]
    tokens, kept, trained = prefixes, [], _TrainedTokens()
    cursor = sum(group.prefix_length for group in groups)
    for index in order.tolist():
        number, row = members[index]
        start = groups[number].prefix_length
        tokens.append(row.sample.token_ids_T[start : row.last])
        positions.append(np.arange(start, row.last))
        kept.append(row.places - 1 - start)
        trained.add(row, cursor - start)
        cursor += row.last - start
    return PackedBatch(
        tokens_N=torch.from_numpy(np.concatenate(tokens)).to(device),
        positions_N=torch.from_numpy(np.concatenate(positions)).to(device),
        attention=PackedAttention(
            [group.prefix_length for group in groups],
            lengths[order].tolist(),
            [members[index][0] for index in order.tolist()],
            kept,
            device,
        ),
        **trained.tensors(device),
    )


class _TrainedTokens:
    """Collects the trained tokens of one micro-batch."""

    def __init__(self) -> None:
        self.columns: dict[str, list[NDArray[np.generic]]] = {}
        self.optional: dict[str, list[NDArray[np.generic]]] = {}
        self.num_rows = 0
        self.number_of: dict[tuple[str, str], int] = {}
        self.groups: list[int] = []

    def add(self, row: WeightedRow, shift: int) -> None:
        """`shift` leads from a place in the row to one in the flat row of tokens."""
        place, sample = row.places, row.sample
        number = self.num_rows
        self.num_rows += 1
        self.groups.append(self.number_of.setdefault(sample.group_key, len(self.number_of)))
        for name, values in (
            ("predicted_by_M", place - 1 + shift),
            ("targets_M", sample.token_ids_T[place]),
            ("old_logprobs_M", sample.logprobs_T[place]),
            ("advantages_M", sample.advantages_T[place]),
            ("weights_M", row.weights_T[place]),
            ("temperature_M", np.full(len(place), sample.temperature, dtype=np.float32)),
            ("row_M", np.full(len(place), row.index, dtype=np.int64)),
            ("place_M", place),
            ("rank_M", np.full(len(place), number, dtype=np.int64)),
        ):
            self.columns.setdefault(name, []).append(values)
        for name in OPTIONAL_COLUMNS:
            values_T = getattr(sample, f"{name}_T")
            if values_T is not None:
                self.optional.setdefault(name, []).append(values_T[place])

    def tensors(self, device: torch.device) -> dict[str, Any]:
        """The fields of a `PackedBatch` about its trained tokens, by name."""
        joined = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        tensors = {
            name: values if name in ("row_M", "place_M") else torch.from_numpy(values).to(device)
            for name, values in joined.items()
        }
        for name, parts in self.optional.items():
            if len(parts) != self.num_rows:
                raise ValueError(f"{len(parts)} of {self.num_rows} samples have {name}; all must, or none.")
        return {
            **tensors,
            "plain": bool((joined["temperature_M"] == 1.0).all()),
            "group_R": torch.tensor(self.groups, device=device),
            "optional": {
                name: torch.from_numpy(np.concatenate(parts)).to(device)
                for name, parts in self.optional.items()
            },
        }
