"""Guess the number: the answer to each guess is higher or lower; whoever halves what is left always gets
there.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, require_integer
from rllm.environments.games.parsing import number
from rllm.environments.games.world import game_world


class GuessNumber(Game):
    """The number lies from 1 to `max_number`; seven guesses are enough for 127."""

    name = "guess-number"
    title = "Guess the number"
    turns = 7
    instance_keys = ("number", "max_number")

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        require_integer("max_number", instance["max_number"], 2, 1_000_000)
        require_integer("number", instance["number"], 1, instance["max_number"])
        self._number: int = instance["number"]
        self._max_number: int = instance["max_number"]
        self._low, self._high = 1, self._max_number
        self._history: list[str] = []
        self._best_gap = self._max_number
        self._won = False

    @staticmethod
    def draw(rng: Random, *, max_number: int = 100) -> dict[str, Any]:
        require_integer("max_number", max_number, 2, 1_000_000)
        return {"number": rng.randint(1, max_number), "max_number": max_number}

    @property
    def rules(self) -> str:
        return (
            f"Guess the number: a whole number from 1 to {self._max_number}. After each guess you are told "
            "whether the number is higher or lower. Answer with one number."
        )

    def board(self) -> str:
        return "\n".join(self._history) or "No guesses so far."

    def play(self, move: str) -> str:
        guess = number(move, 1, self._max_number)
        self._best_gap = min(self._best_gap, abs(guess - self._number))
        if guess == self._number:
            self._won = True
            self._history.append(f"{guess}: right")
        elif guess < self._number:
            self._low = max(self._low, guess + 1)
            self._history.append(f"{guess}: higher")
        else:
            self._high = min(self._high, guess - 1)
            self._history.append(f"{guess}: lower")
        return ""

    @property
    def is_won(self) -> bool:
        return self._won

    @property
    def is_lost(self) -> bool:
        return False

    def moves(self) -> list[str]:
        return [str(each) for each in range(self._low, min(self._high, self._low + 1_000) + 1)]

    def expert_move(self) -> str:
        """The middle of what is left: it does not look at the number."""
        return str((self._low + self._high) // 2)

    def progress(self) -> float:
        return 1.0 - self._best_gap / self._max_number


class GuessNumberEnv(GameEnv):
    """Guess the number for agents."""

    game_class = GuessNumber


WORLD = game_world(GuessNumberEnv)
