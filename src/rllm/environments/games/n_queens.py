"""N queens: some stand already; place the others, row by row from the top, so that none attacks another.

A row is written as the column of its queen, so that a board of eight rows is eight signs:

    3.7.15..   "5" ──► 357.15..
"""

from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_integer
from rllm.environments.games.parsing import number
from rllm.environments.games.world import game_world
from rllm.environments.symmetry import images_of
from rllm.errors import ConfigError

_NO_QUEEN = -1


class NQueens(Game):
    """An instance says for each row in which column a queen stands, -1 for none."""

    name = "n-queens"
    title = "N queens"
    turns = 10
    instance_keys = ("queens",)

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        queens = instance["queens"]
        if not isinstance(queens, list) or not 4 <= len(queens) <= 9:
            raise ConfigError(
                f"`queens` is {queens!r:.200}; give one column, or -1, for each of 4 to 9 rows."
            )
        for column in queens:
            require_integer("queens", column, _NO_QUEEN, len(queens) - 1)
        self._queens: tuple[int, ...] = tuple(queens)
        self._initial_queens = self._queens
        if _completion(self._queens) is None or _NO_QUEEN not in self._queens:
            raise ConfigError(
                f"`queens` is {queens}; there must be queens left to place, and places for them."
            )

    @staticmethod
    def draw(rng: Random, *, size: int = 8, num_given: int = 3, max_given: int = 4) -> dict[str, Any]:
        """From `num_given` to `max_given` rows have a queen."""
        require_integer("size", size, 4, 9)
        require_integer("num_given", num_given, 0, size - 1)
        require_integer("max_given", max_given, num_given, size - 1)
        solution = rng.choice(_solutions(size))
        fixed_rows = set(rng.sample(range(size), rng.randint(num_given, max_given)))
        return {"queens": [column if row in fixed_rows else _NO_QUEEN for row, column in enumerate(solution)]}

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """Whichever way the board is turned."""
        queens = instance["queens"]
        places = [(row, column) for row, column in enumerate(queens) if column != _NO_QUEEN]
        return [len(queens), min(sorted(image) for image in images_of(places, len(queens)))]

    @classmethod
    def kind(cls, instance: Mapping[str, Any]) -> str:
        return f"{instance['queens'].count(_NO_QUEEN)} to place"

    @property
    def rules(self) -> str:
        size = len(self._queens)
        return (
            f"N queens: place queens until {size} of them stand on the {size} x {size} board and none "
            "attacks another along a row, a column or a diagonal. Each sign is a row from top to bottom: a "
            "digit is the column of its queen, a dot is a row without one; queens stay where they are. "
            f"Answer with the column, 1 to {size}, of the queen for the first dot."
        )

    def board(self) -> str:
        return "".join("." if column == _NO_QUEEN else str(column + 1) for column in self._queens)

    def play(self, move: str) -> str:
        row, column = self._queens.index(_NO_QUEEN), number(move, 1, len(self._queens)) - 1
        if (attacker := self._attacker(row, column)) is not None:
            raise InvalidMove(f"the queen at {attacker[0] + 1} {attacker[1] + 1} attacks that place.")
        self._queens = (*self._queens[:row], column, *self._queens[row + 1 :])
        return ""

    @property
    def is_won(self) -> bool:
        return _NO_QUEEN not in self._queens

    @property
    def is_lost(self) -> bool:
        """The first row without a queen has no place for one."""
        return not self.is_won and not self.moves()

    def moves(self) -> list[str]:
        if self.is_won:
            return []
        row, size = self._queens.index(_NO_QUEEN), len(self._queens)
        return [str(column + 1) for column in range(size) if self._attacker(row, column) is None]

    def expert_move(self) -> str:
        """The first row without a queen gets that of a solution."""
        solution = _completion(self._queens)
        if solution is None:
            return self.moves()[0]
        return str(solution[self._queens.index(_NO_QUEEN)] + 1)

    def progress(self) -> float:
        to_place = self._initial_queens.count(_NO_QUEEN)
        return 1.0 - self._queens.count(_NO_QUEEN) / to_place

    def _attacker(self, row: int, column: int) -> tuple[int, int] | None:
        """A queen that attacks the place, or stands on it."""
        for other_row, other in enumerate(self._queens):
            if other != _NO_QUEEN and (
                other_row == row or other == column or abs(other_row - row) == abs(other - column)
            ):
                return other_row, other
        return None


@lru_cache(maxsize=65_536)
def _completion(queens: tuple[int, ...]) -> tuple[int, ...] | None:
    """The first solution that has all of `queens`."""
    return next((each for each in _solutions(len(queens)) if _has(each, queens)), None)


def _has(solution: tuple[int, ...], queens: tuple[int, ...]) -> bool:
    return all(queen in (_NO_QUEEN, column) for column, queen in zip(solution, queens, strict=True))


@lru_cache(maxsize=16)
def _solutions(size: int) -> tuple[tuple[int, ...], ...]:
    """All of them, row by row; 92 for eight rows, 352 for nine."""
    partial: list[tuple[int, ...]] = [()]
    for row in range(size):
        partial = [
            (*columns, column)
            for columns in partial
            for column in range(size)
            if all(
                column != other and row - above != abs(column - other) for above, other in enumerate(columns)
            )
        ]
    return tuple(partial)


class NQueensEnv(GameEnv):
    """N queens for agents."""

    game_class = NQueens


WORLD = game_world(NQueensEnv)
