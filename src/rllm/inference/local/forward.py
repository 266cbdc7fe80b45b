"""One forward pass of the engine: rows of new tokens on top of what their slots hold.

    decoding:  exactly one token a row  ─┐                           ┌─► a product per (slot, head)
    prompts:   several new tokens a row ─┴─► tokens_N ─► write K, V ─┴─► attention of padded rows
                                                                         in groups of similar length

Both kinds share the pass, because linear layers see nothing but a flat row of tokens. Attention is computed
in groups, so that one long row does not set the cost of all. Decode attends over the contiguous range of
slots that holds a group's rows: reading keys in place beats gathering them. Where rows are scattered over
many slots of others, they are several groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rllm.inference.local.cache import KVCache, Places, Shelf, Slot, consecutive
from rllm.models.attention import NONE, Wishes, attention
from rllm.models.vision.grids import ImageGrids
from rllm.types.images import PATCH_IDS_FROM, later_of_image

MOST_PADDED_PAIRS, MOST_PADDED_PLACES = 2**18, 2**16
"""Padding that costs no more than a further group for a layer does, as numbers of keys times heads and head
size: pairs of a query and a key in prompts, keys that are read in decoding. About 30 to 50 µs on one core."""
MAX_SCORED_LOGITS = 2**28 // 12
"""Logits of scored tokens that exist at the same time: with their copies, three times four bytes each."""


@dataclass(slots=True)
class PromptRow:
    """Tokens that a slot is to read."""

    slot: Slot
    new_ids: Sequence[int]


class PromptRows:
    """Rows that read several tokens: prompts, or what was said since the last answer.

    Tokens stand group by group; what is computed of a row's last token is put back in the order of the rows.
    """

    def __init__(self, model: Any, cache: KVCache, rows: Sequence[PromptRow]) -> None:
        device = cache.device
        starts_R = np.array([len(row.slot.ids) for row in rows])
        lengths_R = np.array([len(row.new_ids) for row in rows])
        cache.require([row.slot for row in rows], starts_R + lengths_R)
        indices_R = np.array([row.slot.index for row in rows])
        overhead = MOST_PADDED_PAIRS // (cache.num_kv_heads * cache.head_dim)
        groups = [
            part[group]
            for part in _by_shelf([row.slot for row in rows])
            for group in _alike(lengths_R[part], (starts_R + lengths_R)[part], overhead)
        ]
        # By slot within a group: keys of slots that stand in a row are read in place.
        groups = [group[np.argsort(indices_R[group], kind="stable")] for group in groups]
        later_R: list[NDArray[np.int64]] = []
        if model.sees_images_whole:
            later_R = [later_of_image(row.new_ids) for row in rows]
        self._groups = [
            _PromptGroup(
                [rows[row].slot for row in group.tolist()],
                starts_R[group],
                lengths_R[group],
                [later_R[row] for row in group.tolist()] if later_R else (),
            )
            for group in groups
        ]
        order_R = np.concatenate(groups)
        starts_R, lengths_R = starts_R[order_R], lengths_R[order_R]
        firsts_R = np.cumsum(lengths_R) - lengths_R
        self.rows = rows
        self._in_order = [rows[row] for row in order_R.tolist()]
        self.num_tokens = int(lengths_R.sum())
        positions_N = np.arange(self.num_tokens) + np.repeat(starts_R - firsts_R, lengths_R)
        tokens = [token for row in self._in_order for token in row.new_ids]
        self.tokens_N = torch.tensor(tokens, device=device)
        self.positions_N = torch.from_numpy(positions_N).to(device)
        self.write = cache.places([row.slot for row in self._in_order], lengths_R, positions_N)
        self.last_R = torch.from_numpy(firsts_R + lengths_R - 1).to(device)
        """Places in N of the rows' last tokens, ascending."""
        self.place_R: Tensor | None = None
        """Where in `last_R` each of `rows` is; None where they are in the same order."""
        if (np.diff(order_R) != 1).any():
            self.place_R = torch.from_numpy(np.argsort(order_R)).to(device)

    def positions(self, grids: ImageGrids | None) -> Tensor:
        """[N] See `CausalModel.hidden`; called before the slots have the new tokens."""
        if grids is None:
            return self.positions_N
        shifts = [
            grids.shifts(np.array([*row.slot.ids, *row.new_ids]))[len(row.slot.ids) :]
            for row in self._in_order
        ]
        return self.positions_N + torch.from_numpy(np.concatenate(shifts)).to(self.positions_N.device)

    def attend(self, layer: int, queries: Tensor, wishes: Wishes) -> Tensor:
        """Attention of all tokens, or of the last one of each row where only those are asked for."""
        only_last = len(queries) != self.num_tokens
        sizes = [group.num_rows if only_last else group.num_tokens for group in self._groups]
        parts = zip(self._groups, queries.split(sizes), strict=True)
        outputs = [group.attend(layer, part, wishes, only_last=only_last) for group, part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _PromptGroup:
    """Rows of similar length, whose attention is computed as one block, padded to the longest."""

    def __init__(
        self,
        slots: Sequence[Slot],
        starts_R: NDArray[np.int64],
        lengths_R: NDArray[np.int64],
        later_R: Sequence[NDArray[np.int64]] = (),
    ) -> None:
        """`slots` are of one shelf. `later_R`: how many of the tokens behind it each token sees; empty where
        none sees any."""
        self._shelf = slots[0].shelf
        device = self._shelf.keys.device
        ends_R = starts_R + lengths_R
        self.num_rows = len(slots)
        self.num_tokens = int(lengths_R.sum())
        self._longest, self._span = int(lengths_R.max()), int(ends_R.max())
        self._rows = consecutive(np.array([slot.row for slot in slots]), device)
        self._place_N: Tensor | None = None
        """Place of each token in the padded [R, longest] block; None when nothing is padded."""
        if self.num_tokens < self.num_rows * self._longest:
            shift_R = np.arange(self.num_rows) * self._longest - (np.cumsum(lengths_R) - lengths_R)
            places_N = np.arange(self.num_tokens) + np.repeat(shift_R, lengths_R)
            self._place_N = torch.from_numpy(places_N).to(device)
        # A mask is made only where `is_causal`, or no mask at all, would not say the same.
        columns_T = np.arange(self._span)
        self._visible_to_last: Tensor | None = None
        if (ends_R < self._span).any():
            self._visible_to_last = self._mask(columns_T < ends_R[:, None, None, None])
        self._starts_R = starts_R
        self._later_R1Q1 = np.zeros((self.num_rows, 1, self._longest, 1), dtype=np.int64)
        for number, later in enumerate(later_R):
            self._later_R1Q1[number, 0, : len(later), 0] = later
        self._visible: Tensor | None = None
        # `is_causal` shows query n the keys up to n, which is right where all rows begin at 0.
        if starts_R.any() or self._later_R1Q1.any():
            self._visible = self._mask(self._ago() >= -self._later_R1Q1)
        self._near: dict[int, Tensor] = {}

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        """0 where a key is visible, -inf elsewhere: of truth values, every layer would make this anew."""
        keys = self._shelf.keys
        mask = torch.zeros(visible.shape, dtype=keys.dtype, device=keys.device)
        return mask.masked_fill_(torch.from_numpy(~visible).to(keys.device), float("-inf"))

    def _ago(self) -> NDArray[np.int64]:
        """[R, 1, Q, T] distance from each key to each query, in places."""
        query_R1Q1 = self._starts_R[:, None, None, None] + np.arange(self._longest)[:, None]
        return query_R1Q1 - np.arange(self._span)

    def _visible_in(self, wishes: Wishes) -> Tensor | None:
        """The mask of queries, which see all keys up to their own place and the later ones of their image;
        None where that is all up to their own."""
        window = wishes.window
        if window is None or not wishes.is_shorter(self._span):
            return self._visible
        if window not in self._near:
            ago = self._ago()
            self._near[window] = self._mask((ago >= -self._later_R1Q1) & (ago < window))
        return self._near[window]

    def attend(self, layer: int, queries: Tensor, wishes: Wishes, *, only_last: bool) -> Tensor:
        num_rows, (_, num_heads, head_dim) = self.num_rows, queries.shape
        keys = _rows_of(self._shelf.keys[layer][:, :, : self._span], self._rows)
        values = _rows_of(self._shelf.values[layer][:, :, : self._span], self._rows)
        is_grouped = num_heads != self._shelf.num_kv_heads
        # Only a last layer without wishes has fewer queries than tokens; see `Attend` in
        # `rllm.models.decoder`.
        if only_last:
            last = queries.reshape(num_rows, num_heads, 1, head_dim)
            return F.scaled_dot_product_attention(
                last, keys, values, attn_mask=self._visible_to_last, enable_gqa=is_grouped
            ).squeeze(2)
        padded_queries = queries
        if self._place_N is not None:
            padded_queries = queries.new_zeros(num_rows * self._longest, num_heads, head_dim)
            padded_queries.index_copy_(0, self._place_N, queries)
        padded_queries = padded_queries.reshape(num_rows, self._longest, num_heads, head_dim).transpose(1, 2)
        visible = self._visible_in(wishes)
        attention_output = attention(padded_queries, keys, values, visible, wishes, is_causal=visible is None)
        attention_output = attention_output.transpose(1, 2).reshape(-1, num_heads, head_dim)
        return attention_output if self._place_N is None else attention_output.index_select(0, self._place_N)


class DecodeRows:
    """Rows that read one token a step.

    Lives as long as the set of rows stays the same; `advance` after every step.
    """

    def __init__(self, cache: KVCache, slots: Sequence[Slot], positions_B: NDArray[np.int64]) -> None:
        """`slots` by ascending index; `positions_B` are where the next tokens go, and there is room."""
        self.num_rows = len(slots)
        # A copy: `advance` adds to it in place, and the caller's column moves on by itself.
        self.positions_B = torch.from_numpy(positions_B.copy()).to(cache.device)
        self._cache = cache
        self.slots = list(slots)
        self._shelves: list[Shelf] = []
        self._capacities: list[int] = []
        self._groups: list[_DecodeGroup] = []
        rows_B = np.array([slot.row for slot in slots])
        overhead = MOST_PADDED_PLACES // (cache.num_kv_heads * cache.head_dim)
        for part in _by_shelf(slots):
            shelf = slots[part[0]].shelf
            self._shelves.append(shelf)
            rooms_P = shelf.rooms_for(positions_B[part] + 1)
            self._groups += [
                _DecodeGroup(shelf, places, rows_B[places], int(positions_B[places].max()) + 1)
                for alike in _alike(np.ones_like(rooms_P), rooms_P, overhead)
                for places in _near(part[np.sort(alike)], rows_B, overhead // int(rooms_P[alike].max()))
            ]
        # `attend` puts the parts of consecutive groups together in this order.
        self._groups.sort(key=lambda group: group.first_place)
        self._shifts_B: Tensor | None = None
        self._are_consecutive = all(isinstance(group.places, slice) for group in self._groups)
        """One group's rows stand behind another's, as they do where each has a shelf of its own."""

    @property
    def write(self) -> Places:
        """Where this step's keys and values go."""
        capacities = [shelf.capacity for shelf in self._shelves]
        # Indices into the flat view of a layer change with T, and with nothing else that `resize` does.
        if capacities != self._capacities:
            self._capacities = capacities
            positions_B = self.positions_B.cpu().numpy()
            self._write = self._cache.places(self.slots, np.ones_like(positions_B), positions_B)
        return self._write

    def positions(self, grids: ImageGrids | None) -> Tensor:
        """[B] See `CausalModel.hidden`: every further token of a row is a word, and has the same shift."""
        if grids is None:
            return self.positions_B
        if self._shifts_B is None:
            # A word behind what the slot holds, in place of the one that is read next.
            shifts = [grids.shifts(np.array([*slot.ids, 0]))[-1] for slot in self.slots]
            self._shifts_B = torch.tensor(shifts, device=self.positions_B.device)
        return self.positions_B + self._shifts_B

    def advance(self) -> None:
        """Every row has read its token: the next ones go one place further."""
        self.positions_B += 1
        # The next place of a slot is the next row of the flat view, in every head.
        for _, _, rows in self.write.parts:
            rows += 1
        for group in self._groups:
            group.longest += 1

    def attend(self, layer: int, queries: Tensor, wishes: Wishes) -> Tensor:
        positions_B = self.positions_B
        if len(self._groups) == 1:
            return self._groups[0].attend(layer, queries, wishes, positions_B)
        if self._are_consecutive:
            return torch.cat(
                [
                    group.attend(layer, queries[group.places], wishes, positions_B[group.places])
                    for group in self._groups
                ]
            )
        attention_output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in self._groups:
            places = group.places
            part = group.attend(layer, _rows_of(queries, places), wishes, _rows_of(positions_B, places))
            if isinstance(places, slice):
                attention_output[places] = part
            else:
                attention_output.index_copy_(0, places, part)
        return attention_output


class _DecodeGroup:
    """Rows of similar length in slots that stand close together: one product over the range of slots."""

    def __init__(
        self, shelf: Shelf, places: NDArray[np.int64], rows_R: NDArray[np.int64], longest: int
    ) -> None:
        device = shelf.keys.device
        first, count = int(rows_R[0]), int(rows_R[-1] - rows_R[0]) + 1
        self.first_place = int(places[0])
        self.places = consecutive(places, device)
        """The places of the group's rows among all that are decoded."""
        self.longest = longest
        self.shelf = shelf
        self._num_slots = count
        self._first_slot = first
        self._spread: Tensor | None = None
        """Where in the range each row's slot is; None where the range has no others."""
        if count > len(rows_R):
            self._spread = torch.from_numpy(rows_R - first).to(device)

    def attend(self, layer: int, queries: Tensor, wishes: Wishes, positions_R: Tensor) -> Tensor:
        shelf = self.shelf
        heads, (_, num_heads, head_dim) = shelf.num_kv_heads, queries.shape
        span = shelf.room_for(self.longest)
        keys, values, bias = self._in_place(layer, span)
        # Slots of others get a query of zeros; its result, NaN where a slot is empty, is left out below.
        if self._spread is not None:
            queries = queries.new_zeros(self._num_slots, num_heads, head_dim).index_copy_(
                0, self._spread, queries
            )
            positions_R = positions_R.new_zeros(self._num_slots).index_copy_(0, self._spread, positions_R)
        if wishes.window is not None and wishes.is_shorter(span):
            oldest = (positions_R - wishes.window).repeat_interleave(heads)
            is_past = torch.arange(span, device=bias.device) <= oldest[:, None]
            bias = bias.masked_fill(is_past, float("-inf"))
        grouped_queries = queries.reshape(self._num_slots * heads, num_heads // heads, head_dim)
        if wishes.softcap is None and wishes.sinks is None:
            scores = torch.baddbmm(bias.unsqueeze(1), grouped_queries, keys, alpha=head_dim**-0.5)
            weights = torch.softmax(scores, dim=-1)
        else:
            sinks = wishes.sinks
            if sinks is not None:
                sinks = sinks.view(heads, -1, 1).repeat(self._num_slots, 1, 1)
            scores = torch.bmm(grouped_queries, keys) * head_dim**-0.5
            weights = wishes.weights(scores, bias.unsqueeze(1), sinks)
        attention_output = torch.bmm(weights, values).view(self._num_slots, num_heads, head_dim)
        return attention_output if self._spread is None else attention_output.index_select(0, self._spread)

    def _in_place(self, layer: int, span: int) -> tuple[Tensor, Tensor, Tensor]:
        """[S·K, d, span] keys, [S·K, span, d] values and [S·K, span] bias of the range, each as one view: in
        a small model a chain of views takes as long as a product."""
        shelf = self.shelf
        size, rows, first = shelf.keys.shape[-1], self._num_slots * shelf.num_kv_heads, self._first_slot
        # `as_strided` counts from the start of the storage, where the contiguous tensors of `resize` begin.
        row = shelf.capacity * size
        at = layer * shelf.keys.stride(0) + first * shelf.num_kv_heads * row
        return (
            shelf.keys.as_strided((rows, size, span), (row, 1, size), at),
            shelf.values.as_strided((rows, span, size), (row, size, 1), at),
            shelf.bias.as_strided(
                (rows, span), (shelf.capacity, 1), first * shelf.num_kv_heads * shelf.capacity
            ),
        )


def _alike(
    lengths_R: NDArray[np.int64], spans_R: NDArray[np.int64], overhead: int
) -> list[NDArray[np.int64]]:
    """Rows in groups, each of which is computed as a block of its longest length by its longest span.

    A group takes rows, from the largest on, as long as the padding costs less than another group would
    (`overhead`, in places of such blocks), or than an eighth of what is computed anyway. It depends on
    nothing but the lengths, so the same batch is always computed in the same way.
    """
    areas_R = lengths_R * spans_R
    total = int(areas_R.sum())
    if len(areas_R) * int(lengths_R.max()) * int(spans_R.max()) - total <= overhead + total // 8:
        return [np.arange(len(areas_R))]
    groups: list[list[int]] = []
    longest = widest = total = 0
    columns = (lengths_R.tolist(), spans_R.tolist())
    for row in np.argsort(-areas_R, kind="stable").tolist():
        length, span = columns[0][row], columns[1][row]
        longest, widest, total = max(longest, length), max(widest, span), total + length * span
        if groups and (len(groups[-1]) + 1) * longest * widest - total <= overhead + total // 8:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest, widest, total = length, span, length * span
    return [np.array(group) for group in groups]


def _by_shelf(slots: Sequence[Slot]) -> list[NDArray[np.int64]]:
    """Places of the slots of each shelf."""
    shelves = list(dict.fromkeys(slot.shelf for slot in slots))
    if len(shelves) == 1:
        return [np.arange(len(slots))]
    return [np.flatnonzero([slot.shelf is shelf for slot in slots]) for shelf in shelves]


def _near(places: NDArray[np.int64], rows_B: NDArray[np.int64], max_unused: int) -> list[NDArray[np.int64]]:
    """Places by ascending row, cut where more than so many slots of others would be read along."""
    rows = rows_B[places]
    if int(rows[-1] - rows[0]) + 1 - len(places) <= max_unused:
        return [places]
    cuts: list[int] = []
    num_unused = 0
    for place, gap in enumerate((np.diff(rows) - 1).tolist(), start=1):
        num_unused += gap
        if num_unused > max_unused:
            cuts.append(place)
            num_unused = 0
    return np.split(places, cuts)


def forward(
    model: Any,
    cache: KVCache,
    decoding: DecodeRows | None,
    tokens_B: Tensor | None,
    prompts: PromptRows | None,
) -> Tensor:
    """Read `tokens_B`, one for every decoding row, and the new tokens of every prompt row.

    [B + R, V] logits after each row's last token.
    """
    return model.logits(_states(model, cache, decoding, tokens_B, prompts, only_last=True))


def _states(
    model: Any,
    cache: KVCache,
    decoding: DecodeRows | None,
    tokens_B: Tensor | None,
    prompts: PromptRows | None,
    *,
    only_last: bool,
) -> Tensor:
    """[B + R, D] final states of each row's last token; without `only_last` [B + N, D], of all."""
    if model.by_row:
        return _states_by_row(model, decoding, tokens_B, prompts, only_last=only_last)
    num_decoding = decoding.num_rows if decoding else 0
    tokens = _join(tokens_B, prompts and prompts.tokens_N)
    grids = model.image_grids
    positions = _join(decoding and decoding.positions(grids), prompts and prompts.positions(grids))
    write = _places(decoding, prompts)
    # Decoding rows see their own token by the bias, so it is shown before the first layer attends.
    cache.show(write)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, wishes: Wishes = NONE) -> Tensor:
        cache.store(layer, write, k, v)
        return _join(
            decoding and decoding.attend(layer, q[:num_decoding], wishes),
            prompts and prompts.attend(layer, q[num_decoding:], wishes),
        )

    keep_M = None
    if prompts and only_last:
        keep_M = torch.cat((torch.arange(num_decoding, device=tokens.device), prompts.last_R + num_decoding))
    states = model.hidden(tokens, positions, attend, keep_M)
    if keep_M is not None and prompts and prompts.place_R is not None:
        states = torch.cat((states[:num_decoding], states[num_decoding:][prompts.place_R]))
    # Not earlier: places and positions of the pass count from what the slots held before it.
    for row in prompts.rows if prompts else ():
        row.slot.ids.extend(row.new_ids)
    return states


def _states_by_row(
    model: Any,
    decoding: DecodeRows | None,
    tokens_B: Tensor | None,
    prompts: PromptRows | None,
    *,
    only_last: bool,
) -> Tensor:
    """See `_states`; of a model that keeps the states of a row itself. A row that gets several tokens is read
    from its first one on."""
    rows: list[tuple[Slot, int, list[int]]] = []
    if decoding is not None and tokens_B is not None:
        new_tokens = zip(decoding.slots, decoding.positions_B.tolist(), tokens_B.tolist(), strict=True)
        rows += [(slot, position, [token]) for slot, position, token in new_tokens]
    if prompts is not None:
        rows += [(row.slot, len(row.slot.ids), list(row.new_ids)) for row in prompts.rows]
    parts: list[Tensor] = []
    for slot, num_read, new_ids in rows:
        row_cache, num_cached = slot.states or (None, 0)
        assert len(slot.ids) == num_read, "a slot knows what was read"
        slot.ids.extend(new_ids)
        slot.states, ids = None, new_ids  # used up, also where the pass fails
        if num_cached != num_read or len(new_ids) > 1:
            row_cache, ids = None, slot.ids
        states_N_D, row_cache = model.read_row(torch.tensor(ids, device=slot.shelf.keys.device), row_cache)
        slot.states = None if row_cache is None else (row_cache, len(slot.ids))
        parts.append(states_N_D[-1 if only_last else -len(new_ids) :])
    return torch.cat(parts)


def prefill(model: Any, cache: KVCache, rows: Sequence[PromptRow]) -> Tensor:
    """Read the new tokens of every row. [R, V] logits after each row's last token."""
    return forward(model, cache, None, None, PromptRows(model, cache, rows))


def prefill_all(model: Any, cache: KVCache, row: PromptRow) -> Tensor:
    """Read the new tokens of a row. [N, V] logits after each of them."""
    return model.logits(_states(model, cache, None, None, PromptRows(model, cache, [row]), only_last=False))


def prefill_scored(
    model: Any, cache: KVCache, row: PromptRow, num_scored: int, temperature: float
) -> list[float]:
    """Read the new tokens of a row; log-probabilities of its last `num_scored` tokens, each of which has a
    new one before it; 0 for those of images, which nobody predicts. At most `MAX_SCORED_LOGITS` exist at
    a time."""
    states_N_D = _states(model, cache, None, None, PromptRows(model, cache, [row]), only_last=False)
    predicting_M_D = states_N_D[-1 - num_scored : -1]
    targets_M = torch.tensor(row.new_ids[-num_scored:], device=states_N_D.device)
    chunk = max(1, MAX_SCORED_LOGITS // model.vocab_size)
    logprobs: list[float] = []
    for states_C_D, targets_C in zip(predicting_M_D.split(chunk), targets_M.split(chunk), strict=True):
        logprobs_C_V = torch.log_softmax(model.logits(states_C_D).float() / temperature, dim=-1)
        is_patch_C = targets_C >= PATCH_IDS_FROM
        # The id of a patch lies beyond the vocabulary, where nothing can be looked up.
        words_C = targets_C.masked_fill(is_patch_C, 0)
        logprobs_C = logprobs_C_V.gather(1, words_C.unsqueeze(1)).squeeze(1)
        logprobs += logprobs_C.masked_fill(is_patch_C, 0.0).tolist()
    return logprobs


def _places(decoding: DecodeRows | None, prompts: PromptRows | None) -> Places:
    if decoding is None or prompts is None:
        rows = decoding or prompts
        assert rows is not None, "a pass has decoding rows or prompts"
        return rows.write
    return decoding.write.before(prompts.write)


def _join(first: Tensor | None, second: Tensor | None) -> Tensor:
    if first is None or second is None:
        present = second if first is None else first
        assert present is not None, "a pass has decoding rows or prompts"
        return present
    return torch.cat((first, second))


def _rows_of(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """`tensor[rows]`, which copies a row at once where a tensor as index would copy number by number."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)
