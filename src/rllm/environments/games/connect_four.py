"""Connect Four against an opponent whose replies are settled by a seed and the board; only a win counts.

A side is a set of bits: place (row, column) is bit 7 * column + row, the lowest row first, and the seventh
bit of a column stays empty, so that four in a line are found by shifting.
"""

from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_choice, require_integer
from rllm.environments.games.parsing import number
from rllm.environments.games.world import game_world
from rllm.errors import ConfigError

OPPONENTS = ("random", "careful")
"""The careful one wins where it can, prevents a win where it must, and else moves at random."""
_NUM_ROWS, _NUM_COLUMNS = 6, 7
_HEIGHT = _NUM_ROWS + 1
_MIDDLE_FIRST = (3, 2, 4, 1, 5, 0, 6)
_FIRST_DEPTH, _LAST_DEPTH = 4, 8
_MAX_NODES = 4_000


class ConnectFour(Game):
    """The player is X and moves next after `played`: the columns, 1 to 7, of all pieces so far."""

    name = "connect-four"
    title = "Connect Four"
    turns = 21
    instance_keys = ("played", "seed", "opponent")

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        require_integer("seed", instance["seed"], 0, 2**63 - 1)
        require_choice("opponent", instance["opponent"], OPPONENTS)
        self._seed: int = instance["seed"]
        self._opponent: str = instance["opponent"]
        self._mine, self._theirs = _sides_after(instance["played"])

    @staticmethod
    def draw(rng: Random, *, opponent: str = "random", max_played: int = 8) -> dict[str, Any] | None:
        """A position after up to `max_played` random moves of both; None where the game is over."""
        require_choice("opponent", opponent, OPPONENTS)
        require_integer("max_played", max_played, 0, 20)
        columns = "".join(str(rng.randint(1, _NUM_COLUMNS)) for _ in range(rng.randint(0, max_played)))
        if any(columns.count(column) > _NUM_ROWS for column in columns):
            return None
        if any(_has_four(side) for side in _sides_after(columns)):
            return None
        return {"played": columns, "seed": rng.getrandbits(32), "opponent": opponent}

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """The position or what it is in a mirror, and who the opponent is."""
        mirror = "".join(str(_NUM_COLUMNS + 1 - int(column)) for column in instance["played"])
        sides = min(_sides_after(instance["played"]), _sides_after(mirror))
        return [*sides, instance["opponent"]]

    @classmethod
    def kind(cls, instance: Mapping[str, Any]) -> str:
        return f"{len(instance['played'])} played"

    @property
    def rules(self) -> str:
        return (
            "Connect Four: you are X. Drop a piece into one of seven columns; it falls to the lowest free "
            "place. Four in a row, a column or a diagonal win; a full board without four counts as a loss. "
            "Answer with the number of a column, 1 to 7."
        )

    def board(self) -> str:
        lines = [
            " ".join(self._symbol(1 << (_HEIGHT * column + row)) for column in range(_NUM_COLUMNS))
            for row in reversed(range(_NUM_ROWS))
        ]
        return "\n".join([*lines, "1 2 3 4 5 6 7"])

    def play(self, move: str) -> str:
        column = number(move, 1, _NUM_COLUMNS) - 1
        if column not in _free_columns(self._mine | self._theirs):
            raise InvalidMove(f"column {column + 1} is full.")
        self._mine |= _place_in(column, self._mine | self._theirs)
        if not _has_four(self._mine) and _free_columns(self._mine | self._theirs):
            self._theirs = _reply(self._mine, self._theirs, self._seed, self._opponent)
        return ""

    @property
    def is_won(self) -> bool:
        return _has_four(self._mine)

    @property
    def is_lost(self) -> bool:
        return _has_four(self._theirs) or (not self.is_won and not self.moves())

    def moves(self) -> list[str]:
        return [str(column + 1) for column in _free_columns(self._mine | self._theirs)]

    def expert_move(self) -> str:
        """The first move of a short way to win, as it knows what will be replied."""
        winning_column = _way_to_win(self._mine, self._theirs, self._seed, self._opponent)
        return self.moves()[0] if winning_column is None else str(winning_column[0] + 1)

    def _symbol(self, bit: int) -> str:
        return "X" if self._mine & bit else "O" if self._theirs & bit else "."


