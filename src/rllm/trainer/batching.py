"""Token rows ──► packed micro-batches: no padding in the linear layers, a shared prompt computed once.

    group g:   prefix (P tokens, shared by all its rows)         one copy in the flat row of tokens
               ├── suffix of row 1 (C1 tokens)                   sees the prefix and itself
               ├── suffix of row 2 (C2 tokens)
               └── …
    tokens_N = prefix 1, prefix 2, …, suffix 1, suffix 2, …

Rows of one group (attempts at one task) share their longest common beginning, up to but not including the
first token that is trained. Its keys and values are computed once, and the gradients of all rows meet in it:
the same gradient as without sharing, at a fraction of the work. Rows are cut behind their last trained token,
because nothing after it is predicted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rllm.models.decoder import take_rows
from rllm.types.sample import TrainingSample

OPTIONAL_COLUMNS = ("rollout_logprobs", "ref_logprobs", "values", "returns")
"""Of a sample, where it has them."""


@dataclass(kw_only=True, slots=True)
class WeightedRow:
    """A sample and what an update knows about its tokens."""

    index: int
    """Position in the caller's list of samples."""
    sample: TrainingSample
    weights_T: NDArray[np.float64]
    """Weight of each token's loss term; 0 where the token is not trained."""


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
    attention: "PackedAttention"


