"""Guess the number: the answer to each guess is higher or lower; whoever halves what is left always gets
there.

    instance {"low": 37, "high": 49, "number": 41} ──► "37 to 49" ──► "43" ──► "lower", "37 to 42"
"""

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, require_integer
from rllm.environments.games.parsing import number
from rllm.environments.games.world import game_baselines, game_world
from rllm.errors import ConfigError

_LARGEST = 1_000_000
_PLAYS = 32
"""Random games of each instance: two of three are won by luck, and what is learned is measured from there."""


class GuessNumber(Game):
    """Each game has an interval of its own; halving takes as many guesses as its length has binary digits."""

    name = "guess-number"
    title = "Guess the number"
    turns = 5
    instance_keys = ("low", "high", "number")

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        require_integer("low", instance["low"], 1, _LARGEST)
        require_integer("high", instance["high"], instance["low"] + 1, _LARGEST)
        require_integer("number", instance["number"], instance["low"], instance["high"])
        self._number: int = instance["number"]
        self._first, self._last = instance["low"], instance["high"]
        self._low, self._high = self._first, self._last
        self._best_gap = self._last - self._first
        self._is_won = False

    @staticmethod
    def draw(rng: Random, *, max_number: int = 99, length: int = 31) -> dict[str, Any]:
        """A number of an interval that is longer than half of `length`, at most that long, and ends at
        `max_number` or before."""
        require_integer("max_number", max_number, 2, _LARGEST)
        require_integer("length", length, 2, _LARGEST)
        if length > max_number:
            raise ConfigError(
                f"`length` is {length} and `max_number` {max_number}; no interval is that long."
            )
        num_numbers = rng.randint(length // 2 + 1, length)
        low = rng.randint(1, max_number - num_numbers + 1)
        high = low + num_numbers - 1
        return {"low": low, "high": high, "number": rng.randint(low, high)}

    @classmethod
    def turns_for(cls, arguments: Mapping[str, Any]) -> int:
        """The greatest number of guesses that halving needs."""
        if "low" in arguments:
            return (arguments["high"] - arguments["low"] + 1).bit_length()
        return arguments["length"].bit_length()

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """The interval: it is all that a player sees, whichever the number is."""
        return [instance["low"], instance["high"]]

    @classmethod
    def kind(cls, instance: Mapping[str, Any]) -> str:
        """In which half the number lies, so that guesses which go one way only show."""
        return "upper half" if 2 * instance["number"] > instance["low"] + instance["high"] else "lower half"

    @property
    def rules(self) -> str:
        return (
            "Guess the number. You see between which numbers it lies, and after a guess if it is higher or "
            "lower. Answer with one number."
        )

    def board(self) -> str:
        return f"{self._low} to {self._high}"

    def play(self, move: str) -> str:
        guess = number(move, self._first, self._last)
        self._best_gap = min(self._best_gap, abs(guess - self._number))
        if guess == self._number:
            self._is_won = True
            self._low = self._high = guess
            return "right"
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return "higher"
        self._high = min(self._high, guess - 1)
        return "lower"

    @property
    def is_won(self) -> bool:
        return self._is_won

    @property
    def is_lost(self) -> bool:
        return False

    def moves(self) -> list[str]:
        return [str(each) for each in range(self._low, min(self._high, self._low + 1_000) + 1)]

    def expert_move(self) -> str:
        """The middle of what is left: it does not look at the number."""
        return str((self._low + self._high) // 2)

    def progress(self) -> float:
        return 1.0 - self._best_gap / (self._last - self._first)


class GuessNumberEnv(GameEnv):
    """Guess the number for agents."""

    game_class = GuessNumber


WORLD = game_world(GuessNumberEnv, baselines=partial(game_baselines, GuessNumberEnv, plays=_PLAYS))
