"""Attention of a micro-batch: flat rows of tokens in, padded buckets inside, flat rows out.

    tokens_N =  prefix 1, prefix 2, …   suffix 1, suffix 2, suffix 3, …
                └ bucket ┘ └ bucket ┘   └─ bucket ─────┘ └─ bucket ─┘

Prefixes see themselves; a suffix sees the prefix of its group and itself. Buckets hold rows of like length,
so that little is padded, and are neighbours in the flat row: taking them apart and putting them together
again is one `split` and one `cat`, forward and backward.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rllm.models.attention import NONE, Wishes, attention
from rllm.models.decoder import take_rows
from rllm.models.packing import IntArray, buckets

OVERHEAD_ON_CPU = 6_000
"""What a bucket costs beyond its arithmetic, in products of a query and a key."""
OVERHEAD_ELSEWHERE = 1 << 20
"""An accelerator is done with a million of them while it starts the kernels."""


class PackedAttention:
    """Attention over prefixes and the suffixes that share them. Callable as a decoder's `attend`.

    In the last layer only the states that predict a trained token are wanted: `kept_S` has their offsets in
    each suffix.
    """

    def __init__(
        self,
        prefix_lengths: Sequence[int],
        suffix_lengths: Sequence[int],
        group_of_suffix: Sequence[int],
        kept_S: Sequence[IntArray],
        device: torch.device,
    ) -> None:
        """Prefixes and suffixes in the order of `bucket_order`."""
        overhead = OVERHEAD_ON_CPU if device.type == "cpu" else OVERHEAD_ELSEWHERE
        prefixes, suffixes = np.array(prefix_lengths, dtype=np.int64), np.array(suffix_lengths)
        group_S = np.array(group_of_suffix)
        shared_S = prefixes[group_S]
        prefixes = prefixes[prefixes > 0]  # they come first
        self.num_prefix = int(prefixes.sum())
        self.prefixes: list[_Padding] = []
        if len(prefixes):
            ends = np.cumsum(buckets(np.zeros_like(prefixes), prefixes, overhead))[:-1]
            self.prefixes = [_Padding(part, device) for part in np.split(prefixes, ends)]
        self.suffixes: list[_Suffixes] = []
        first = 0
        for size in buckets(shared_S, suffixes, overhead):
            part = slice(first, first + size)
            self.suffixes.append(
                _Suffixes(prefixes, suffixes[part], shared_S[part], group_S[part], kept_S[part], device)
            )
            first += size
        self.sizes = [each.num_tokens for each in (*self.prefixes, *(each.own for each in self.suffixes))]
        self.kept_sizes = [each.kept.num_tokens for each in self.suffixes]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, wishes: Wishes = NONE) -> Tensor:
        num_prefixes = len(self.prefixes)
        keys, values = k.split(self.sizes), v.split(self.sizes)
        prefix_kv = (k[: self.num_prefix], v[: self.num_prefix]) if num_prefixes else None
        own = zip(self.suffixes, keys[num_prefixes:], values[num_prefixes:], strict=True)
        if len(q) != len(k):  # the last layer; were all states kept, the full masks would do the same
            suffix_parts = zip(q.split(self.kept_sizes), own, strict=True)
            return _join([part.attend_kept(q, k, v, prefix_kv) for q, (part, k, v) in suffix_parts])
        queries = q.split(self.sizes)
        heads = zip(self.prefixes, queries, keys, values, strict=False)
        outputs = [
            _attend(part.pad(q), part.pad(k), part.pad(v), part.near(wishes, q.dtype), part, wishes)
            for part, q, k, v in heads
        ]
        tails = zip(queries[num_prefixes:], own, strict=True)
        return _join([*outputs, *(part.attend(q, k, v, prefix_kv, wishes) for q, (part, k, v) in tails)])

    @property
    def num_products(self) -> int:
        """Products of a query and a key in a full layer, those with padding included."""
        prefixes = sum(each.rows * each.longest**2 for each in self.prefixes)
        return prefixes + sum(each.num_products for each in self.suffixes)


Shared = tuple[Tensor, Tensor] | None
"""Keys and values of all prefixes."""


class _Suffixes:
    """Suffixes of like length, and the prefixes that they see."""

    def __init__(
        self,
        prefixes: IntArray,
        lengths: IntArray,
        shared: IntArray,
        group: IntArray,
        offsets_kept: Sequence[IntArray],
        device: torch.device,
    ) -> None:
        self.own = _Padding(lengths, device)
        self.kept = _Padding(np.array([len(offsets) for offsets in offsets_kept]), device)
        self.prefix: _Padding | None = None
        self.prefix_tokens: Tensor | None = None
        """Where the tokens of its prefixes are among those of all; None if it has all of them."""
        self.longest_prefix = int(shared.max())
        self._share: tuple[Tensor, Tensor] | None = None
        if self.longest_prefix:
            # A suffix without a prefix, among others with one, names any and sees nothing of it.
            is_seen = np.zeros(len(prefixes), dtype=np.bool_)
            is_seen[group[shared > 0]] = True
            visible_prefixes = np.flatnonzero(is_seen)
            self.prefix = _Padding(prefixes[visible_prefixes], device)
            if len(visible_prefixes) < len(prefixes):
                places = np.flatnonzero(np.repeat(is_seen, prefixes))
                self.prefix_tokens = torch.from_numpy(places).to(device)
            if len(visible_prefixes) < len(lengths) or not np.array_equal(group, visible_prefixes):
                place = (np.cumsum(is_seen) - 1)[np.where(shared > 0, group, visible_prefixes[0])]
                place_S = torch.from_numpy(place).to(device)
                self._share = place_S, F.one_hot(place_S, len(visible_prefixes)).t()
        self._shared = shared
        self._kept_offsets = np.concatenate(offsets_kept)
        self._masks: dict[tuple[str, int | None], Tensor] = {}
        self._device = device

    @property
    def num_products(self) -> int:
        return self.own.rows * self.own.longest * (self.longest_prefix + self.own.longest)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prefix_kv: Shared, wishes: Wishes) -> Tensor:
        q_all, k_all, v_all = self.own.pad(q), *self._visible_kv(k, v, prefix_kv)
        window = wishes.window if wishes.is_shorter(self.longest_prefix + self.own.longest) else None
        mask = None
        if self.prefix is not None or window is not None:
            mask = self._mask("full", q.dtype, window)
        return _attend(q_all, k_all, v_all, mask, self.own, wishes)

    def attend_kept(self, q: Tensor, k: Tensor, v: Tensor, prefix_kv: Shared) -> Tensor:
        k_all, v_all = self._visible_kv(k, v, prefix_kv)
        return _attend(self.kept.pad(q), k_all, v_all, self._mask("kept", q.dtype), self.kept)

    def _visible_kv(self, k: Tensor, v: Tensor, prefix_kv: Shared) -> tuple[Tensor, Tensor]:
        """[S, K, P + C, d] keys and values."""
        if self.prefix is None:
            return self.own.pad(k), self.own.pad(v)
        assert prefix_kv is not None, "a suffix with a prefix is in a micro-batch with prefixes"
        k_all, v_all = (
            torch.cat((self._of_each(whole), self.own.pad(part)), dim=2)
            for whole, part in zip(prefix_kv, (k, v), strict=True)
        )
        return k_all, v_all

    def _of_each(self, prefixes: Tensor) -> Tensor:
        """[S, K, P, d] the prefix of each suffix's group."""
        assert self.prefix is not None, "the caller asked"
        if self.prefix_tokens is not None:
            prefixes = take_rows(prefixes, self.prefix_tokens)
        padded_prefixes = self.prefix.pad(prefixes)
        return padded_prefixes if self._share is None else _Share.apply(padded_prefixes, *self._share)

    def _mask(self, which: str, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """[S, 1, Q, P + C], 0 where a query may look and -inf elsewhere: it sees its group's prefix, and its
        own suffix up to its offset, of both no more than the last `window` tokens. Made once, for all
        layers."""
        if (which, window) not in self._masks:
            offsets = np.arange(self.own.longest)[None, :]
            if which == "kept":
                offsets = self.kept.pad_ids(self._kept_offsets)
            ago = offsets[:, :, None] - np.arange(self.own.longest)
            own, columns = ago >= 0, np.arange(self.longest_prefix)
            prefix = (columns < self._shared[:, None])[:, None, :]
            if window is not None:
                own = own & (ago < window)
                prefix = prefix & (self._shared[:, None, None] + offsets[:, :, None] - columns < window)
            size = (self.own.rows, offsets.shape[1])
            both = (np.broadcast_to(part, (*size, part.shape[2])) for part in (prefix, own))
            visible = torch.from_numpy(np.concatenate(tuple(both), axis=2)).to(self._device).unsqueeze(1)
            mask = torch.zeros(visible.shape, dtype=dtype, device=self._device)
            self._masks[which, window] = mask.masked_fill_(~visible, float("-inf"))
        return self._masks[which, window]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, padding: "_Padding", wishes: Wishes = NONE
) -> Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    if (
        is_grouped and mask is not None and q.device.type != "cpu"
    ):  # the kernels that take a mask take no groups
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return padding.unpad(attention(q, k, v, mask, wishes, is_causal=mask is None))


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


