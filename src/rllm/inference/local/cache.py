"""Keys and values of every sequence, in slots; and the index that finds a prefix computed before.

    shelf 0    [ slot ][ slot ][ slot ] …          slots of up to 512 tokens
    shelf 1    [     slot     ][     slot     ] …  of up to 1,024, and so on

    keys, values: [L, S, K, T, d]   slot S, then head, then time: decode reads one run per (slot, head)
    bias:         [S, K, T]         0 where the slot holds a token, -inf elsewhere: added to attention scores

A conversation begins on the shelf that its prompt fits on and moves to the next when it grows beyond it, so
a long one does not set the room of all. T and S of a shelf grow with what it holds; how much of T a pass
reads is `room_for` the longest of the rows that are computed together. So what is computed does not depend
on what was served before: a sum over more places, masked ones included, has another last bit.

All shelves together have at most `max_tokens` places. Whoever finds no room gets None or False, and decides
who has to go.

A slot belongs to one conversation from its first prompt until the conversation closes. Freed slots keep their
contents until their place is needed, or the engine says that nobody may see them.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.errors import InferenceError

BLOCK = 16
"""Prefixes are found in multiples of this many tokens."""
GROWTH = 32
"""Room for tokens grows in multiples of this, so that every row begins at a multiple of 64 bytes."""
FIRST_SHELF = 512
"""Tokens of a slot on the first shelf, at most; on each further shelf twice as many."""


@dataclass(slots=True, eq=False)
class Slot:
    """One row of a shelf, and its contents."""

    shelf: "Shelf"
    row: int
    ids: list[int] = field(default_factory=list[int])
    """Tokens whose keys and values are in the cache, in order."""
    block_hashes: list[int] = field(default_factory=list[int])
    """One per full block of `ids` that was entered in the index."""
    is_free: bool = True
    states: tuple[Any, int] | None = None
    """The states of a model that computes row by row: transformers' own for the row, with its number of
    tokens."""
    release_number: int = 0
    """Which of the cache's releases gave it back last; 0 when it was never used."""

    @property
    def index(self) -> int:
        """Unique among the slots of the cache: ascending by shelf, then by row."""
        return self.shelf.first_index + self.row


