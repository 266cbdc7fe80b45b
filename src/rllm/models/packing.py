"""Which rows go together: rows ──► trees of common beginnings ──► micro-batches ──► buckets of like length.

    micro-batches   of `max_tokens` tokens: the largest tree first, then those that fill what is left best;
                    a long tail of lengths fills them to within a percent, and linear layers pad nothing
    buckets         attention pads, so inside a micro-batch only rows of like length are padded to
                    each other

Rows of one task (attempts, turns, branches of a search, several agents on one context) are a tree: what
several of them begin with is computed once. Rows are cut behind their last trained token, because nothing
after it is predicted. Nothing here depends on the order in which rows come.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rllm.types.sample import TrainingSample

IntArray = NDArray[np.int64]
MOST_TRIED = 128
"""Trees of which those are chosen that fill a micro-batch; with as many, some add up to almost any room."""
MOST_SPLIT = 16
"""Trees of which one is split."""
LITTLE_ROOM = 64
"""A tree is split, so that its trunk is computed twice, for room of more than this part of a micro-batch"""
LEAST_GAIN = 4
"""…, and for tokens of its own that are more than this part of the trunk."""
LEAST_SHARED = 64
"""A beginning that is less than this part of a row is computed again: to look it up in every layer would cost
as much."""
MOST_LAID_OUT = 16
"""Keys that attention lays out for each token of a micro-batch: rows that go on from one trunk have a copy of
its keys each, which takes memory, though nothing is computed for it. With as many, layers of a grouped-query
model keep up to half as much again."""
EQUAL_WORK = 4096
"""Places that a token looks back at for as much work as the linear layers have with it, in a model of
middling width: what a rank's rows cost is only compared with what another's do."""
ALL = 1 << 40
"""More tokens than any micro-batch has."""
MAX_LENGTHS = 256
"""Distinct lengths that buckets tell apart; above, like lengths count as one."""
MOST_MASKED = 1 << 26
"""Elements of a bucket's mask; a larger one is not made"""
MOST_SPREAD = 8
"""…, unless paths are more than so many times as long as what is added to them."""


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
class PrefixTree:
    """Rows, ordered by their tokens: what a row has in common with any before it, it has with the last one.

    A row comes behind those that go on where it ends.
    """

    rows: list[WeightedRow]
    common: list[int]
    """The number of tokens that each row shares with the row before it; 0 for the first."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a forward pass over it."""
        return sum(row.last for row in self.rows) - sum(self.common)

    @property
    def key(self) -> tuple[str, int, int, int]:
        return min(row.sample.order_key for row in self.rows)

    def branches(self, part: range) -> tuple[int, list[range]]:
        """Length of the trunk of the rows in `part`, and which rows go on behind it together.

        A row that ends in the trunk is in the branch of the row before it. One branch has no trunk.
        """
        forks = [index for index in part[1:] if self.rows[index].last > self.common[index]]
        trunk = min((self.common[index] for index in forks), default=0)
        starts = [part.start, *(index for index in forks if self.common[index] == trunk)]
        return trunk, [range(*ends) for ends in zip(starts, [*starts[1:], part.stop], strict=True)]

    def own_lengths(self, trunk: int, branch: range) -> list[tuple[int, int]]:
        """(tokens before those that it adds, how many it adds) of each row of a branch."""
        starts = [trunk, *self.common[branch.start + 1 : branch.stop]]
        lasts = [row.last for row in self.rows[branch.start : branch.stop]]
        return [(start, last - start) for start, last in zip(starts, lasts, strict=True)]

    @property
    def load(self) -> int:
        """Tokens of a micro-batch that it takes: those of its pass, or more where it lays out many keys."""
        return _load(self.own_lengths(0, range(len(self.rows))))

    def branch_load(self, trunk: int, branch: range) -> int:
        """The same of a branch behind the trunk."""
        return _load(self.own_lengths(trunk, branch))

    def rows_that_fill(self, room: int) -> list[int]:
        """Places of the rows that fill `room` best: whole branches of the tree's trunk, of that of its
        largest branch, or of one further down; none where not even one fits."""
        best, most = list[int](), 0
        part = range(len(self.rows))
        while True:
            trunk, branches = self.branches(part)
            # Further down the trunk is only longer, and leaves less of the room to branches.
            if len(branches) == 1 or room - trunk <= most:
                return best
            loads = [self.branch_load(trunk, branch) for branch in branches]
            choice = fullest(loads, room - trunk)
            if (load := sum(loads[index] for index in choice)) > most:
                best, most = [place for index in choice for place in branches[index]], load
            part = branches[loads.index(max(loads))]

    def first_leaf(self) -> list[int]:
        """Places of the rows that are one path from the root."""
        part = range(len(self.rows))
        while len(branches := self.branches(part)[1]) > 1:
            part = branches[0]
        return list(part)

    def parts(self, places: Sequence[int]) -> tuple["PrefixTree", "PrefixTree"]:
        """The rows at `places`, which ascend, as a tree, and all others as one."""
        chosen_places = set(places)
        return self._take(places), self._take(
            [each for each in range(len(self.rows)) if each not in chosen_places]
        )

    def _take(self, places: Sequence[int]) -> "PrefixTree":
        between = pairwise(places)
        # Rows are in the order of their tokens: two of them share what every pair between them shares.
        common = [min(self.common[before + 1 : place + 1]) for before, place in between]
        return PrefixTree([self.rows[place] for place in places], [0, *common] if places else [])


