"""The share of one turn in a whole conversation: the first items of a list that only grows.

    row:      m0 m1 m2 m3 m4 …      one list for all turns of a trajectory
    turn 1:   m0 m1                 Prefix(row, 2)
    turn 2:   m0 m1 m2 m3           Prefix(row, 4)

As lists of their own, the turns of an episode would take memory and time with the square of their number.
"""

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from copy import deepcopy
from itertools import islice
from operator import is_
from typing import Any, SupportsIndex, TypeVar, cast, final, overload

T = TypeVar("T")

_MAX_SHOWN = 12
"""Items that are written whole."""


@final
class Prefix(MutableSequence[T]):
    """The first `length` items of `row`, all that it has by default. Equal to a list of the same items.

    Changed, it becomes a list of its own first: other views of the row stay as they are. It has no
    subclasses, so `type(x) is Prefix` asks what `isinstance` would, which is slow for an abstract class.
    """

    __slots__ = ("_length", "_row")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, row: list[T], length: int | None = None) -> None:
        self._row = row
        self._length = len(row) if length is None else length

    def shares_row_with(self, other: object) -> bool:
        """Whether one of the two is the beginning of the other, because both are views of one row."""
        return type(other) is Prefix and self._row is cast("Prefix[Any]", other)._row

    def followed_by(self, items: Sequence[T]) -> "Prefix[T]":
        """A view that goes on with `items`: of the same row, where nothing else goes on from here."""
        row = self._row if self._length == len(self._row) else list(self)
        row.extend(items)
        return Prefix(row)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return islice(self._row, self._length)

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._row[start:stop:step] if step > 0 else list(self)[index]
        place = index.__index__()
        if not -self._length <= place < self._length:
            raise IndexError("list index out of range")
        return self._row[place if place >= 0 else place + self._length]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._own()[index] = value
        self._length = len(self._row)

    def __delitem__(self, index: Any) -> None:
        del self._own()[index]
        self._length = len(self._row)

    def insert(self, index: int, value: T) -> None:
        self._own().insert(index, value)
        self._length = len(self._row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefix | list):
            return NotImplemented
        items = cast("Sequence[Any]", other)
        if len(self) != len(items):
            return False
        return self.shares_row_with(items) or self[:] == items[:]

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self]

    def __deepcopy__(self, memo: dict[int, Any]) -> list[T]:
        return deepcopy(self[:], memo)

    def __copy__(self) -> "Prefix[T]":
        return Prefix(self._row, self._length)

    def __reduce__(self) -> Any:
        return list, (self[:],)

    def __repr__(self) -> str:
        """Its ends: written whole by every turn, it would make the text of a long trajectory quadratic, which
        asyncio.run() makes for nobody of whatever a coroutine returns."""
        if self._length <= _MAX_SHOWN:
            return repr(self[:])
        first, last = (", ".join(map(repr, self[part])) for part in (slice(3), slice(-3, None)))
        return f"[{first}, … {self._length - 6} more …, {last}]"

    def _own(self) -> list[T]:
        self._row = self[:]
        return self._row


def shared(earlier: Sequence[T] | None, later: Sequence[T], *, by_value: bool = False) -> Prefix[T]:
    """`later` as a view that goes on from `earlier`, where it begins with the very same objects.

    `by_value`: with equal ones, which is compared ten times as fast; for what cannot be changed, such as ids.
    """
    if type(later) is Prefix:
        return cast("Prefix[T]", later)
    view = cast("Prefix[T]", earlier)
    if type(earlier) is not Prefix or len(later) < len(view):
        return Prefix(list(later))
    same = later[: len(view)] == view[:] if by_value else all(map(is_, view, later))
    if not same:
        return Prefix(list(later))
    return view.followed_by(later[len(view) :])
