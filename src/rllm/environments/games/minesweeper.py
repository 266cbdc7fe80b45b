"""Minesweeper on boards that need no guess: whoever thinks it through never has to be lucky."""

from collections.abc import Iterable, Mapping
from itertools import combinations
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_integer
from rllm.environments.games.parsing import cell
from rllm.environments.games.world import game_world
from rllm.environments.symmetry import images_of
from rllm.errors import ConfigError

_Place = tuple[int, int]
_Clue = tuple[frozenset[_Place], int]
"""Hidden places, and how many mines are among them."""
_MAX_CLUES = 300


class Minesweeper(Game):
    """An instance says where the mines are (row, column, from 0), and which place is open to begin with."""

    name = "minesweeper"
    title = "Minesweeper"
    turns = 25
    instance_keys = ("size", "mines", "opened")

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        require_integer("size", instance["size"], 2, 12)
        self._size: int = instance["size"]
        places = [*instance["mines"], instance["opened"]]
        for place in places:
            if not isinstance(place, list) or len(place) != 2:
                raise ConfigError(f"{place!r:.200} is no place; write [row, column].")
            for number in place:
                require_integer("mines, opened", number, 0, self._size - 1)
        *mines, first = [(row, column) for row, column in places]
        if not mines or len(set(places := [*mines, first])) != len(places):
            raise ConfigError("An instance of minesweeper has one mine or more, and no place twice.")
        self._mines = frozenset(mines)
        self._open: set[_Place] = set()
        self._has_exploded = False
        self._reveal(first)
        self._num_given = len(self._open)

    @staticmethod
    def draw(rng: Random, *, size: int = 5, num_mines: int = 4) -> dict[str, Any] | None:
        """None where the expert would have to guess."""
        require_integer("size", size, 3, 9)
        require_integer("num_mines", num_mines, 1, size * size // 4)
        first, *mines = rng.sample(range(size * size), num_mines + 1)
        instance = {
            "size": size,
            "mines": sorted([place // size, place % size] for place in mines),
            "opened": [first // size, first % size],
        }
        game = Minesweeper(instance)
        while not game.is_won:
            safe = game._certainly_safe()
            if not safe:
                return None
            for place in safe:
                game._reveal(place)
        return instance if game._num_given + 2 <= size * size - num_mines else None

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """Whichever way the board is turned."""
        size = instance["size"]
        places = [(row, column) for row, column in [instance["opened"], *instance["mines"]]]
        return [size, min((image[0], sorted(image[1:])) for image in images_of(places, size))]

    @property
    def rules(self) -> str:
        return (
            f"Minesweeper: open every place without a mine; {len(self._mines)} places of the {self._size} x "
            f"{self._size} board hide one. A number counts the mines among the eight places around it, 0 as "
            "well; . is still closed. Where a 0 comes up, its neighbours open by themselves. To open a "
            'mine loses the game. Answer with the row and column to open, counted from 1, such as "2 5".'
        )

    def board(self) -> str:
        return "\n".join(
            " ".join(self._symbol((row, column)) for column in range(self._size)) for row in range(self._size)
        )

    def play(self, move: str) -> str:
        place = cell(move, self._size, self._size)
        if place in self._open:
            raise InvalidMove("that place is open already.")
        if place in self._mines:
            self._has_exploded = True
            return "That was a mine."
        self._reveal(place)
        return ""

    @property
    def is_won(self) -> bool:
        return not self._has_exploded and len(self._open) + len(self._mines) == self._size**2

    @property
    def is_lost(self) -> bool:
        return self._has_exploded

    def moves(self) -> list[str]:
        return [_place_text(place) for place in self._hidden_places()]

    def expert_move(self) -> str:
        """A place that cannot hold a mine by what the board shows; it does not look below."""
        return _place_text(min(self._certainly_safe() or self._hidden_places()))

    def progress(self) -> float:
        to_open = self._size**2 - len(self._mines) - self._num_given
        return (len(self._open) - self._num_given) / max(1, to_open)

    def _symbol(self, place: _Place) -> str:
        if place in self._open:
            return str(self._num_around(place))
        return "*" if self._has_exploded and place in self._mines else "."

    def _hidden_places(self) -> list[_Place]:
        places = ((row, column) for row in range(self._size) for column in range(self._size))
        return [place for place in places if place not in self._open]

    def _around(self, place: _Place) -> Iterable[_Place]:
        for row in range(max(0, place[0] - 1), min(self._size, place[0] + 2)):
            for column in range(max(0, place[1] - 1), min(self._size, place[1] + 2)):
                if (row, column) != place:
                    yield row, column

    def _num_around(self, place: _Place) -> int:
        return sum(each in self._mines for each in self._around(place))

    def _reveal(self, place: _Place) -> None:
        """Open a safe place, and what is around it where no mine is."""
        edge = [place]
        while edge:
            current = edge.pop()
            if current not in self._open:
                self._open.add(current)
                if self._num_around(current) == 0:
                    edge.extend(self._around(current))

    def _certainly_safe(self) -> set[_Place]:
        """Hidden places that follow to be safe: from one clue, or from a clue that lies within another."""
        clues: set[_Clue] = {(frozenset(self._hidden_places()), len(self._mines))}
        for place in self._open:
            neighbours = frozenset(each for each in self._around(place) if each not in self._open)
            clues.add((neighbours, self._num_around(place)))
        while True:
            safe = {place for places, num_mines in clues if num_mines == 0 for place in places}
            if safe:
                return safe
            new = set(_differences(clues)) - clues
            if not new or len(clues) > _MAX_CLUES:
                return safe
            clues |= new


def _differences(clues: set[_Clue]) -> Iterable[_Clue]:
    """The differences of clues of which one lies within another: clues about the rest."""
    for one, other in combinations(clues, 2):
        (few, fewer), (many, more) = sorted((one, other), key=lambda clue: len(clue[0]))
        if few and few < many:
            yield many - few, more - fewer


def _place_text(place: _Place) -> str:
    return f"{place[0] + 1} {place[1] + 1}"


class MinesweeperEnv(GameEnv):
    """Minesweeper for agents."""

    game_class = Minesweeper


WORLD = game_world(MinesweeperEnv)