class Shelf:
    """Slots with room for the same number of tokens, and their tensors."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        rooms: list[int],
        *,
        first_index: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`shape`: layers, heads of keys and values, head size. `rooms`: what T may be, ascending.
        `first_index`: the index of the slot in the first row."""
        self.rooms = rooms
        self.limit = rooms[-1]
        self.first_index = first_index
        self.capacity = rooms[0]
        """T: tokens that a slot has room for at present."""
        self.slots: list[Slot] = []
        self.free_rows: list[int] = []
        """Ascending."""
        layers, heads, size = shape
        self.num_kv_heads = heads
        self.keys = torch.zeros((layers, 0, heads, self.capacity, size), device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.bias = torch.zeros((0, heads, self.capacity), device=device, dtype=dtype)

    @property
    def num_tokens(self) -> int:
        """Places, used or not."""
        return len(self.slots) * self.capacity

    @property
    def has_gap(self) -> bool:
        """Whether there is a free slot before one that is taken."""
        num_taken = len(self.slots) - len(self.free_rows)
        return bool(self.free_rows) and self.free_rows[0] < num_taken

    def room_for(self, length: int) -> int:
        """Places per head that are read for rows of at most `length` tokens.

        Few distinct numbers: where rows only grow, T is that number, and attention that reads its whole
        length streams through memory faster than one that leaves a gap after every head.
        """
        return self.rooms[bisect_left(self.rooms, length)]

    def rooms_for(self, lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """`room_for` each of them."""
        rooms = np.array(self.rooms)
        return rooms[np.searchsorted(rooms, lengths_B)]

    def resize(self, num_slots: int, capacity: int) -> None:
        """Give the tensors so many slots and places each; what is beyond is dropped.

        The tensors are replaced, and indices into them change with T.
        """
        num_kept, length = min(num_slots, len(self.slots)), min(capacity, self.capacity)
        with torch.inference_mode(mode=False):  # `publish` writes to them from threads outside of it
            # Zeros, not garbage: a masked position contributes 0 × value, which is NaN if the value is.
            for name in ("keys", "values"):
                old: Tensor = getattr(self, name)
                new = old.new_zeros((old.shape[0], num_slots, old.shape[2], capacity, old.shape[4]))
                new[:, :num_kept, :, :length] = old[:, :num_kept, :, :length]
                setattr(self, name, new)
            bias = self.bias.new_full((num_slots, self.num_kv_heads, capacity), float("-inf"))
            bias[:num_kept, :, :length] = self.bias[:num_kept, :, :length]
            self.bias = bias
        self.capacity = capacity
        del self.slots[num_slots:]
        self.free_rows = [row for row in self.free_rows if row < num_slots]
        self.free_rows += range(len(self.slots), num_slots)
        self.slots += [Slot(self, row) for row in range(len(self.slots), num_slots)]

    def write_index(self, rows_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> Tensor:
        """[N·K] rows that N tokens go to, in the [S·K·T, d] view of a layer: the index that `store` takes."""
        heads_N_K = rows_N[:, None] * self.num_kv_heads + np.arange(self.num_kv_heads)
        rows_N_K = heads_N_K * self.capacity + positions_N[:, None]
        return torch.from_numpy(rows_N_K.ravel()).to(self.keys.device)


@dataclass(slots=True)
class Places:
    """Where the keys and values of some tokens go."""

    num_tokens: int
    parts: list[tuple[Shelf, slice | Tensor | None, Tensor]]
    """The parts of each shelf: which of the tokens are its own (None: all), and their rows by
    `Shelf.write_index`."""

    def before(self, later: "Places") -> "Places":
        """These tokens, and behind them those."""
        if len(self.parts) == len(later.parts) == 1 and self.parts[0][0] is later.parts[0][0]:
            (shelf, _, mine), (_, _, theirs) = self.parts[0], later.parts[0]
            return Places(self.num_tokens + later.num_tokens, [(shelf, None, torch.cat((mine, theirs)))])
        parts: list[tuple[Shelf, slice | Tensor | None, Tensor]] = []
        for places, first in ((self, 0), (later, self.num_tokens)):
            for shelf, own, rows in places.parts:
                if own is None:
                    own = slice(0, places.num_tokens)
                place = slice(own.start + first, own.stop + first) if isinstance(own, slice) else own + first
                parts.append((shelf, place, rows))
        return Places(self.num_tokens + later.num_tokens, parts)


class KVCache:
    """Slots, their tensors and the prefix index."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_context: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        max_tokens: int = 0,
    ) -> None:
        """`num_slots`: how many may be taken at the same time. `max_tokens`: places in all, as many as
        one conversation of `max_context` takes or more; 0 for as many as all slots have at their longest."""
        self.max_context = max_context
        self.has_keys = num_layers > 0
        """False for a model that computes row by row: slots hold states of whole rows, and no prefixes."""
        self.num_slots = num_slots
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.device = device
        rooms = _rooms(max_context)
        self.max_tokens = max_tokens or num_slots * rooms[-1]
        self.shelves: list[Shelf] = []
        first, limit = 0, FIRST_SHELF
        while first < len(rooms):
            end = bisect_left(rooms, min(limit, rooms[-1])) + 1
            # A shelf never has more than `num_slots` slots, so the indices of two shelves do not meet.
            shelf = Shelf(
                (num_layers, num_kv_heads, head_dim),
                rooms[first:end],
                first_index=len(self.shelves) * num_slots,
                device=device,
                dtype=dtype,
            )
            self.shelves.append(shelf)
            first, limit = end, 2 * limit
        self._num_taken = 0
        self._num_releases = 0
        self._slots_of_block: dict[int, list[Slot]] = {}
        """Slots that hold a block, those that entered it first in front."""

    @property
    def slots(self) -> list[Slot]:
        return [slot for shelf in self.shelves for slot in shelf.slots]

    @property
    def num_indices(self) -> int:
        """No slot's index is as large."""
        return self.num_slots * len(self.shelves)

    @property
    def num_free(self) -> int:
        return self.num_slots - self._num_taken

    @property
    def num_tokens(self) -> int:
        """Places that there are at present; at most `max_tokens`."""
        return sum(shelf.num_tokens for shelf in self.shelves)

    def shelf_for(self, length: int) -> Shelf:
        return next(shelf for shelf in self.shelves if length <= shelf.limit)

    def allocate(self, length: int) -> Slot | None:
        """The lowest free slot that has room for so many tokens, so that live rows stay close together; its
        old contents are forgotten by `begin`. None where there is no room."""
        shelf = self.shelf_for(length)
        if self.num_free == 0 or not self._fit(shelf, length, row=True):
            return None
        return self._take(shelf.slots[shelf.free_rows[0]])

    def allocate_for(self, prompt_ids: Sequence[int], length: int) -> Slot | None:
        """The free slot that this prompt goes on from; or else the one that has not been used for the longest
        time, so that the others may still be gone on from. None where `length` tokens find no room."""
        limit = len(prompt_ids) - 1
        shelf = self.shelf_for(length)
        if self.num_free == 0 or not self._fit(shelf, length):
            return None
        free = [shelf.slots[row] for row in shelf.free_rows]
        ready = [slot for slot in free if _is_prefix(slot.ids, prompt_ids, limit)]
        if ready:
            return self._take(max(ready, key=lambda slot: len(slot.ids)))
        # What free slots hold may be gone on from, so new slots come first, as long as there can be more.
        is_full = sum(len(each.slots) for each in self.shelves) >= self.num_slots
        if all(slot.ids for slot in free) and not (is_full and free):
            if not self._extend(shelf, shelf.room_for(length)) and not free:
                return self.allocate(length)
            free = [shelf.slots[row] for row in shelf.free_rows]
        donor, _ = self._longest_match(_block_hashes(prompt_ids, limit), asking=None)
        # `begin` copies from the donor, so it is not the slot to be written over.
        spare = [slot for slot in free if slot is not donor] or free
        return self._take(min(spare, key=lambda slot: (slot.release_number if slot.ids else 0, slot.row)))

    def _take(self, slot: Slot) -> Slot:
        slot.shelf.free_rows.remove(slot.row)
        slot.is_free = False
        self._num_taken += 1
        return slot

    def release(self, slot: Slot) -> None:
        self._num_taken -= 1
        self._num_releases += 1
        slot.release_number = self._num_releases
        slot.is_free = True
        insort(slot.shelf.free_rows, slot.row)

    def fit(self, slot: Slot, length: int) -> bool:
        """Make room for `length` tokens in `slot`, which goes to another shelf where its own is too small.

        False, and nothing has changed for it, where there is no room.
        """
        if length <= slot.shelf.limit:
            return self._fit(slot.shelf, length)
        shelf = self.shelf_for(length)
        if not self._fit(shelf, length, row=True):
            return False
        self._move(slot, shelf)
        return True

    def grow(self, shelf: Shelf, length: int) -> bool:
        """Make room for `length` tokens in each slot of a shelf; False, with nothing changed, where there is
        none."""
        return self._fit(shelf, length)

    @property
    def has_gaps(self) -> bool:
        """Whether there are free slots before one that is taken."""
        return any(shelf.has_gap for shelf in self.shelves)

    def close_gaps(self) -> None:
        """Move slots that are taken to the front of their shelves, and drop the places behind them."""
        for shelf in self.shelves:
            used_slots = [slot for slot in shelf.slots if not slot.is_free]
            while shelf.has_gap:
                self._move(used_slots.pop(), shelf)
        self._drop_ends()

    def _fit(self, shelf: Shelf, length: int, *, row: bool = False) -> bool:
        """Have a shelf with room for `length` tokens in each slot, and with `row` one that is free."""
        if self._has_room(shelf, length, row=row):
            return True
        # Not before: what free slots hold may be gone on from, as long as nobody needs their room.
        self._drop_ends()
        return self._has_room(shelf, length, row=row)

    def _has_room(self, shelf: Shelf, length: int, *, row: bool) -> bool:
        """See `_fit`; with what is there, or what can be added."""
        capacity = shelf.room_for(length)
        more = row and not shelf.free_rows
        # Where there is no slot, nothing has to grow.
        if not more and (not shelf.slots or capacity <= shelf.capacity):
            return True
        return self._extend(shelf, capacity, more=more)

    def _extend(self, shelf: Shelf, capacity: int, *, more: bool = True) -> bool:
        """Add places to the slots of a shelf, and with `more` slots as well, as far as there is room."""
        capacity = max(capacity, shelf.capacity)
        num_slots = len(shelf.slots) + more
        room = self.max_tokens - (self.num_tokens - shelf.num_tokens)
        if num_slots * capacity > room:
            return False
        # Every `resize` copies the whole shelf.
        if more:  # by doubling
            num_slots = max(num_slots, min(2 * len(shelf.slots), self.num_slots, room // capacity))
        shelf.resize(num_slots, capacity)
        return True

    def _drop_ends(self) -> None:
        """Drop the free slots behind the last one that is taken of each shelf."""
        for shelf in self.shelves:
            num_slots = 1 + max((slot.row for slot in shelf.slots if not slot.is_free), default=-1)
            if num_slots < len(shelf.slots):
                # The index must not lead to slots that are gone.
                for slot in shelf.slots[num_slots:]:
                    self._forget_blocks(slot, 0)
                shelf.resize(num_slots, shelf.capacity if num_slots else shelf.rooms[0])

    def _move(self, slot: Slot, shelf: Shelf) -> None:
        """Put a slot with what it holds into the first free row of a shelf."""
        old_shelf, old_row, row = slot.shelf, slot.row, shelf.free_rows.pop(0)
        self._forget_blocks(shelf.slots[row], 0)
        length = min(shelf.capacity, old_shelf.capacity)
        for new, old in ((shelf.keys, old_shelf.keys), (shelf.values, old_shelf.values)):
            new[:, row, :, :length] = old[:, old_row, :, :length]
        # The free row may still show the tokens of whoever had it before.
        shelf.bias[row] = float("-inf")
        shelf.bias[row, :, :length] = old_shelf.bias[old_row, :, :length]
        old_shelf.bias[old_row] = float("-inf")
        # The slot object itself moves, because holders and live rows refer to it.
        old_shelf.slots[old_row] = Slot(old_shelf, old_row)
        insort(old_shelf.free_rows, old_row)
        slot.shelf, slot.row = shelf, row
        shelf.slots[row] = slot

    def begin(self, slot: Slot, prompt_ids: Sequence[int], *, exactly: bool = False) -> int:
        """Make `slot` hold as much of the prompt as is known, and return how many tokens that is (at most
        P - 1).

        The slot's own contents count first (the turns before), then whatever other slot shares the longest
        run of blocks. The last prompt token is always computed, because its logits are what comes next.
        `exactly` looks beyond the last shared block where the other slot is free.
        """
        if not self.has_keys:
            self.truncate(slot, 0)
            return 0
        limit = len(prompt_ids) - 1
        own = self.num_kept(slot, prompt_ids)
        hashes = _block_hashes(prompt_ids, limit, slot.block_hashes[: own // BLOCK])
        donor, num_shared = self._longest_match(hashes, slot)
        if exactly and donor is not None and donor.is_free:
            num_shared = _common_prefix(donor.ids, prompt_ids, limit)
        if donor is not None and num_shared > own:
            self.copy_prefix(donor, [slot], num_shared)
            return num_shared
        self.truncate(slot, own)
        return own

    def num_kept(self, slot: Slot, prompt_ids: Sequence[int]) -> int:
        """The number of prompt tokens that `begin` finds in the slot itself, whatever else it holds."""
        return _common_prefix(slot.ids, prompt_ids, len(prompt_ids) - 1) if self.has_keys else 0

    def places(
        self, slots_R: Sequence[Slot], lengths_R: NDArray[np.int64], positions_N: NDArray[np.int64]
    ) -> Places:
        """Where N tokens go: so many to each slot, one slot after the other, to these positions."""
        rows_N = np.repeat(np.array([slot.row for slot in slots_R]), lengths_R)
        shelves = list(dict.fromkeys(slot.shelf for slot in slots_R))
        if len(shelves) == 1:
            return Places(len(rows_N), [(shelves[0], None, shelves[0].write_index(rows_N, positions_N))])
        parts: list[tuple[Shelf, slice | Tensor | None, Tensor]] = []
        for shelf in shelves:
            own = np.flatnonzero(np.repeat([slot.shelf is shelf for slot in slots_R], lengths_R))
            index = shelf.write_index(rows_N[own], positions_N[own])
            parts.append((shelf, consecutive(own, self.device), index))
        return Places(len(rows_N), parts)

    def require(self, slots_R: Sequence[Slot], lengths_R: NDArray[np.int64]) -> None:
        """Make room for so many tokens in each slot. Raises InferenceError where nobody made room before."""
        for slot, length in zip(slots_R, lengths_R.tolist(), strict=True):
            if length > slot.shelf.limit or not self._fit(slot.shelf, length):
                raise InferenceError(
                    f"The cache has {self.max_tokens} places, and no room for the {length} tokens of a row; "
                    "raise `inference.cache_tokens`."
                )

    def store(self, layer: int, places: Places, keys_N_K_d: Tensor, values_N_K_d: Tensor) -> None:
        """Write the keys and values of new tokens of one layer."""
        size = keys_N_K_d.shape[-1]
        for shelf, own, rows in places.parts:
            for tensor, new in ((shelf.keys, keys_N_K_d), (shelf.values, values_N_K_d)):
                new = new if own is None else new[own]
                tensor[layer].view(-1, size).index_copy_(0, rows, new.reshape(-1, size))

    def show(self, places: Places) -> None:
        """Let attention see the tokens that are stored, or about to be stored, there."""
        for shelf, _, rows in places.parts:
            shelf.bias.view(-1).index_fill_(0, rows, 0.0)

    def copy_prefix(self, source: Slot, targets: Sequence[Slot], length: int) -> None:
        """Give every target the first `length` tokens of `source`, and nothing else."""
        for shelf in self.shelves:
            for run in _runs(sorted(target.row for target in targets if target.shelf is shelf)):
                for new, old in ((shelf.keys, source.shelf.keys), (shelf.values, source.shelf.values)):
                    new[:, run, :, :length] = old[:, source.row, None, :, :length]
                shelf.bias[run, :, :length] = 0.0
                shelf.bias[run, :, length:] = float("-inf")
        for target in targets:
            self._forget_blocks(target, 0)
            target.ids = source.ids[:length]
            # States stand behind the last token that was read: they cannot be cut back to a shorter prefix.
            is_whole = source.states is not None and source.states[1] == length
            target.states = deepcopy(source.states) if is_whole else None
            target.block_hashes = source.block_hashes[: length // BLOCK]
            for block_hash in target.block_hashes:
                self._slots_of_block.setdefault(block_hash, []).append(target)
            self.register(target)

    def truncate(self, slot: Slot, length: int) -> None:
        """Keep only the first `length` tokens."""
        self._forget_blocks(slot, length // BLOCK)
        if len(slot.ids) > length:
            slot.shelf.bias[slot.row, :, length : len(slot.ids)] = float("-inf")
            del slot.ids[length:]
            slot.states = None

    def extend(self, slot: Slot, token: int) -> None:
        """Keep one token more, whose keys and values are behind those that are kept."""
        slot.shelf.bias[slot.row, :, len(slot.ids)] = 0.0
        slot.ids.append(token)

    def _forget_blocks(self, slot: Slot, keep: int) -> None:
        """Take all but the first `keep` blocks of `slot` out of the index."""
        for block_hash in slot.block_hashes[keep:]:
            holders = self._slots_of_block[block_hash]
            holders.remove(slot)
            if not holders:
                del self._slots_of_block[block_hash]
        del slot.block_hashes[keep:]

    def register(self, slot: Slot) -> None:
        """Enter the full blocks of `slot` that are not in the index yet."""
        full = len(slot.ids) // BLOCK
        previous = slot.block_hashes[-1] if slot.block_hashes else 0
        for number in range(len(slot.block_hashes), full):
            # With the hash of the block before in it, one look-up finds a whole prefix and not only a block.
            previous = hash((previous, *slot.ids[number * BLOCK : (number + 1) * BLOCK]))
            slot.block_hashes.append(previous)
            self._slots_of_block.setdefault(previous, []).append(slot)

    def forget_everything(self) -> None:
        """The weights changed: nothing that is cached is true any more."""
        self._slots_of_block.clear()
        for shelf in self.shelves:
            shelf.bias.fill_(float("-inf"))
            for slot in shelf.slots:
                slot.ids = []
                slot.block_hashes = []
                slot.states = None

    def forget_released(self) -> None:
        """Nobody goes on from what conversations that are over have left."""
        for slot in self.slots:
            if slot.is_free and slot.ids:
                self.truncate(slot, 0)

    def wipe(self) -> None:
        """A pass failed midway: what it wrote may be no numbers, and NaN shines through any mask."""
        self.forget_everything()
        for shelf in self.shelves:
            shelf.keys.zero_()
            shelf.values.zero_()

    def _longest_match(self, hashes: Sequence[int], asking: Slot | None) -> tuple[Slot | None, int]:
        for count in range(len(hashes), 0, -1):
            for slot in self._slots_of_block.get(hashes[count - 1], ()):
                if slot is not asking:
                    return slot, count * BLOCK
        return None, 0


def tokens_at_once(num_slots: int, max_context: int, cache_tokens: int) -> int:
    """Places of a cache: `cache_tokens`, at most what all slots have at their longest, which 0 means."""
    most = num_slots * _rooms(max_context)[-1]
    return min(cache_tokens, most) if cache_tokens else most


def _rooms(max_context: int) -> list[int]:
    """Multiples of GROWTH, each about an eighth above the one before, up to the first that holds a whole
    context."""
    rooms = [GROWTH]
    while rooms[-1] < max_context:
        next_room = rooms[-1] * 9 // 8
        rooms.append(-(-min(next_room, max_context) // GROWTH) * GROWTH)
    return rooms


def _runs(indices: Sequence[int]) -> list[slice]:
    """Ascending indices as slices: what stands in a row is written several times faster than what is picked
    out."""
    runs: list[slice] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = slice(runs[-1].start, index + 1)
        else:
            runs.append(slice(index, index + 1))
    return runs


def consecutive(places_N: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """An index of these ascending places: a slice, which copies nothing, where they stand in a row."""
    first, count = int(places_N[0]), len(places_N)
    if int(places_N[-1]) == first + count - 1 and bool((np.diff(places_N) == 1).all()):
        return slice(first, first + count)
    return torch.from_numpy(places_N).to(device)


def _is_prefix(ids: Sequence[int], prompt_ids: Sequence[int], limit: int) -> bool:
    """Whether the prompt begins with all of `ids`; the last one tells most others apart."""
    length = len(ids)
    return 0 < length <= limit and ids[-1] == prompt_ids[length - 1] and ids == prompt_ids[:length]


def _common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    end = min(len(a), len(b), limit)
    # A conversation mostly goes on from all of it, and slices compare far faster than a loop.
    if a[:end] == b[:end]:
        return end
    return next(index for index in range(end) if a[index] != b[index])


def _block_hashes(ids: Sequence[int], limit: int, first_hashes: Sequence[int] = ()) -> list[int]:
    """Hashes of the full blocks within the first `limit` ids. `first_hashes`: those of the first blocks,
    which a slot that holds them has, so that a turn costs what is new in it."""
    hashes = list(first_hashes)
    previous = hashes[-1] if hashes else 0
    for start in range(len(hashes) * BLOCK, limit - BLOCK + 1, BLOCK):
        previous = hash((previous, *ids[start : start + BLOCK]))
        hashes.append(previous)
    return hashes