def _sides_after(columns: Any) -> tuple[int, int]:
    """The pieces of X, who moves next, and those of O."""
    if not isinstance(columns, str) or any(column not in "1234567" for column in columns):
        raise ConfigError(
            f"`played` is {columns!r:.200}; give the columns as digits from 1 to 7, or nothing."
        )
    sides = [0, 0]
    for number_left, column in zip(range(len(columns), 0, -1), columns, strict=True):
        place = int(column) - 1
        if place not in _free_columns(sides[0] | sides[1]):
            raise ConfigError(
                f"`played` is {columns!r:.200}; column {column} has no room for that many pieces."
            )
        sides[number_left % 2] |= _place_in(place, sides[0] | sides[1])
    return sides[0], sides[1]


def _free_columns(stones: int) -> list[int]:
    return [column for column in _MIDDLE_FIRST if not stones >> (_HEIGHT * column + _NUM_ROWS - 1) & 1]


def _place_in(column: int, stones: int) -> int:
    """The bit where a piece comes to lie."""
    # The pieces of a column are a run of ones from the bottom on,
    # so adding its lowest bit carries into the first free place.
    bottom = 1 << (_HEIGHT * column)
    return (stones + bottom) & (((1 << _NUM_ROWS) - 1) << (_HEIGHT * column))


def _has_four(side: int) -> bool:
    for shift in (1, _HEIGHT - 1, _HEIGHT, _HEIGHT + 1):
        # Two in a line; two such pairs that are two places apart are four.
        pairs = side & (side >> shift)
        if pairs & (pairs >> (2 * shift)):
            return True
    return False


def _wins_at(side: int, stones: int) -> list[int]:
    """Columns in which a piece makes four for `side`."""
    return [column for column in _free_columns(stones) if _has_four(side | _place_in(column, stones))]


def _reply(mine: int, theirs: int, seed: int, opponent: str) -> int:
    """The opponent's pieces after its move."""
    stones = mine | theirs
    columns = _free_columns(stones)
    if opponent == "careful":
        columns = _wins_at(theirs, stones) or _wins_at(mine, stones) or columns
    return theirs | _place_in(Random(f"{seed} {mine} {theirs}").choice(columns), stones)


@lru_cache(maxsize=16_384)
def _way_to_win(mine: int, theirs: int, seed: int, opponent: str) -> tuple[int, ...] | None:
    """Columns that win, the fewest that were found; None where the search gave up."""
    nodes = 0

    def search(mine: int, theirs: int, depth: int) -> tuple[int, ...] | None:
        nonlocal nodes
        stones = mine | theirs
        if winning := _wins_at(mine, stones):
            return (winning[0],)
        if depth <= 1:
            return None
        for column in _free_columns(stones):
            nodes += 1
            if nodes > _MAX_NODES:
                return None
            after = mine | _place_in(column, stones)
            if not _free_columns(after | theirs):
                continue
            theirs_after = _reply(after, theirs, seed, opponent)
            if _has_four(theirs_after):
                continue
            rest = search(after, theirs_after, depth - 1)
            if rest is not None:
                return (column, *rest)
        return None

    for depth in range(1, _LAST_DEPTH + 1):
        # Without a piece on the board, four moves are the fewest that win.
        if depth >= _FIRST_DEPTH or mine:
            way = search(mine, theirs, depth)
            if way is not None:
                return way
    return None


class ConnectFourEnv(GameEnv):
    """Connect Four for agents."""

    game_class = ConnectFour


WORLD = game_world(ConnectFourEnv)