class _Padding:
    """[sum of lengths, H, d] ⇄ [rows, H, longest, d]; lengths are above 0, and the padding is never seen by a
    real token."""

    def __init__(self, lengths: IntArray, device: torch.device) -> None:
        self.rows, self.longest = len(lengths), int(lengths.max())
        self.num_tokens = int(lengths.sum())
        self._device = device
        self.full = self.num_tokens == self.rows * self.longest
        if not self.full:
            firsts = np.cumsum(lengths) - lengths
            # Padding repeats the row's last token: any finite value does, because nobody looks at it.
            column = np.minimum(np.arange(self.longest), lengths[:, None] - 1)
            self._source: NDArray[np.int64] = firsts[:, None] + column
            row_N = np.repeat(np.arange(self.rows), lengths)
            places = row_N * self.longest + np.arange(self.num_tokens) - firsts[row_N]
            self.place_N = torch.from_numpy(places).to(device)
            self.source = torch.from_numpy(self._source.ravel()).to(device)

    def pad(self, flat: Tensor) -> Tensor:
        num_heads, head_dim = flat.shape[1], flat.shape[2]
        padded = flat if self.full else _Spread.apply(flat, self.source, self.place_N)
        return padded.reshape(self.rows, self.longest, num_heads, head_dim).transpose(1, 2)

    def pad_ids(self, flat: IntArray) -> IntArray:
        """[rows, longest] for numbers instead of vectors."""
        return flat.reshape(self.rows, self.longest) if self.full else flat[self._source]

    def near(self, wishes: Wishes, dtype: torch.dtype) -> Tensor | None:
        """[1, 1, longest, longest] mask of a window, 0 where a query may look and -inf elsewhere; None where
        every key up to its own place is in it."""
        if not wishes.is_shorter(self.longest):
            return None
        places = torch.arange(self.longest, device=self._device)
        ago = places[:, None] - places
        is_beyond = (ago < 0) | (ago >= cast("int", wishes.window))
        mask = torch.zeros(is_beyond.shape, dtype=dtype, device=self._device)
        return mask.masked_fill_(is_beyond, float("-inf"))[None, None]

    def unpad(self, padded_rows: Tensor) -> Tensor:
        rows = padded_rows.transpose(1, 2).flatten(0, 1)
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
        summed_grad = belongs_G_S.to(grad.dtype) @ grad.flatten(1)
        return summed_grad.view(-1, *grad.shape[1:]), None, None


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
