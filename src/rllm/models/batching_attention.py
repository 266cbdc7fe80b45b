"""Attention of a micro-batch: flat rows of tokens in, padded buckets inside, flat rows out.

    tokens_N =  run 1, run 2, run 3, run 4, …      path of run 3:  a part of run 1, a part of run 2, run 3
                └─ bucket ──┘ └─ bucket ─┘

A run is what one row adds to its tree; it sees its path, which leads from the row's first token to the run's
last one. A run that is its own path is read where it stands, all others have their keys and values laid out.
Buckets hold runs of like length, so that little is padded, and are neighbours in the flat row: taking them
apart and putting them together again is one `split` and one `cat`, forward and backward.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rllm.models.attention import NONE, Wishes, attention
from rllm.models.decoder import take_rows
from rllm.models.packing import IntArray, buckets, needs_mask

OVERHEAD_ON_CPU = 6_000
"""The cost of a bucket beyond its arithmetic, in products of a query and a key."""
OVERHEAD_ELSEWHERE = 1 << 20
"""An accelerator is done with a million of them while it starts the kernels."""


class PackedAttention:
    """Attention over the runs of trees. Callable as a decoder's `attend`.

    In the last layer only the states that predict a trained token are wanted: `kept_S` has their offsets in
    each run.
    """

    def __init__(
        self,
        paths_S: Sequence[IntArray],
        lengths: Sequence[int],
        kept_S: Sequence[IntArray],
        device: torch.device,
    ) -> None:
        """Runs in the order of `bucket_order`. `paths_S`: where in the flat row the tokens of each path are;
        the last of them, so many as `lengths` says, are the run."""
        overhead = OVERHEAD_ON_CPU if device.type == "cpu" else OVERHEAD_ELSEWHERE
        self._paths, self._device = paths_S, device
        lengths_S, ends_S = np.array(lengths), np.array([len(path) for path in paths_S])
        starts_S = ends_S - lengths_S
        self.num_pairs = int(lengths_S @ ends_S)
        """Pairs of a token and a key of its path, as far as its run goes: without any padding."""
        self.num_kept_pairs = int(np.array([len(offsets) for offsets in kept_S]) @ ends_S)
        """The same of the states that predict a trained token."""
        ends = np.cumsum(buckets(starts_S, lengths_S, overhead)).tolist()
        self._buckets = [
            _Bucket(paths_S[first:end], lengths_S[first:end], kept_S[first:end], device)
            for first, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        self._sizes = [each.own.num_tokens for each in self._buckets]
        self._kept_sizes = [each.last_layer.num_tokens for each in self._buckets]
        laid_out = [each.places for each in self._buckets if each.places is not None]
        self._laid_sizes = [len(places) for places in laid_out]
        self._places = torch.from_numpy(np.concatenate(laid_out)).to(device) if laid_out else None

    def seeing_later(self, later_N: IntArray) -> Self:
        """The same where each token sees so many further ones of its path as well, all of its own run."""
        if not later_N.any():
            return self
        other = copy.copy(self)
        parts = np.split(later_N, np.cumsum(self._sizes)[:-1])
        other._buckets = [each.seeing_later(part) for each, part in zip(self._buckets, parts, strict=True)]
        return other

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, wishes: Wishes = NONE) -> Tensor:
        is_kept = len(q) != len(k)  # the last layer; were all states kept, the full masks would do the same
        queries = q.split(self._kept_sizes if is_kept else self._sizes)
        parts = zip(self._buckets, queries, self._visible(k), self._visible(v), strict=True)
        outputs = [bucket.attend(q, k, v, wishes, is_kept=is_kept) for bucket, q, k, v in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _visible(self, flat: Tensor) -> list[Tensor]:
        """[S, K, columns, d] keys or values that each bucket sees."""
        laid_out = iter(
            () if self._places is None else repeat_rows(flat, self._places).split(self._laid_sizes)
        )
        return [
            bucket.own.pad(own) if bucket.places is None else bucket.in_rows(next(laid_out))
            for bucket, own in zip(self._buckets, flat.split(self._sizes), strict=True)
        ]

    def rows(self) -> list[Tensor]:
        """Places of each path's tokens in the flat row: whole rows, which have all tokens of all others."""
        return [torch.from_numpy(path).to(self._device) for path in self._paths]

    @property
    def num_products(self) -> int:
        """Products of a query and a key in a full layer, those with padding included."""
        return sum(each.own.rows * each.own.columns * each.columns for each in self._buckets)