class PackedAttention:
    """Attention over prefixes and the suffixes that share them. Callable as a decoder's `attend`.

    In the last layer only the states that predict a trained token are wanted: there are `num_kept_S` of them
    in each suffix, `kept_offset_M` tokens from its start.
    """

    def __init__(
        self,
        prefix_lengths: Sequence[int],
        suffix_lengths: Sequence[int],
        group_of_suffix: Sequence[int],
        num_kept_S: Sequence[int],
        kept_offset_M: Tensor,
        device: torch.device,
    ) -> None:
        self.num_prefix = sum(prefix_lengths)
        self.longest_prefix = max(prefix_lengths, default=0)
        self.longest_suffix = max(suffix_lengths)
        self.prefix = _Padding(prefix_lengths, device) if self.longest_prefix else None
        self.suffix = _Padding(suffix_lengths, device)
        self.kept = _Padding(num_kept_S, device)
        self.group_S = torch.tensor(group_of_suffix, device=device)
        self.belongs_G_S = F.one_hot(self.group_S, len(prefix_lengths)).t()
        """1 where a suffix belongs to a group."""
        prefix_length_S = torch.tensor(prefix_lengths, device=device)[self.group_S]
        self._sees_prefix_S1P = (
            torch.arange(self.longest_prefix, device=device) < prefix_length_S.unsqueeze(1)
        ).unsqueeze(1)
        offset_C = torch.arange(self.longest_suffix, device=device)
        self.mask_full = self._mask(offset_C.expand(len(suffix_lengths), -1)) if self.longest_prefix else None
        self.mask_kept = self._mask(self.kept.pad_ids(kept_offset_M))

    def _mask(self, offset_S_Q: Tensor) -> Tensor:
        """[S, 1, Q, P + C]: a query sees its group's prefix, and its own suffix up to its offset."""
        own = torch.arange(self.longest_suffix, device=offset_S_Q.device) <= offset_S_Q.unsqueeze(-1)
        prefix = self._sees_prefix_S1P.expand(-1, own.shape[1], -1)
        return torch.cat((prefix, own), dim=-1).unsqueeze(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        split = self.num_prefix
        some_kept = len(q) != len(k)  # the last layer; were all states kept, the full masks would do the same
        k_all, v_all = self.suffix.pad(k[split:]), self.suffix.pad(v[split:])
        if self.prefix is None:
            if some_kept:
                return self._kept_states(q, k_all, v_all, grouped)
            q_suffix = self.suffix.pad(q)
            seen = F.scaled_dot_product_attention(q_suffix, k_all, v_all, is_causal=True, enable_gqa=grouped)
            return self.suffix.unpad(seen)
        k_prefix, v_prefix = self.prefix.pad(k[:split]), self.prefix.pad(v[:split])
        k_all = torch.cat((self._shared(k_prefix), k_all), dim=2)
        v_all = torch.cat((self._shared(v_prefix), v_all), dim=2)
        if some_kept:
            return self._kept_states(q, k_all, v_all, grouped)
        q_prefix, q_suffix = self.prefix.pad(q[:split]), self.suffix.pad(q[split:])
        seen_prefix = F.scaled_dot_product_attention(
            q_prefix, k_prefix, v_prefix, is_causal=True, enable_gqa=grouped
        )
        seen_suffix = F.scaled_dot_product_attention(
            q_suffix, k_all, v_all, attn_mask=self.mask_full, enable_gqa=grouped
        )
        return torch.cat((self.prefix.unpad(seen_prefix), self.suffix.unpad(seen_suffix)))

    def _kept_states(self, q_M: Tensor, k_all: Tensor, v_all: Tensor, grouped: bool) -> Tensor:
        seen = F.scaled_dot_product_attention(
            self.kept.pad(q_M), k_all, v_all, attn_mask=self.mask_kept, enable_gqa=grouped
        )
        return self.kept.unpad(seen)

    def _shared(self, prefix_G_K_P_d: Tensor) -> Tensor:
        """[S, K, P, d] the prefix of each suffix's group."""
        return _Share.apply(prefix_G_K_P_d, self.group_S, self.belongs_G_S)


class _Padding:
    """[sum of lengths, H, d] ⇄ [rows, H, longest, d]; the padding is never seen by a real token."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.rows, self.longest = len(lengths), max(lengths)
        length_R = torch.tensor(lengths, device=device)
        row_N = torch.repeat_interleave(torch.arange(self.rows, device=device), length_R)
        first_R = torch.cumsum(length_R, 0) - length_R
        offset_N = torch.arange(len(row_N), device=device) - first_R[row_N]
        self.place_N = row_N * self.longest + offset_N
        column = torch.arange(self.longest, device=device)
        # Padding repeats the row's last token: any finite value does, because nobody looks at it.
        self.source = (
            first_R.unsqueeze(1) + torch.minimum(column, length_R.unsqueeze(1) - 1).clamp(min=0)
        ).flatten()
        self.full = len(row_N) == self.rows * self.longest
        self.has_empty = bool((length_R == 0).any())

    def pad(self, flat: Tensor) -> Tensor:
        num_heads, head_dim = flat.shape[1], flat.shape[2]
        if self.full:
            padded = flat
        elif self.has_empty:
            padded = flat.new_zeros(self.rows * self.longest, num_heads, head_dim).index_copy(
                0, self.place_N, flat
            )
        else:
            padded = _Spread.apply(flat, self.source, self.place_N)
        return padded.view(self.rows, self.longest, num_heads, head_dim).transpose(1, 2)

    def pad_ids(self, flat: Tensor) -> Tensor:
        """[rows, longest] for numbers instead of vectors."""
        return flat.index_select(0, self.source).view(self.rows, self.longest)

    def unpad(self, padded: Tensor) -> Tensor:
        rows = padded.transpose(1, 2).flatten(0, 1)
        return rows if self.full else take_rows(rows, self.place_N)


class _Share(torch.autograd.Function):
    """index_select whose backward sums over each group in one matrix product, not row by row."""

    @staticmethod
    def forward(ctx: Any, prefix: Tensor, group_S: Tensor, belongs_G_S: Tensor) -> Tensor:
        ctx.save_for_backward(belongs_G_S)
        return prefix.index_select(0, group_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (belongs_G_S,) = grads, ctx.saved_tensors
        summed = belongs_G_S.to(grad.dtype) @ grad.flatten(1)
        return summed.view(-1, *grad.shape[1:]), None, None


class _Spread(torch.autograd.Function):
    """index_select whose backward gathers: padding repeats tokens that nobody reads, so only one place has a
    gradient."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, source: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        return flat.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (place_N,) = grads, ctx.saved_tensors
        return grad.index_select(0, place_N), None, None


def micro_batches(
    rows: Sequence[WeightedRow], max_tokens: int, device: torch.device, *, share_prefixes: bool = True
) -> Iterator[PackedBatch]:
    """Micro-batches of at most `max_tokens` padded tokens (a single larger group gets its own), long rows
    together."""
    groups = [group for group in _prefix_groups(rows, share_prefixes=share_prefixes) if group.rows]
    groups.sort(key=lambda group: (-group.longest, group.rows[0].sample.order_key))
    chunk: list[_Group] = []
    num_rows, widest = 0, 0
    for group in groups:
        wide = max(widest, group.longest)
        if chunk and (num_rows + len(group.rows)) * wide > max_tokens:
            yield _pack(chunk, device)
            chunk, num_rows, wide = [], 0, group.longest
        chunk.append(group)
        num_rows, widest = num_rows + len(group.rows), wide
    if chunk:
        yield _pack(chunk, device)


@dataclass(slots=True)
class _Group:
    prefix_length: int
    rows: list[WeightedRow]
    ends: list[int]
    """One past the last trained token of each row."""

    @property
    def longest(self) -> int:
        return max(self.ends) - self.prefix_length


def _prefix_groups(rows: Sequence[WeightedRow], *, share_prefixes: bool) -> list[_Group]:
    by_key: dict[tuple[str, ...], list[WeightedRow]] = {}
    for row in rows:
        if not row.weights_T.any():
            continue
        key = row.sample.group_key if share_prefixes else (*row.sample.group_key, str(row.index))
        by_key.setdefault(key, []).append(row)
    groups: list[_Group] = []
    for members in by_key.values():
        ends = [int(np.flatnonzero(row.weights_T)[-1]) + 1 for row in members]
        first_trained = min(int(np.flatnonzero(row.weights_T)[0]) for row in members)
        shared = (
            _shared_length([row.sample.token_ids_T for row in members], first_trained)
            if len(members) > 1
            else 0
        )
        groups.append(_Group(shared, members, ends))
    return groups


def _shared_length(rows: Sequence[NDArray[np.int64]], limit: int) -> int:
    """Length of the common beginning; at most `limit` - 1, so that the token that predicts the first trained
    one is in every suffix."""
    limit = max(0, min(limit - 1, *(len(row) for row in rows)))
    head = rows[0][:limit]
    shared = limit
    for row in rows[1:]:
        differing = np.flatnonzero(row[:shared] != head[:shared])
        if len(differing):
            shared = int(differing[0])
    return shared


def _pack(groups: Sequence[_Group], device: torch.device) -> PackedBatch:
    prefix_lengths = [group.prefix_length for group in groups]
    prefixes = [group.rows[0].sample.token_ids_T[: group.prefix_length] for group in groups]
    suffixes, positions, group_of_suffix, suffix_lengths, kept_offsets = [], [], [], [], []
    trained = _TrainedTokens()
    cursor = sum(prefix_lengths)
    for number, group in enumerate(groups):
        for row, end in zip(group.rows, group.ends, strict=True):
            start = group.prefix_length
            last = end - 1  # the last trained token is a target and predicts nothing
            suffixes.append(row.sample.token_ids_T[start:last])
            positions.append(np.arange(start, last))
            group_of_suffix.append(number)
            suffix_lengths.append(last - start)
            kept_offsets.append(np.flatnonzero(row.weights_T[:end]) - 1 - start)
            trained.add(row, end, cursor - start)
            cursor += last - start
    tokens = np.concatenate([*prefixes, *suffixes])
    places = np.concatenate([*(np.arange(length) for length in prefix_lengths), *positions])
    return PackedBatch(
        tokens_N=torch.from_numpy(tokens).to(device),
        positions_N=torch.from_numpy(places).to(device),
        attention=PackedAttention(
            prefix_lengths,
            suffix_lengths,
            group_of_suffix,
            [len(offsets) for offsets in kept_offsets],
            torch.from_numpy(np.concatenate(kept_offsets)).to(device),
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

    def add(self, row: WeightedRow, end: int, shift: int) -> None:
        place = np.flatnonzero(row.weights_T[:end])
        sample = row.sample
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
