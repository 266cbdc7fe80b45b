"""Sudoku of four by four: every row, column and block holds 1 to 4; each grid has one solution.

Each place has a name, a letter, which stands before its digit, so that a move reads as the board does:

    a1b2c.d4
    e3f.g1h2      "c3" ──► the place c holds 3
    i2j1k4l3
    m4n3o2p1
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_integer
from rllm.environments.games.parsing import short_repr
from rllm.environments.games.world import game_world
from rllm.errors import ConfigError

_SIZE, _BLOCK = 4, 2
_DIGITS = "1234"
_EMPTY = "."
_NAMES = "abcdefghijklmnop"
"""The names of the places, row by row."""
_MOVE = re.compile(r"([a-p]) ?([1-4])", re.IGNORECASE)


class Sudoku(Game):
    """An instance is the grid: digits and dots."""

    name = "sudoku"
    title = "Sudoku"
    turns = 14
    instance_keys = ("rows",)

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        rows = instance["rows"]
        if not isinstance(rows, list) or [len(str(row)) for row in rows] != [_SIZE] * _SIZE:
            raise ConfigError(f"`rows` is {rows!r:.200}; give four rows of four digits or dots as text.")
        self._grid = "".join(map(str, rows))
        if set(self._grid) - {*_DIGITS, _EMPTY} or len(_solutions(self._grid)) != 1:
            raise ConfigError(
                f"`rows` is {rows!r:.200}; it must be made of 1 to 4 and dots, with one solution."
            )
        self._solution = _solutions(self._grid)[0]
        self._num_empty = self._grid.count(_EMPTY)

    @staticmethod
    def draw(
        rng: Random, *, num_empty: int = 6, max_empty: int = 8, in_order: bool = False
    ) -> dict[str, Any] | None:
        """From `num_empty` to `max_empty` places are taken out; None where that leaves several solutions.

        `in_order`: only grids that can be filled from the first empty place to the last, each digit being the
        only one that its row, column and block leave.
        """
        require_integer("num_empty", num_empty, 1, 12)
        require_integer("max_empty", max_empty, num_empty, 12)
        grid = rng.choice(_all_grids())
        for place in rng.sample(range(_SIZE * _SIZE), rng.randint(num_empty, max_empty)):
            grid = f"{grid[:place]}{_EMPTY}{grid[place + 1 :]}"
        if len(_solutions(grid)) != 1 or (in_order and not _fills_in_order(grid)):
            return None
        return {"rows": [grid[row : row + _SIZE] for row in range(0, _SIZE * _SIZE, _SIZE)]}

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """Whatever rows, columns and blocks are exchanged in the ways that keep a sudoku one, and whichever
        digit is called 1."""
        grid = "".join(instance["rows"])
        holes = [each == _EMPTY for each in grid]
        patterns = [rearrange(holes) for rearrange in _rearrangements()]
        first = min(patterns)  # digits are renamed, which takes time, only where the empty places tie
        return min(
            _canonical_digits("".join(rearrange(grid)))
            for rearrange, pattern in zip(_rearrangements(), patterns, strict=True)
            if pattern == first
        )

    @classmethod
    def kind(cls, instance: Mapping[str, Any]) -> str:
        return f"{''.join(instance['rows']).count(_EMPTY)} empty"

    @property
    def rules(self) -> str:
        return (
            "Sudoku: fill the grid so that every row, column and 2 x 2 block holds 1, 2, 3 and 4. A letter "
            "names a place, and what follows it is its digit, or a dot where it is empty. There is one "
            "solution, and a digit that is not its loses the game. Answer with a letter and a digit, such "
            'as "c3".'
        )

    def board(self) -> str:
        places = [f"{name}{digit}" for name, digit in zip(_NAMES, self._grid, strict=True)]
        return "\n".join("".join(places[row : row + _SIZE]) for row in range(0, _SIZE * _SIZE, _SIZE))

    def play(self, move: str) -> str:
        match = _MOVE.fullmatch(move)
        if match is None:
            raise InvalidMove(
                f"{short_repr(move)} is not a letter from a to p and a digit from 1 to 4, such as c3."
            )
        place = _NAMES.index(match[1].lower())
        if self._grid[place] != _EMPTY:
            raise InvalidMove("that place is taken.")
        self._grid = f"{self._grid[:place]}{match[2]}{self._grid[place + 1 :]}"
        return ""

    @property
    def is_won(self) -> bool:
        return self._grid == self._solution

    @property
    def is_lost(self) -> bool:
        """A digit stands where the solution has another."""
        pairs = zip(self._grid, self._solution, strict=True)
        return any(digit not in (_EMPTY, right) for digit, right in pairs)

    def moves(self) -> list[str]:
        return [
            f"{name}{digit}"
            for name, each in zip(_NAMES, self._grid, strict=True)
            if each == _EMPTY
            for digit in _DIGITS
        ]

    def expert_move(self) -> str:
        """The place with the fewest possible digits gets the right one."""
        empty = [place for place, each in enumerate(self._grid) if each == _EMPTY]
        place = min(empty, key=lambda place: len(_possible(self._grid, place)))
        return f"{_NAMES[place]}{self._solution[place]}"

    def progress(self) -> float:
        return 1.0 - self._grid.count(_EMPTY) / self._num_empty if self._num_empty else 1.0


@cache
def _rearrangements() -> tuple[Callable[[Sequence[Any]], tuple[Any, ...]], ...]:
    """The 128 ways to put the places in an order in which a sudoku is one still."""
    lines = [
        (*first, *second)
        for one, other in (((0, 1), (2, 3)), ((2, 3), (0, 1)))
        for first in (one, one[::-1])
        for second in (other, other[::-1])
    ]
    orders = [
        tuple(row * _SIZE + column for row in rows for column in columns)
        for rows in lines
        for columns in lines
    ]
    transposes = [tuple(place % _SIZE * _SIZE + place // _SIZE for place in order) for order in orders]
    return tuple(itemgetter(*order) for order in (*orders, *transposes))


def _canonical_digits(grid: str) -> str:
    """The digits called 1, 2, 3, 4 in the order in which they come up."""
    digits = dict.fromkeys(grid.replace(_EMPTY, ""))
    return grid.translate({ord(digit): str(number) for number, digit in enumerate(digits, start=1)})


@lru_cache(maxsize=16)
def _peers(place: int) -> tuple[int, ...]:
    """Places in the same row, column or block."""
    row, column = divmod(place, _SIZE)
    return tuple(
        other
        for other in range(_SIZE * _SIZE)
        if other != place
        and (
            other // _SIZE == row
            or other % _SIZE == column
            or (other // _SIZE // _BLOCK, other % _SIZE // _BLOCK) == (row // _BLOCK, column // _BLOCK)
        )
    )


def _possible(grid: str, place: int) -> list[str]:
    """Digits that no peer has."""
    digits = {grid[peer] for peer in _peers(place)}
    return [digit for digit in _DIGITS if digit not in digits]


def _fills_in_order(grid: str) -> bool:
    while (place := grid.find(_EMPTY)) >= 0:
        if len(possible := _possible(grid, place)) > 1:
            return False
        grid = f"{grid[:place]}{possible[0]}{grid[place + 1 :]}"
    return True


@lru_cache(maxsize=65_536)
def _solutions(grid: str) -> tuple[str, ...]:
    """All that there are, none for digits that are in each other's way."""
    if any(digit != _EMPTY and digit not in _possible(grid, place) for place, digit in enumerate(grid)):
        return ()
    return tuple(_fillings(grid))


def _fillings(grid: str) -> Iterator[str]:
    place = grid.find(_EMPTY)
    if place < 0:
        yield grid
        return
    for digit in _possible(grid, place):
        yield from _fillings(f"{grid[:place]}{digit}{grid[place + 1 :]}")


@lru_cache(maxsize=1)
def _all_grids() -> tuple[str, ...]:
    """The 288 full grids."""
    return _solutions(_EMPTY * _SIZE * _SIZE)


class SudokuEnv(GameEnv):
    """Sudoku for agents."""

    game_class = Sudoku


WORLD = game_world(SudokuEnv)
