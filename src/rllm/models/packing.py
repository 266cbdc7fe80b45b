"""Which rows go together: rows ──► groups that share a prompt ──► micro-batches ──► buckets of like length.

    micro-batches   of `max_tokens` tokens: the largest group first, then those that fill what is left best;
                    a long tail of lengths fills them to within a percent, and linear layers pad nothing
    buckets         attention pads, so inside a micro-batch only rows of like length are padded to
                    each other

Rows of one group (attempts at one task) share their longest common beginning, up to but not including the
first token that is trained. Rows are cut behind their last trained token, because nothing after it is
predicted. Nothing here depends on the order in which rows come.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rllm.types.sample import TrainingSample

IntArray = NDArray[np.int64]
MOST_TRIED = 128
"""Groups of which those are chosen that fill a micro-batch; with as many, some add up to almost any room."""
MOST_SPLIT = 16
"""Groups of which one is split."""
LITTLE_ROOM = 64
"""A group is split, so that its prompt is computed twice, for room of more than this part of a micro-batch"""
LEAST_GAIN = 4
"""…, and for tokens of its own that are more than this part of the prompt."""
EQUAL_WORK = 4096
"""Places that a token looks back at for as much work as the linear layers have with it, in a model of
middling width: what a rank's rows cost is only compared with what another's do."""
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
    last: int = field(init=False)
    """The last trained token, a target that predicts nothing, so the row ends before it; -1 where none is."""

    def __post_init__(self) -> None:
        self.places = self.weights_T.nonzero()[0]
        self.last = int(self.places[-1]) if len(self.places) else -1


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

    A group above that, and here and there one that fills what is left, is split, its prompt computed once
    for each part, unless `whole_groups`; a row that is longer has a micro-batch of its own.
    """
    left = _Left(
        each
        for group in _prefix_groups(rows, share_prefixes=share_prefixes, whole_groups=whole_groups)
        for each in ([group] if group.prefix_length or whole_groups else _one_by_one(group.rows))
    )
    batches: list[list[PrefixGroup]] = []
    while left.entries:
        batches.append(left.filling(max_tokens, can_split=not whole_groups))
    return batches


def rank_shares(
    rows: Sequence[WeightedRow], num_ranks: int, *, share_prefixes: bool = True, whole_groups: bool = False
) -> list[list[WeightedRow]]:
    """The rows of each rank, so that all ranks have about as much to compute; a group stays together where
    that does not keep others waiting, and with `whole_groups` always.

    Costs are tokens, a shared prompt once for each rank that has a row of it, and what attention adds to
    them. The dearest group first to the rank that has least; then rows move from the rank that has most.
    """
    groups = _prefix_groups(rows, share_prefixes=share_prefixes, whole_groups=whole_groups)
    costs = [_costs(group) for group in groups]
    order = sorted(
        range(len(groups)), key=lambda each: (-sum(costs[each][1], costs[each][0]), groups[each].key)
    )
    ranks = [_RankShare() for _ in range(num_ranks)]
    for index in order:
        least = min(ranks, key=lambda each: each.cost)
        for row, cost in zip(groups[index].rows, costs[index][1], strict=True):
            least.add(index, costs[index][0], row, cost)
    while not whole_groups and _move_one(ranks, [prefix for prefix, _ in costs]):
        pass
    return [[row for members in each.rows.values() for row, _ in members] for each in ranks]


def fewest(rows: Sequence[WeightedRow], whole_groups: bool) -> list[WeightedRow]:
    """The row with least to compute, with all of its group under `whole_groups`."""
    least = min(rows, key=lambda row: (row.last, row.index))
    if not whole_groups:
        return [least]
    return [row for row in rows if row.sample.group_key == least.sample.group_key]


@dataclass(slots=True)
class _RankShare:
    """What one rank has so far."""

    cost: float = 0.0
    rows: dict[int, list[tuple[WeightedRow, float]]] = field(
        default_factory=dict[int, list[tuple[WeightedRow, float]]]
    )
    """By group, with what each costs beside the group's prompt."""

    def add(self, group: int, prefix_cost: float, row: WeightedRow, cost: float) -> None:
        self.cost += cost + (0.0 if group in self.rows else prefix_cost)
        self.rows.setdefault(group, []).append((row, cost))


