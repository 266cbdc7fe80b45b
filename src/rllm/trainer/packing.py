"""Which rows go together: rows ──► groups that share a prompt ──► micro-batches ──► buckets of like length.

    micro-batches   best fit, the largest group first, into `max_tokens` tokens each: a long tail of
                    lengths fills them to within a percent; linear layers pad nothing there
    buckets         attention pads, so inside a micro-batch only rows of like length are padded to
                    each other

Rows of one group (attempts at one task) share their longest common beginning, up to but not including the
first token that is trained. Rows are cut behind their last trained token, because nothing after it is
predicted. Nothing here depends on the order in which rows come.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rllm.types.sample import TrainingSample

IntArray = NDArray[np.int64]
SMALL_PART = 64
"""Parts of a group that are so many times smaller than a micro-batch are split no further."""
MAX_LENGTHS = 256
"""Distinct lengths that buckets tell apart; above, like lengths count as one."""


@dataclass(kw_only=True, slots=True)
class WeightedRow:
    """A sample and what an update knows about its tokens."""

    index: int
    """Position in the caller's list of samples."""
    sample: TrainingSample
    weights_T: NDArray[np.float64]
    """Weight of each token's loss term; 0 where the token is not trained."""
    places: IntArray = field(init=False)
    """Where the trained tokens are."""

    def __post_init__(self) -> None:
        self.places = np.flatnonzero(self.weights_T)

    @property
    def last(self) -> int:
        """The last trained token: a target that predicts nothing, so the row ends before it."""
        return int(self.places[-1])


@dataclass(slots=True)
class PrefixGroup:
    """Rows that share their first `prefix_length` tokens."""

    prefix_length: int
    rows: list[WeightedRow]

    @property
    def num_tokens(self) -> int:
        """Tokens of a forward pass over it."""
        return self.prefix_length + sum(row.last - self.prefix_length for row in self.rows)

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.rows[0].sample.order_key


def packed_groups(
    rows: Sequence[WeightedRow], max_tokens: int, *, share_prefixes: bool = True, whole_groups: bool = False
) -> list[list[PrefixGroup]]:
    """Micro-batches of at most `max_tokens` tokens; rows without a trained token are in none.

    A group above that is split, its prompt computed once for each part, unless `whole_groups`; a row that is
    longer has a micro-batch of its own.
    """
    groups = _prefix_groups(rows, share_prefixes=share_prefixes, whole_groups=whole_groups)
    if not whole_groups:
        groups = [part for group in groups for part in _split(group, max_tokens)]
    sizes = [group.num_tokens for group in groups]
    order = sorted(range(len(groups)), key=lambda index: (-sizes[index], groups[index].key))
    bins = best_fit([sizes[index] for index in order], max_tokens)
    return [[groups[order[place]] for place in places] for places in bins]


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes`, in bins that hold `capacity`: each goes where the least room is left. Descending
    sizes need at most 11/9 of the fewest bins (Johnson 1973), and about as many where small ones are many."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, bin), ascending
    for index, size in enumerate(sizes):
        place = bisect_left(room, (size, -1))
        if place < len(room):
            free, number = room.pop(place)
            bins[number].append(index)
        else:
            free, number = max(capacity, size), len(bins)
            bins.append([index])
        if free > size:
            insort(room, (free - size, number))
    return bins


def buckets(prefix_lengths: IntArray, lengths: IntArray, overhead: int) -> list[int]:
    """Sizes of the runs that rows, in the order of `bucket_order`, are padded in.

    A run of n rows costs n · longest · (longest prefix + longest) products of a query and a key, and
    `overhead` of them for its kernels; the cheapest runs are found by dynamic programming.
    """
    step = max(1, -(-int(lengths.max()) // MAX_LENGTHS))
    shapes = np.stack((_kind(prefix_lengths), -(-lengths // step)), axis=1)
    starts = np.flatnonzero(np.r_[True, (shapes[1:] != shapes[:-1]).any(axis=1)])
    counts = np.diff(np.r_[starts, len(lengths)])
    longest, longest_prefix = (
        np.maximum.reduceat(lengths, starts),
        np.maximum.reduceat(prefix_lengths, starts),
    )
    num = len(starts)
    cost = np.full(num + 1, np.inf)
    cost[0] = 0.0
    came_from = np.zeros(num + 1, dtype=np.int64)
    for first in range(num):
        wide = np.maximum.accumulate(longest[first:])
        keys = np.maximum.accumulate(longest_prefix[first:]) + wide
        ending = cost[first] + overhead + np.cumsum(counts[first:]) * wide.astype(np.float64) * keys
        better = ending < cost[first + 1 :]
        cost[first + 1 :][better] = ending[better]
        came_from[first + 1 :][better] = first
    runs: list[int] = []
    end = num
    while end > 0:
        first = int(came_from[end])
        runs.append(int(counts[first:end].sum()))
        end = first
    return runs[::-1]


def bucket_order(prefix_lengths: IntArray, lengths: IntArray) -> IntArray:
    """Rows of like prompts together, the longest first."""
    return np.lexsort((-prefix_lengths, -lengths, -_kind(prefix_lengths)))


def _kind(prefix_lengths: IntArray) -> IntArray:
    """Prompts whose lengths differ by less than a factor of two are alike; no prompt is like none."""
    return np.frexp(prefix_lengths.astype(np.float64))[1].astype(np.int64)


def _prefix_groups(
    rows: Sequence[WeightedRow], *, share_prefixes: bool, whole_groups: bool
) -> list[PrefixGroup]:
    by_key: dict[tuple[str, ...], list[WeightedRow]] = {}
    for row in rows:
        if len(row.places):
            alone = () if share_prefixes or whole_groups else (str(row.index),)
            by_key.setdefault((*row.sample.group_key, *alone), []).append(row)
    groups: list[PrefixGroup] = []
    for members in by_key.values():
        members.sort(key=lambda row: row.sample.order_key)
        shared = 0
        if len(members) > 1 and share_prefixes:
            first_trained = min(int(row.places[0]) for row in members)
            shared = _shared_length([row.sample.token_ids_T for row in members], first_trained)
        groups.append(PrefixGroup(shared, members))
    return groups


def _split(group: PrefixGroup, max_tokens: int) -> list[PrefixGroup]:
    """Parts of at most `max_tokens`, and smaller ones, which fill micro-batches better, where computing the
    prompt again for each costs no more than a percent."""
    tokens, prefix = group.num_tokens, group.prefix_length
    if len(group.rows) == 1 or not prefix:
        return [PrefixGroup(0, [row]) for row in group.rows]
    most = max(tokens // (1 + tokens // (100 * prefix)), max_tokens // SMALL_PART)
    if tokens <= min(most, max_tokens):
        return [group]
    room = max(1, min(most, max_tokens) - prefix)
    rows = sorted(group.rows, key=lambda row: (-row.last, row.sample.order_key))
    parts = best_fit([row.last - prefix for row in rows], room)
    return [PrefixGroup(prefix if len(part) > 1 else 0, [rows[index] for index in part]) for part in parts]


def _shared_length(rows: Sequence[IntArray], limit: int) -> int:
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