class _Bucket:
    """Runs of like length, with paths of like length."""

    def __init__(
        self,
        paths: Sequence[IntArray],
        lengths: IntArray,
        offsets_S: Sequence[IntArray],
        device: torch.device,
    ) -> None:
        ends = np.array([len(path) for path in paths])
        self.columns = int(ends.max())
        self._starts = ends - lengths
        """The start of each run in its path."""
        self.own = _Padding(lengths, device)
        self.last_layer = _Padding(np.array([len(offsets) for offsets in offsets_S]), device)
        self.places: IntArray | None = None
        """[S · columns] of its paths in the flat row; None where each run is its own path."""
        if self._starts.any():
            # Behind its end a path repeats its last token: no query of the row looks there.
            column = np.minimum(np.arange(self.columns), ends[:, None] - 1)
            self.places = np.concatenate(paths)[((np.cumsum(ends) - ends)[:, None] + column).ravel()]
        self._kept_offsets = np.concatenate(offsets_S)
        self._later: IntArray | None = None
        """[S, longest] how many tokens behind it each one sees; None where none sees any."""
        self._masks: dict[tuple[bool, int | None], Tensor] = {}
        self._at_columns: dict[bool, _Padding] = {}
        self._device = device

    def seeing_later(self, later: IntArray) -> Self:
        """See `PackedAttention.seeing_later`."""
        if not later.any():
            return self
        other = copy.copy(self)
        # Masks that were made before know nothing of the later tokens.
        other._later, other._masks = self.own.pad_ids(later), {}
        return other

    def in_rows(self, flat: Tensor) -> Tensor:
        """[S, H, columns, d] of what is laid out."""
        return flat.view(self.own.rows, self.columns, *flat.shape[1:]).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, wishes: Wishes, *, is_kept: bool) -> Tensor:
        """[n, H, d] of the queries of all its tokens, or of those that are kept."""
        window = wishes.window if wishes.is_shorter(self.columns) else None
        mask, padding = None, self.last_layer if is_kept else self.own
        # What predicts a trained token is a word, or the last token of an image: none that sees later ones.
        sees_later = self._later is not None and not is_kept
        if (
            sees_later
            or window is not None
            or needs_mask(padding.rows, padding.columns, self.own.columns, self.columns)
        ):
            mask = self._mask(q.dtype, window, is_kept=is_kept)
        elif is_kept or self.places is not None:
            padding = self._in_paths(is_kept)
        if q.shape[1] != k.shape[1] and mask is not None and q.device.type != "cpu":
            # the kernels that take a mask take no groups
            repeat = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return padding.unpad(attention(padding.pad(q), k, v, mask, wishes, is_causal=mask is None))

    def _in_paths(self, is_kept: bool) -> "_Padding":
        """The queries, each at its token's column: the kernel leaves out what is behind them by itself."""
        if is_kept not in self._at_columns:
            padding = self.last_layer if is_kept else self.own
            offsets = self._kept_offsets if is_kept else padding.offsets
            offsets = offsets + np.repeat(self._starts, padding.lengths)
            self._at_columns[is_kept] = _Padding(padding.lengths, self._device, offsets, self.columns)
        return self._at_columns[is_kept]

    def _mask(self, dtype: torch.dtype, window: int | None, *, is_kept: bool) -> Tensor:
        """[S or 1, 1, Q, columns], 0 where a query may look and -inf elsewhere: it sees its path up to its
        own column, of that no more than the last `window`, and the later tokens of its image. Made once, for
        all layers."""
        if (is_kept, window) not in self._masks:
            later = np.zeros((1, 1), dtype=np.int64) if is_kept or self._later is None else self._later
            at = np.arange(self.own.columns)[None, :]
            if is_kept:
                at = self.last_layer.pad_ids(self._kept_offsets)
            # Padding stands within the path as well: a window that has no key in it is no number.
            at = np.minimum(at + self._starts[:, None], self.columns - 1)
            at = at[:1] if (at == at[0]).all() else at
            ago = at[:, :, None] - np.arange(self.columns)
            visible = ago >= -later[:, :, None]
            if window is not None:
                visible &= ago < window
            is_beyond = torch.from_numpy(~visible).to(self._device).unsqueeze(1)
            mask = torch.zeros(is_beyond.shape, dtype=dtype, device=self._device)
            self._masks[is_kept, window] = mask.masked_fill_(is_beyond, float("-inf"))
        return self._masks[is_kept, window]


class _Padding:
    """[sum of lengths, H, d] ⇄ [rows, H, columns, d]; the padding is never seen by a real token."""

    def __init__(
        self,
        lengths: IntArray,
        device: torch.device,
        offsets: IntArray | None = None,
        columns: int | None = None,
    ) -> None:
        """`lengths` are above 0. Tokens stand at their `offsets`, or else one behind the other from column
        0."""
        self.lengths = lengths
        self.rows, self.columns = len(lengths), columns or int(lengths.max())
        self.num_tokens = int(lengths.sum())
        if offsets is None:
            offsets = np.arange(self.num_tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.offsets = offsets
        self.full = self.num_tokens == self.rows * self.columns
        if not self.full:
            places = np.repeat(np.arange(self.rows), lengths) * self.columns + offsets
            # Padding repeats a token: any finite value does, because nobody looks at it.
            self._source = np.zeros(self.rows * self.columns, dtype=np.int64)
            self._source[places] = np.arange(self.num_tokens)
            self.place_N = torch.from_numpy(places).to(device)
            self.source = torch.from_numpy(self._source).to(device)

    def pad(self, flat: Tensor) -> Tensor:
        num_heads, head_dim = flat.shape[1], flat.shape[2]
        rows = flat if self.full else _Spread.apply(flat, self.source, self.place_N)
        return rows.reshape(self.rows, self.columns, num_heads, head_dim).transpose(1, 2)

    def pad_ids(self, flat: IntArray) -> IntArray:
        """[rows, columns] for numbers instead of vectors."""
        return (flat if self.full else flat[self._source]).reshape(self.rows, self.columns)

    def unpad(self, padded_rows: Tensor) -> Tensor:
        rows = padded_rows.transpose(1, 2).flatten(0, 1)
        return rows if self.full else take_rows(rows, self.place_N)


def repeat_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], where rows may be named many times."""
    return _RepeatRows.apply(x, index) if torch.is_grad_enabled() else x.index_select(0, index)


class _RepeatRows(torch.autograd.Function):
    """index_select whose backward adds up in the order of the places and at least in float32, as that of an
    embedding does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (index,) = grads, ctx.saved_tensors
        rows = grad.reshape(len(grad), -1).to(torch.promote_types(grad.dtype, torch.float32))
        total = torch.ops.aten.embedding_dense_backward(rows, index, ctx.num_rows, -1, False)
        return total.to(grad.dtype).view(ctx.num_rows, *grad.shape[1:]), None


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
