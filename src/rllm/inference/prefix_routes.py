"""The server that has read a prompt's beginning: conversations and their branches go back to it.

ids ──► blocks of BLOCK ──► key of each beginning ──► who answered the last call that began so
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Place = TypeVar("Place")

BLOCK = 64
"""Ids; servers keep what they have read in blocks as well."""
MOST_BLOCKS = 1 << 16
"""Beginnings that are remembered, the last ones that were used."""


class PrefixRoutes(Generic[Place]):
    """The last place that has read each beginning."""

    def __init__(self) -> None:
        self._places: OrderedDict[int, Place] = OrderedDict()

    def find(self, ids: Sequence[int]) -> Place | None:
        """The place that has read the longest beginning of `ids`, of at least half of them."""
        keys = list(_keys(ids))
        for key in reversed(keys[(len(ids) - 1) // (2 * BLOCK) :]):
            if key in self._places:
                return self._places[key]
        return None

    def note(self, ids: Sequence[int], place: Place) -> None:
        """`place` has read `ids`."""
        for key in _keys(ids):
            self._places[key] = place
            self._places.move_to_end(key)
        while len(self._places) > MOST_BLOCKS:
            self._places.popitem(last=False)

    def forget(self, place: Place) -> None:
        """Nothing leads there any more."""
        for key in [key for key, each in self._places.items() if each is place]:
            del self._places[key]


def _keys(ids: Sequence[int]) -> Iterator[int]:
    key = 0
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hash((key, tuple(ids[end - BLOCK : end])))
        yield key