def _costs(group: PrefixGroup) -> tuple[float, list[float]]:
    """Costs of computing the shared prompt, and each row behind it."""
    prefix = group.prefix_length
    lengths = [row.last - prefix for row in group.rows]
    return _work(0, prefix), [_work(prefix, length) for length in lengths]


def _work(start: int, length: int) -> float:
    """Work of `length` tokens that follow `start` others, in tokens."""
    return length * (1.0 + (start + length / 2.0) / EQUAL_WORK)


def _move_one(ranks: Sequence[_RankShare], prefix_costs: Sequence[float]) -> bool:
    """Move the row from the rank that has most to the one that has least that brings them nearest to each
    other; False where none does."""
    most, least = max(ranks, key=lambda each: each.cost), min(ranks, key=lambda each: each.cost)
    best, move = most.cost, None
    for group, members in most.rows.items():
        prefix = prefix_costs[group]
        cost_there = 0.0 if group in least.rows else prefix
        for place, (_, cost) in enumerate(members):
            cost_here = cost + (prefix if len(members) == 1 else 0.0)
            higher = max(most.cost - cost_here, least.cost + cost + cost_there)
            if higher < best:
                best, move = higher, (group, place, cost_here)
    if move is None:
        return False
    group, place, cost_here = move
    row, cost = most.rows[group].pop(place)
    if not most.rows[group]:
        del most.rows[group]
    most.cost -= cost_here
    least.add(group, prefix_costs[group], row, cost)
    return True


def fullest(sizes: Sequence[int], room: int) -> list[int]:
    """Indices of `sizes`, all above 0, that add up to as much as `room` holds, or as near as any do.

    Subset sum by dynamic programming over the bits of one number: bit n is set where some add up to n.
    """
    if sum(sizes) <= room:
        return list(range(len(sizes)))
    sums = [1]
    for size in sizes:
        sums.append(sums[-1] | (sums[-1] << size) & ((2 << room) - 1))
        if sums[-1] >> room:
            break
    total = sums[-1].bit_length() - 1
    places: list[int] = []
    for index in range(len(sums) - 2, -1, -1):
        if not sums[index] >> total & 1:
            places.append(index)
            total -= sizes[index]
    return places[::-1]


