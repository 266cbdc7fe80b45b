"""Lights out: a press turns a light and those beside it; in the end all are off."""

from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, require_integer
from rllm.environments.games.parsing import cell
from rllm.environments.games.world import game_world
from rllm.environments.symmetry import smallest_image
from rllm.errors import ConfigError

_ON, _OFF = "O."


class LightsOut(Game):
    """An instance is a drawing: O is on, . is off."""

    name = "lights-out"
    title = "Lights out"
    turns = 14
    instance_keys = ("rows",)

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        rows = instance["rows"]
        if (
            not isinstance(rows, list)
            or not 2 <= len(rows) <= 6
            or any(
                not isinstance(row, str) or len(row) != len(rows) or set(row) - {_ON, _OFF} for row in rows
            )
        ):
            raise ConfigError(f"`rows` is {rows!r:.200}; give a square of 2 to 6 rows made of O and .")
        self._size = len(rows)
        self._lights = sum(1 << place for place, light in enumerate("".join(rows)) if light == _ON)
        self._num_on = self._lights.bit_count()
        if _presses(self._size, self._lights) is None:
            raise ConfigError(f"`rows` is {rows!r:.200}; no presses turn all lights off.")

    @staticmethod
    def draw(rng: Random, *, size: int = 3) -> dict[str, Any] | None:
        require_integer("size", size, 2, 5)
        lights = 0
        for place in range(size * size):
            if rng.random() < 0.5:
                lights ^= _pressed(size, place)
        drawn = "".join(_ON if lights >> place & 1 else _OFF for place in range(size * size))
        return {"rows": [drawn[row : row + size] for row in range(0, size * size, size)]} if lights else None

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """Whichever way the board is turned."""
        return smallest_image(instance["rows"])

    @property
    def rules(self) -> str:
        return (
            "Lights out: turn all lights off. O is on, . is off. A press turns a light and those above, "
            "below, left and right of it on or off. Answer with the row and column to press, counted from 1, "
            'such as "2 3".'
        )

    def board(self) -> str:
        drawn = [_ON if self._lights >> place & 1 else _OFF for place in range(self._size**2)]
        return "\n".join(" ".join(drawn[row : row + self._size]) for row in range(0, len(drawn), self._size))

    def play(self, move: str) -> str:
        row, column = cell(move, self._size, self._size)
        self._lights ^= _pressed(self._size, row * self._size + column)
        return ""

    @property
    def is_won(self) -> bool:
        return self._lights == 0

    @property
    def is_lost(self) -> bool:
        return False

    def moves(self) -> list[str]:
        return [f"{row + 1} {column + 1}" for row in range(self._size) for column in range(self._size)]

    def expert_move(self) -> str:
        """The first press of a shortest solution; the order of presses does not matter."""
        place = (_presses(self._size, self._lights) or (0,))[0]
        return f"{place // self._size + 1} {place % self._size + 1}"

    def progress(self) -> float:
        return max(0.0, 1.0 - self._lights.bit_count() / self._num_on)


@lru_cache(maxsize=64)
def _pressed(size: int, place: int) -> int:
    """The lights that a press turns, as bits."""
    row, column = divmod(place, size)
    beside = ((row, column), (row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
    return sum(1 << (down * size + right) for down, right in beside if 0 <= down < size and 0 <= right < size)


@lru_cache(maxsize=65_536)
def _presses(size: int, lights: int) -> tuple[int, ...] | None:
    """The fewest presses that turn all off; None where nothing does.

    What is pressed in the first row settles the rest: a light still on has to be turned from below.
    """
    best: tuple[int, ...] | None = None
    for first in range(2**size):
        left, presses = lights, [place for place in range(size) if first >> place & 1]
        for place in presses:
            left ^= _pressed(size, place)
        for place in range(size, size * size):
            if left >> (place - size) & 1:
                presses.append(place)
                left ^= _pressed(size, place)
        if left == 0 and (best is None or len(presses) < len(best)):
            best = tuple(presses)
    return best


class LightsOutEnv(GameEnv):
    """Lights out for agents."""

    game_class = LightsOut


WORLD = game_world(LightsOutEnv)
