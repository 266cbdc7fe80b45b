"""Lights out: a press turns a light and those beside it; in the end all are off.

    AB..E
    F....      a letter is a light that is on, and says how to press it: "G" turns F, G, H, B and L
    .....

Whoever presses below the first light that is on, again and again, puts out row after row. What is drawn goes
out that way to the last light, so that no press in the first row has to be tried out before.
"""

from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, require_integer
from rllm.environments.games.parsing import one_of
from rllm.environments.games.world import game_world
from rllm.environments.symmetry import smallest_image
from rllm.errors import ConfigError

_ON, _OFF = "O."
_NAMES = tuple("ABCDEFGHIJKLMNOPQRSTUVWXY")
"""The names of the places, row by row."""
_MAX_SIZE = 5


class LightsOut(Game):
    """An instance is a drawing: O is on, . is off."""

    name = "lights-out"
    title = "Lights out"
    turns = 25
    instance_keys = ("rows",)

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        rows = instance["rows"]
        if (
            not isinstance(rows, list)
            or not 2 <= len(rows) <= _MAX_SIZE
            or any(
                not isinstance(row, str) or len(row) != len(rows) or set(row) - {_ON, _OFF} for row in rows
            )
        ):
            raise ConfigError(
                f"`rows` is {rows!r:.200}; give a square of 2 to {_MAX_SIZE} rows made of O and ."
            )
        self._size = len(rows)
        self._lights = sum(1 << place for place, light in enumerate("".join(rows)) if light == _ON)
        self._num_on = self._lights.bit_count()
        if not _presses(self._size, self._lights) and self._lights:
            raise ConfigError(f"`rows` is {rows!r:.200}; no presses turn all lights off.")

    @staticmethod
    def draw(
        rng: Random, *, size: int = 5, num_presses: int = 3, max_presses: int = 6
    ) -> dict[str, Any] | None:
        """From `num_presses` to `max_presses` places turn all lights off, none of them in the first row."""
        require_integer("size", size, 2, _MAX_SIZE)
        require_integer("num_presses", num_presses, 1, size * (size - 1))
        require_integer("max_presses", max_presses, num_presses, size * (size - 1))
        lights = 0
        for place in rng.sample(range(size, size * size), rng.randint(num_presses, max_presses)):
            lights ^= _press(size, place)
        cells = "".join(_ON if lights >> place & 1 else _OFF for place in range(size * size))
        return {"rows": [cells[row : row + size] for row in range(0, size * size, size)]}

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """Whichever way the board is turned."""
        return smallest_image(instance["rows"])

    @classmethod
    def kind(cls, instance: Mapping[str, Any]) -> str:
        """The number of presses to the goal, first row first."""
        size, cells = len(instance["rows"]), "".join(instance["rows"])
        lights = sum(1 << place for place, light in enumerate(cells) if light == _ON)
        return f"{len(_presses(size, lights))} presses"

    @property
    def rules(self) -> str:
        size = self._size
        return (
            f"Lights out: turn all lights off. The {size} x {size} places are called A to "
            f"{_NAMES[size * size - 1]}, row by row; a light that is on shows its letter, any other a dot. A "
            "press turns a light and those above, below, left and right of it on or off. Answer with the "
            'letter of the place to press, such as "B".'
        )

    def board(self) -> str:
        lines = [
            name if self._lights >> place & 1 else _OFF for place, name in enumerate(_NAMES[: self._size**2])
        ]
        return "\n".join("".join(lines[row : row + self._size]) for row in range(0, len(lines), self._size))

    def play(self, move: str) -> str:
        names = _NAMES[: self._size**2]
        self._lights ^= _press(self._size, names.index(one_of(move, names)))
        return ""

    @property
    def is_won(self) -> bool:
        return self._lights == 0

    @property
    def is_lost(self) -> bool:
        return False

    def moves(self) -> list[str]:
        return list(_NAMES[: self._size**2])

    def expert_move(self) -> str:
        """The press that the first row needs; then the place below the first light that is on."""
        return _NAMES[(_presses(self._size, self._lights) or (0,))[0]]

    def progress(self) -> float:
        return max(0.0, 1.0 - self._lights.bit_count() / self._num_on)


@lru_cache(maxsize=64)
def _press(size: int, place: int) -> int:
    """The lights that a press turns, as bits."""
    row, column = divmod(place, size)
    beside = ((row, column), (row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
    return sum(1 << (down * size + right) for down, right in beside if 0 <= down < size and 0 <= right < size)


@lru_cache(maxsize=65_536)
def _presses(size: int, lights: int) -> tuple[int, ...]:
    """Presses that turn all off, in order, none of the first row if that will do; empty where nothing does.

    What is pressed in the first row settles the rest: a light still on has to be turned from below.
    """
    for first in range(2**size):
        left, presses = lights, [place for place in range(size) if first >> place & 1]
        for place in presses:
            left ^= _press(size, place)
        for place in range(size, size * size):
            if left >> (place - size) & 1:
                presses.append(place)
                left ^= _press(size, place)
        if left == 0:
            return tuple(presses)
    return ()


class LightsOutEnv(GameEnv):
    """Lights out for agents."""

    game_class = LightsOut


WORLD = game_world(LightsOutEnv)
