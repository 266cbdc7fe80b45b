"""Mastermind: find the hidden code; each guess is answered with how many digits are right."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_integer
from rllm.environments.games.parsing import short_repr
from rllm.environments.games.world import game_world
from rllm.errors import ConfigError

_DIGITS = "123456789"


class Mastermind(Game):
    """The code is `length` digits from 1 to `num_digits`; a digit may come more than once."""

    name = "mastermind"
    title = "Mastermind"
    turns = 10
    instance_keys = ("code", "num_digits")

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        code, num_digits = instance["code"], instance["num_digits"]
        require_integer("num_digits", num_digits, 2, 9)
        if not isinstance(code, str) or not 2 <= len(code) <= 5 or set(code) - set(_DIGITS[:num_digits]):
            raise ConfigError(
                f"`code` is {code!r:.200}; it is 2 to 5 digits from 1 to {num_digits}, written as text."
            )
        self._code: str = code
        self._digits = _DIGITS[:num_digits]
        self._history: list[tuple[str, tuple[int, int]]] = []

    @staticmethod
    def draw(rng: Random, *, length: int = 4, num_digits: int = 6) -> dict[str, Any]:
        require_integer("length", length, 2, 5)
        require_integer("num_digits", num_digits, 2, 9)
        code = "".join(rng.choice(_DIGITS[:num_digits]) for _ in range(length))
        return {"code": code, "num_digits": num_digits}

    @property
    def rules(self) -> str:
        return (
            f"Mastermind: find the secret code of {len(self._code)} digits from 1 to {self._digits[-1]}; a "
            "digit may come more than once. After each guess you see how many digits are in the right place "
            f"and how many more are in the code but elsewhere. Answer with {len(self._code)} digits, such as "
            f"{'1122211'[: len(self._code)]}."
        )

    def board(self) -> str:
        lines = [f"{guess}: {exact} in place, {near} elsewhere" for guess, (exact, near) in self._history]
        return "\n".join(lines) or "No guesses so far."

    def play(self, move: str) -> str:
        guess = move.replace(" ", "")
        if len(guess) != len(self._code) or set(guess) - set(self._digits):
            raise InvalidMove(
                f"{short_repr(move)} is not {len(self._code)} digits from 1 to {self._digits[-1]}."
            )
        self._history.append((guess, answer_to(guess, self._code)))
        return ""

    @property
    def is_won(self) -> bool:
        return bool(self._history) and self._history[-1][0] == self._code

    @property
    def is_lost(self) -> bool:
        return False

    def moves(self) -> list[str]:
        """All codes, also those that no answer allows any more."""
        return list(_fitting(self._digits, len(self._code), ()))

    def expert_move(self) -> str:
        """A code that fits all answers and, answered in the worst way, leaves the fewest."""
        return _best_guess(self._digits, len(self._code), tuple(self._history))

    def progress(self) -> float:
        return max((exact for _, (exact, _) in self._history), default=0) / len(self._code)


def answer_to(guess: Sequence[str], code: Sequence[str]) -> tuple[int, int]:
    """(digits in the right place, more digits that are elsewhere in the code)."""
    exact = sum(one == other for one, other in zip(guess, code, strict=True))
    return exact, (Counter(guess) & Counter(code)).total() - exact


@lru_cache(maxsize=4096)
def _fitting(digits: str, length: int, history: tuple[tuple[str, tuple[int, int]], ...]) -> tuple[str, ...]:
    if not history:
        return tuple("".join(code) for code in product(digits, repeat=length))
    guess, answer = history[-1]
    return tuple(code for code in _fitting(digits, length, history[:-1]) if answer_to(guess, code) == answer)


@lru_cache(maxsize=16_384)
def _best_guess(digits: str, length: int, history: tuple[tuple[str, tuple[int, int]], ...]) -> str:
    if not history:  # two of one digit, then two of another: best or near it in every size
        half = (length + 1) // 2
        return digits[0] * half + digits[1] * (length - half)
    codes = _fitting(digits, length, history)
    # Each guess is compared with all codes, so of many only some 30 are tried.
    guesses = codes[:: max(1, len(codes) // 30)]

    def worst(guess: str) -> int:
        return max(Counter(answer_to(guess, code) for code in codes).values())

    return min(guesses, key=worst)


class MastermindEnv(GameEnv):
    """Mastermind for agents."""

    game_class = Mastermind


WORLD = game_world(MastermindEnv)