class _Left:
    """Groups that are in no micro-batch yet, the largest first."""

    def __init__(self, groups: Iterable[PrefixGroup]) -> None:
        self.entries = sorted(map(_entry, groups), key=_size_and_key)

    def filling(self, max_tokens: int, *, can_split: bool) -> list[PrefixGroup]:
        """Take out what fills one micro-batch; a group, or a row, that is larger has one of its own."""
        if can_split and -self.entries[0][0] > max_tokens:
            too_large = bisect_left(self.entries, -max_tokens, key=lambda entry: entry[0])
            first = self._best_part(max_tokens, too_large) or self._split(0, {0})  # a row that is too long
        else:
            first = self.entries.pop(0)[2]
        groups, room = [first], max_tokens - first.num_tokens
        while places := self._fitting(room):
            for index in reversed(fullest([-self.entries[place][0] for place in places], room)):
                groups.append(self.entries.pop(places[index])[2])
                room -= groups[-1].num_tokens
        if can_split and room * LITTLE_ROOM > max_tokens:
            part = self._best_part(room, len(self.entries))
            groups += [part] if part is not None else []
        return groups

    def _fitting(self, room: int) -> range:
        """Places of groups of all sizes that `room` holds."""
        start = bisect_left(self.entries, -room, key=lambda entry: entry[0])
        return range(start, len(self.entries), max(1, (len(self.entries) - start) // MOST_TRIED))

    def _best_part(self, room: int, among: int) -> PrefixGroup | None:
        """The rows that fill `room` best, of one of the first `among` groups, taken out of it; None where no
        row fits, or a prompt would be computed again for little."""
        best, most = set[int](), 0
        where = -1
        for place, (_, _, group) in enumerate(self.entries[: min(among, MOST_SPLIT)]):
            prefix, rows = group.prefix_length, group.rows
            if len(rows) == 1 or room <= prefix:
                continue
            places = fullest([row.last - prefix for row in rows], room - prefix)
            own = sum(rows[each].last - prefix for each in places)
            if own > most and own * LEAST_GAIN > prefix:
                where, best, most = place, set(places), own
                if own == room - prefix:
                    break
        return self._split(where, best) if most else None

    def _split(self, place: int, places: set[int]) -> PrefixGroup:
        group = self.entries.pop(place)[2]
        parts: list[PrefixGroup] = []
        for is_taken in (True, False):
            rows = [row for index, row in enumerate(group.rows) if (index in places) is is_taken]
            parts.append(PrefixGroup(group.prefix_length if len(rows) > 1 else 0, rows))
        if parts[1].rows:
            insort(self.entries, _entry(parts[1]), key=_size_and_key)
        return parts[0]


_Entry = tuple[int, tuple[str, int, int, int], PrefixGroup]
"""(minus its tokens, its key, the group)."""


def _entry(group: PrefixGroup) -> _Entry:
    return -group.num_tokens, group.key, group


def _size_and_key(entry: _Entry) -> tuple[int, tuple[str, int, int, int]]:
    return entry[:2]


def _one_by_one(rows: Sequence[WeightedRow]) -> list[PrefixGroup]:
    return [PrefixGroup(0, [row]) for row in rows]


def buckets(prefix_lengths: IntArray, lengths: IntArray, overhead: int) -> list[int]:
    """Sizes of the runs that rows, in the order of `bucket_order`, are padded in.

    A run of n rows costs n · longest · (longest prefix + longest) products of a query and a key, and
    `overhead` of them for its kernels; the cheapest runs are found by dynamic programming.
    """
    step = max(1, -(-int(lengths.max()) // MAX_LENGTHS))
    kinds, length_steps = _kind(prefix_lengths), -(-lengths // step)
    differs = (kinds[1:] != kinds[:-1]) | (length_steps[1:] != length_steps[:-1])
    starts = np.concatenate(([0], differs.nonzero()[0] + 1))
    num = len(starts)
    if num == 1:
        return [len(lengths)]
    ends = np.append(starts[1:], len(lengths))
    # cost_F_L: of one run from the first to the last of like shapes; none ends before it begins.
    upper = np.tri(num, dtype=np.bool_).T
    longest, longest_prefix = (
        np.maximum.accumulate(np.where(upper, np.maximum.reduceat(each, starts), 0), axis=1)
        for each in (lengths, prefix_lengths)
    )
    counts = ends - starts[:, None]
    cost_F_L = overhead + (counts * longest * (longest_prefix + longest)).astype(np.float64)
    cost_F_L[~upper] = np.inf
    cheapest = np.zeros(num + 1)
    came_from = [0] * num
    for last in range(num):
        costs = cheapest[: last + 1] + cost_F_L[: last + 1, last]
        came_from[last] = int(costs.argmin())
        cheapest[last + 1] = costs[came_from[last]]
    runs: list[int] = []
    last = num - 1
    while last >= 0:
        runs.append(int(ends[last] - starts[came_from[last]]))
        last = came_from[last] - 1
    return runs[::-1]


def bucket_order(prefix_lengths: IntArray, lengths: IntArray) -> IntArray:
    """Rows of like prompts together, the longest first."""
    return np.lexsort((-prefix_lengths, -lengths, -_kind(prefix_lengths)))


def _kind(prefix_lengths: IntArray) -> IntArray:
    """Prompts whose lengths differ by less than a factor of two are alike; no prompt is like none."""
    return np.frexp(prefix_lengths.astype(np.float64))[1]


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
        num_shared = 0
        if len(members) > 1 and share_prefixes:
            first_trained = min(int(row.places[0]) for row in members)
            num_shared = _shared_length([row.sample.token_ids_T for row in members], first_trained)
        groups.append(PrefixGroup(num_shared, members))
    return groups


def _shared_length(rows: Sequence[IntArray], limit: int) -> int:
    """Length of the common beginning; at most `limit` - 1, so that the token that predicts the first trained
    one is in every suffix."""
    limit = max(0, min(limit - 1, *(len(row) for row in rows)))
    head = rows[0][:limit]
    num_shared = limit
    for row in rows[1:]:
        differing = np.flatnonzero(row[:num_shared] != head[:num_shared])
        if len(differing):
            num_shared = int(differing[0])
    return num_shared
