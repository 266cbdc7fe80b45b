"""Wordle with words of our own: find the hidden word of five letters in six guesses."""

from collections import Counter
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove
from rllm.environments.games.parsing import short_repr
from rllm.environments.games.world import game_world
from rllm.errors import ConfigError

_LENGTH = 5
_OPENING = "trace"
"""The word whose answer tells most of all words."""
_History = tuple[tuple[str, str], ...]
"""(guess, marks) pairs."""


class Wordle(Game):
    """An instance is the hidden word; of the words that may be guessed, about half can be hidden."""

    name = "wordle"
    title = "Wordle"
    turns = 6
    instance_keys = ("word",)

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        if instance["word"] not in guesses():
            raise ConfigError(f"`word` is {instance['word']!r:.200}; it is not on the list of words.")
        self._word: str = instance["word"]
        self._history: _History = ()

    @staticmethod
    def draw(rng: Random) -> dict[str, Any]:
        return {"word": rng.choice(answers())}

    @property
    def rules(self) -> str:
        return (
            "Wordle: find the hidden English word of five letters. Each guess is a word and is answered "
            "letter by letter: G is right, Y is in the word but elsewhere, - is not in the word (or not once "
            "more). Answer with one word of five letters."
        )

    def board(self) -> str:
        return "\n".join(f"{guess} {marks}" for guess, marks in self._history) or "No guesses so far."

    def play(self, move: str) -> str:
        guess = move.lower()
        if len(guess) != _LENGTH or not guess.isascii() or not guess.isalpha():
            raise InvalidMove(f"{short_repr(move)} is not a word of five letters.")
        if guess not in guesses():
            raise InvalidMove(f"{short_repr(move)} is not on the list of words.")
        self._history = (*self._history, (guess, marks_of(guess, self._word)))
        return ""

    @property
    def is_won(self) -> bool:
        return bool(self._history) and self._history[-1][0] == self._word

    @property
    def is_lost(self) -> bool:
        return False

    def moves(self) -> list[str]:
        """All words that may be guessed, also those that no answer allows any more."""
        return sorted(guesses())

    def expert_move(self) -> str:
        """The word whose answer tells most about which word is hidden; it knows the list, not the word."""
        return _best_guess(self._history) or self._word  # a task may hide a word that is no answer otherwise

    def progress(self) -> float:
        return max((marks.count("G") for _, marks in self._history), default=0) / _LENGTH


@cache
def _word_lists() -> tuple[tuple[str, ...], frozenset[str]]:
    text = resources.files("rllm").joinpath("environments/games/words.txt").read_text("utf-8")
    answer_words, others = (tuple(part.split()) for part in text.strip().split("\n\n"))
    return answer_words, frozenset((*answer_words, *others))


def answers() -> tuple[str, ...]:
    """Words that can be hidden."""
    return _word_lists()[0]


def guesses() -> frozenset[str]:
    """Words that may be guessed."""
    return _word_lists()[1]


@lru_cache(maxsize=262_144)
def marks_of(guess: str, word: str) -> str:
    """G, Y or - for each letter; a letter is marked as often as the word has it, right places first."""
    left = Counter(other for one, other in zip(guess, word, strict=True) if one != other)
    marks = ""
    for one, other in zip(guess, word, strict=True):
        if one == other:
            marks += "G"
        elif left[one] > 0:
            left[one] -= 1
            marks += "Y"
        else:
            marks += "-"
    return marks


@lru_cache(maxsize=8192)
def _fitting(history: _History) -> tuple[str, ...]:
    if not history:
        return answers()
    guess, marks = history[-1]
    return tuple(word for word in _fitting(history[:-1]) if marks_of(guess, word) == marks)


@lru_cache(maxsize=8192)
def _best_guess(history: _History) -> str | None:
    if not history:
        return _OPENING
    words = _fitting(history)
    if len(words) <= 2:
        return words[0] if words else None
    # A word that cannot be the hidden one may still tell a few words apart better than one of them.
    guesses = answers() if len(words) <= 30 else words

    def parts(guess: str) -> tuple[int, bool]:
        """(how many answers are possible, whether it may be the word)."""
        return len({marks_of(guess, word) for word in words}), guess in words

    return max(guesses, key=parts)


class WordleEnv(GameEnv):
    """Wordle for agents."""

    game_class = Wordle


WORLD = game_world(WordleEnv)