def _load(lengths: Sequence[tuple[int, int]]) -> int:
    """`lengths`: (tokens before those that it adds, how many it adds) of each row."""
    num_keys = sum(start + length for start, length in lengths if start and length)
    return max(sum(length for _, length in lengths), -(-num_keys // MOST_LAID_OUT))


def packed_trees(
    rows: Sequence[WeightedRow], max_tokens: int, *, share_prefixes: bool = True, whole_groups: bool = False
) -> list[list[PrefixTree]]:
    """Micro-batches of at most `max_tokens` tokens, 0 for one that holds all, and MOST_LAID_OUT keys for each
    that are laid out; rows without a trained token are in none.

    A tree above that, and here and there one that fills what is left, is split, its trunk computed once for
    each part, unless `whole_groups`; a row that is longer has a micro-batch of its own.
    """
    max_tokens = max_tokens or ALL
    left = _Left(_trees(rows, share_prefixes=share_prefixes, whole_groups=whole_groups))
    batches: list[list[PrefixTree]] = []
    while left.entries:
        batches.append(left.filling(max_tokens, can_split=not whole_groups))
    return batches


def rank_shares(
    rows: Sequence[WeightedRow], num_ranks: int, *, share_prefixes: bool = True, whole_groups: bool = False
) -> list[list[WeightedRow]]:
    """The rows of each rank, so that all ranks have about as much to compute; a tree stays together where
    that does not keep others waiting, and with `whole_groups` always.

    Costs are tokens, a trunk once for each rank that has a branch of it, and what attention adds to them.
    The dearest tree first to the rank that has least; then branches move from the rank that has most.
    """
    trees = _trees(rows, share_prefixes=share_prefixes, whole_groups=whole_groups)
    costs = [_costs(tree) for tree in trees]
    order = sorted(
        range(len(trees)),
        key=lambda each: (-sum((cost for _, cost in costs[each][1]), costs[each][0]), trees[each].key),
    )
    ranks = [_RankShare() for _ in range(num_ranks)]
    for index in order:
        least = min(ranks, key=lambda each: each.cost)
        for branch in costs[index][1]:
            least.add(index, costs[index][0], branch)
    # Every move makes the larger of two costs smaller, so this ends.
    while not whole_groups and _move_one(ranks, [trunk for trunk, _ in costs]):
        pass
    return [
        [row for branches in each.branches.values() for rows, _ in branches for row in rows] for each in ranks
    ]


def fewest(rows: Sequence[WeightedRow], whole_groups: bool) -> list[WeightedRow]:
    """The row with least to compute, with all of its group under `whole_groups`."""
    least = min(rows, key=lambda row: (row.last, row.index))
    if not whole_groups:
        return [least]
    return [row for row in rows if row.sample.group_key == least.sample.group_key]


_Branch = tuple[list[WeightedRow], float]
"""Rows that go on together behind a trunk, and what they cost beside it."""


@dataclass(slots=True)
class _RankShare:
    """The rows of one rank so far."""

    cost: float = 0.0
    branches: dict[int, list[_Branch]] = field(default_factory=dict[int, list[_Branch]])
    """By tree."""

    def add(self, tree: int, trunk_cost: float, branch: _Branch) -> None:
        self.cost += branch[1] + (0.0 if tree in self.branches else trunk_cost)
        self.branches.setdefault(tree, []).append(branch)


def _costs(tree: PrefixTree) -> tuple[float, list[_Branch]]:
    """Costs of computing the trunk, and each branch behind it."""
    trunk, branches = tree.branches(range(len(tree.rows)))
    return _work(0, trunk), [
        (
            tree.rows[branch.start : branch.stop],
            sum(_work(start, length) for start, length in tree.own_lengths(trunk, branch)),
        )
        for branch in branches
    ]


def _work(start: int, length: int) -> float:
    """Work of `length` tokens that follow `start` others, in tokens."""
    # Each token attends to all before it: to `start + length / 2` keys on average.
    return length * (1.0 + (start + length / 2.0) / EQUAL_WORK)


def _move_one(ranks: Sequence[_RankShare], trunk_costs: Sequence[float]) -> bool:
    """Move the branch from the rank that has most to the one that has least that brings them nearest to each
    other; False where none does."""
    most, least = max(ranks, key=lambda each: each.cost), min(ranks, key=lambda each: each.cost)
    best, move = most.cost, None
    for tree, branches in most.branches.items():
        trunk = trunk_costs[tree]
        cost_there = 0.0 if tree in least.branches else trunk
        for place, (_, cost) in enumerate(branches):
            # The trunk is saved here only where its last branch leaves, and paid there only by the first.
            cost_here = cost + (trunk if len(branches) == 1 else 0.0)
            higher = max(most.cost - cost_here, least.cost + cost + cost_there)
            if higher < best:
                best, move = higher, (tree, place, cost_here)
    if move is None:
        return False
    tree, place, cost_here = move
    branch = most.branches[tree].pop(place)
    if not most.branches[tree]:
        del most.branches[tree]
    most.cost -= cost_here
    least.add(tree, trunk_costs[tree], branch)
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
        # No choice can fill more than all of the room.
        if sums[-1] >> room:
            break
    total = sums[-1].bit_length() - 1
    places: list[int] = []
    for index in range(len(sums) - 2, -1, -1):
        # The sizes before do not reach the total by themselves, so this one is part of it.
        if not sums[index] >> total & 1:
            places.append(index)
            total -= sizes[index]
    return places[::-1]


class _Left:
    """Trees that are in no micro-batch yet, the largest first."""

    def __init__(self, trees: Iterable[PrefixTree]) -> None:
        self.entries = sorted(map(_entry, trees), key=_size_and_key)

    def filling(self, max_tokens: int, *, can_split: bool) -> list[PrefixTree]:
        """Take out what fills one micro-batch; a tree, or a row, that is larger has one of its own."""
        if can_split and -self.entries[0][0] > max_tokens:
            too_large = bisect_left(self.entries, -max_tokens, key=lambda entry: entry[0])
            first = self._best_part(max_tokens, too_large) or self._split(0, self.entries[0][2].first_leaf())
        else:
            first = self.entries.pop(0)[2]
        trees, room = [first], max_tokens - first.load
        # Only some trees are tried at a time, so others may still fit behind them.
        while places := self._fitting(room):
            # From the last on, because each `pop` moves the entries behind it.
            for index in reversed(fullest([-self.entries[place][0] for place in places], room)):
                trees.append(self.entries.pop(places[index])[2])
                room -= trees[-1].load
        if can_split and room * LITTLE_ROOM > max_tokens:
            part = self._best_part(room, len(self.entries))
            trees += [part] if part is not None else []
        return trees

    def _fitting(self, room: int) -> range:
        """Places of trees of all sizes that `room` holds."""
        start = bisect_left(self.entries, -room, key=lambda entry: entry[0])
        return range(start, len(self.entries), max(1, (len(self.entries) - start) // MOST_TRIED))

    def _best_part(self, room: int, among: int) -> PrefixTree | None:
        """The branches that fill `room` best, of one of the first `among` trees, taken out of it; None where
        none fits, or a trunk would be computed again for little."""
        best, most, where = list[int](), 0, -1
        for place, (_, _, tree) in enumerate(self.entries[: min(among, MOST_SPLIT)]):
            if not (places := tree.rows_that_fill(room)):
                continue
            part, rest = tree.parts(places)
            again = part.num_tokens + rest.num_tokens - tree.num_tokens
            own = part.num_tokens - again
            if own > most and own * LEAST_GAIN > again:
                where, best, most = place, places, own
                if part.num_tokens == room:
                    break
        return self._split(where, best) if most else None

    def _split(self, index: int, places: Sequence[int]) -> PrefixTree:
        part, rest = self.entries.pop(index)[2].parts(places)
        if rest.rows:
            insort(self.entries, _entry(rest), key=_size_and_key)
        return part


_Entry = tuple[int, tuple[str, int, int, int], PrefixTree]
"""(minus its load, its key, the tree)."""


def _entry(tree: PrefixTree) -> _Entry:
    return -tree.load, tree.key, tree


def _size_and_key(entry: _Entry) -> tuple[int, tuple[str, int, int, int]]:
    return entry[:2]


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


def needs_mask(num_runs: int, num_queries: int, length: int, columns: int) -> bool:
    """Whether attention of a bucket takes a mask for `num_queries` tokens of each run.

    Runs have at most `length` tokens, their paths at most `columns`. Without a mask, queries stand at their
    tokens' columns of the paths.
    Where at least half of a path is its run, the kernel does better without: half of the products are left
    out.
    """
    if num_queries == length and 2 * length >= columns:
        return False
    return num_runs * num_queries * columns <= MOST_MASKED or columns > MOST_SPREAD * length


def bucket_order(prefix_lengths: IntArray, lengths: IntArray) -> IntArray:
    """Rows of like prompts together, the longest first."""
    return np.lexsort((-prefix_lengths, -lengths, -_kind(prefix_lengths)))


def _kind(prefix_lengths: IntArray) -> IntArray:
    """Prompts whose lengths differ by less than a factor of two are alike; no prompt is like none."""
    return np.frexp(prefix_lengths.astype(np.float64))[1]


def _trees(rows: Sequence[WeightedRow], *, share_prefixes: bool, whole_groups: bool) -> list[PrefixTree]:
    """One for each task, or for each group under `whole_groups`; otherwise cut where nothing is shared."""
    by_key: dict[tuple[str, ...], list[WeightedRow]] = {}
    for row in rows:
        if len(row.places):
            key = row.sample.group_key
            by_key.setdefault(key if whole_groups else key[:1], []).append(row)
    trees: list[PrefixTree] = []
    for members in by_key.values():
        members.sort(key=lambda row: row.sample.order_key)
        if share_prefixes and len(members) > 1:
            # Descending, so that a row stands before those that end within it. The sort is stable: rows of
            # the same tokens keep the order of their keys, whatever order they came in.
            members.sort(key=_token_bytes, reverse=True)
        pairs = pairwise(members)
        common = [0, *(_num_shared(*pair) if share_prefixes else 0 for pair in pairs)]
        starts = [0] if whole_groups else [index for index, num in enumerate(common) if not num]
        for start, end in zip(starts, [*starts[1:], len(members)], strict=True):
            trees.append(PrefixTree(members[start:end], common[start:end]))
    return trees


def _token_bytes(row: WeightedRow) -> bytes:
    """Ids, none below 0, that compare as bytes as they do as numbers."""
    return row.sample.token_ids_T[: row.last].astype(">i8").tobytes()


def _num_shared(before: WeightedRow, row: WeightedRow) -> int:
    """Length of the common beginning; 0 where it is not worth it."""
    limit = min(before.last, row.last)
    differs = before.sample.token_ids_T[:limit] != row.sample.token_ids_T[:limit]
    num_shared = int(differs.argmax()) if differs.any() else limit
    return num_shared if num_shared * LEAST_SHARED >= row.last else 0
