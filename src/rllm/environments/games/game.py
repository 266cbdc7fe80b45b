"""The rules of one game, and how its positions are drawn; who is asked when is the business of `env`.

    (split, index) ──► drawn_instance ──► instance ──► Game(instance) ──► board, play, expert_move

An instance says all there is to know about one game: the position it begins with, what is hidden, and what
chance and opponent will do. Its identity is what is left of it without what changes nothing: which way a
board is turned, the seed of an opponent. An instance belongs to one split by a hash of its identity, so
training, validation and test share none, however many are drawn. In validation and test the first 256 tasks,
the next 256 and so on have no identity twice while there are others. Every drawn instance has been won by the
game's expert within the turns that there are.
"""

import difflib
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import lru_cache
from random import Random
from threading import Lock
from typing import Any, ClassVar

from rllm.errors import ConfigError

SPLITS = ("train", "validation", "test")
_MAX_DRAWS = 5_000
_STRETCH = 256
"""Tasks in a row of which no two are one instance, in validation and test."""
_MAX_REPEATS = 500
"""Draws in a row of what was drawn before, after which there is taken to be nothing else."""


class InvalidMove(Exception):
    """An answer that is no move, or none that the rules allow now. Says why; the game is as it was before."""


class Game(ABC):
    """One game that is being played.

    A subclass defines `draw`, a static method (generator, *, arguments) -> instance, or None for a position
    that will not do. Malformed and illegal moves raise InvalidMove before anything has changed. Nothing
    depends on anything but the instance and the moves.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """As people write it."""
    turns: ClassVar[int]
    """The number of answers unless a task says otherwise."""
    instance_keys: ClassVar[tuple[str, ...]]
    """The keys of an instance; all are needed."""
    most_moves: ClassVar[int] = 1_000_000
    """The number of moves that simple policies may make while their score is measured: seconds."""
    has_expert: bool = True
    """Whether somebody knows how to win; then nothing is drawn that they do not win."""
    losing_pays: float = 0.0
    """The pay of a game that ends unwon; a drawn game pays 0."""
    expert_gave_up: bool = False
    """Whether `expert_move` has no idea any more."""

    def __init__(self, instance: Mapping[str, Any]) -> None:
        """Set up the beginning. Raises ConfigError for an instance that is none."""
        require_known(f"An instance of {self.name}", instance, self.instance_keys)
        for key in self.instance_keys:
            if key not in instance:
                raise ConfigError(
                    f"An instance of {self.name} lacks `{key}`; it is made of "
                    f"{_name_list(self.instance_keys)}."
                )

    @staticmethod
    @abstractmethod
    def draw(rng: Random) -> dict[str, Any] | None:
        """One instance; None for one that will not do."""

    @classmethod
    def turns_for(cls, arguments: Mapping[str, Any]) -> int:
        """The number of answers that an instance drawn with `arguments` has, unless a task says otherwise."""
        return cls.turns

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """A JSON value that is equal for instances that are the same one; splits share none of them."""
        return instance

    @classmethod
    def kind(cls, instance: Mapping[str, Any]) -> str:
        """Which kind of instance it is, where success may differ between kinds."""
        return ""

    @property
    @abstractmethod
    def rules(self) -> str:
        """The rules for a player: the goal, what the board shows, how a move is written."""

    @abstractmethod
    def board(self) -> str:
        """The board as the player sees it now."""

    @abstractmethod
    def play(self, move: str) -> str:
        """Move, and say what happened; "" where the board says it all. Raises InvalidMove."""

    @property
    @abstractmethod
    def is_won(self) -> bool: ...

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """It cannot be won any more, and is over."""

    @property
    def is_drawn(self) -> bool:
        """It is over, and nobody won it."""
        return False

    @abstractmethod
    def moves(self) -> list[str]:
        """All legal moves, or some of them where they are many; never none before the game is over."""

    @abstractmethod
    def expert_move(self) -> str:
        """The move of an expert now; a legal move also in a position that is lost."""

    def progress(self) -> float | None:
        """The nearness of the goal, from 0 to 1; None in a game that has no such measure."""
        return None


def split_of(game: type[Game], instance: Mapping[str, Any]) -> str:
    """The one split an instance is drawn for: half of all train, a quarter validates, a quarter tests."""
    return _split_of_identity(game, identity_of(game, instance))


def identity_of(game: type[Game], instance: Mapping[str, Any]) -> str:
    """The identity of an instance as text."""
    return _identity(game, json.dumps(instance, sort_keys=True))


@lru_cache(maxsize=16_384)
def _identity(game: type[Game], instance: str) -> str:
    return json.dumps(game.identity(json.loads(instance)), sort_keys=True)


def _split_of_identity(game: type[Game], identity: str) -> str:
    text = json.dumps([game.name, json.loads(identity)], sort_keys=True).encode()
    quarter = hashlib.blake2b(text, digest_size=8, salt=b"games").digest()[0] % 4
    return ("test", "validation", "train", "train")[quarter]


def draw_defaults(game: type[Game]) -> dict[str, Any]:
    """The parameters that instances of `game` can be drawn with, with their defaults."""
    parameters = inspect.signature(game.draw).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def drawn_instance(
    game: type[Game], split: str, index: int, *, max_turns: int | None = None, **arguments: Any
) -> dict[str, Any]:
    """Instance number `index` of `split`, which the expert wins within `max_turns` answers.

    It is a function of these arguments alone. Each training instance is drawn by itself; in the other splits
    those before it since the last multiple of 256 are drawn as well, and none of them is drawn again.
    """
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; {game.name} has {', '.join(SPLITS)}.")
    require_integer("index", index, 0, 2**63 - 1)
    defaults = draw_defaults(game)
    require_known(f"Drawing {game.name}", arguments, defaults)
    turns = game.turns_for({**defaults, **arguments}) if max_turns is None else max_turns
    require_integer("max_turns", turns, 1, 1_000_000)
    for key, value in arguments.items():
        if not isinstance(value, str | int | float):
            raise ConfigError(f"`{key}` is {value!r:.200}; {game.name} is drawn with plain values.")
    values = tuple(sorted({**defaults, **arguments}.items()))
    if split == "train":
        return json.loads(_drawn_alone(game, index, turns, values))
    stretch, place = divmod(index, _STRETCH)
    return json.loads(_stretch(game, split, stretch, turns, values).at(place))


@lru_cache(maxsize=16_384)
def _drawn_alone(game: type[Game], index: int, max_turns: int, arguments: tuple[Any, ...]) -> str:
    return _Stretch(game, "train", index, max_turns, arguments).at(0)


@lru_cache(maxsize=256)
def _stretch(
    game: type[Game], split: str, number: int, max_turns: int, arguments: tuple[Any, ...]
) -> "_Stretch":
    return _Stretch(game, split, number, max_turns, arguments)


class _Stretch:
    """Instances of a split, drawn one after the other as needed, no two alike while there are more."""

    def __init__(
        self, game: type[Game], split: str, number: int, max_turns: int, arguments: tuple[Any, ...]
    ) -> None:
        self._game = game
        self._split = split
        self._max_turns = max_turns
        self._arguments = arguments
        self._rng = Random(f"{game.name} {split} {number}")
        self._instances: list[str] = []
        self._identities: set[str] = set()
        self._is_exhausted = False
        self._lock = Lock()  # environments are made in several threads

    def at(self, place: int) -> str:
        """Instance number `place` as JSON; when all have come up they come again in the same order."""
        with self._lock:
            while place >= len(self._instances) and not self._is_exhausted:
                self._draw()
            return self._instances[place % len(self._instances)]

    def _draw(self) -> None:
        """Append one instance, or find out that there is no other."""
        num_repeats = 0
        for _ in range(_MAX_DRAWS):
            instance = self._game.draw(self._rng, **dict(self._arguments))
            if instance is None:
                continue
            identity = identity_of(self._game, instance)
            if _split_of_identity(self._game, identity) != self._split:
                continue
            if identity in self._identities:
                num_repeats += 1
                if num_repeats == _MAX_REPEATS:
                    break
                continue
            beginning = self._game(instance)
            if not beginning.has_expert or expert_wins(beginning, self._max_turns):
                self._instances.append(json.dumps(instance))
                self._identities.add(identity)
                return
        if not self._instances:
            raise ConfigError(self._complaint())
        self._is_exhausted = True

    def _complaint(self) -> str:
        values = ", ".join(f"`{name}` {value!r}" for name, value in self._arguments)
        return (
            f"{_MAX_DRAWS} draws of {self._game.name} with {values or 'no arguments'} gave none for the "
            f"{self._split} split that its expert wins within `max_turns` {self._max_turns}; raise "
            "`max_turns`, or draw from easier or more varied games."
        )


def expert_wins(game: Game, max_turns: int) -> bool:
    """Play on as the expert does; False for a game that is over already."""
    num_played = 0
    while num_played < max_turns and not game.is_won and not game.is_lost and not game.expert_gave_up:
        game.play(game.expert_move())
        num_played += 1
    return num_played > 0 and game.is_won


def require_known(what: str, candidates: Iterable[str], known_names: Iterable[str]) -> None:
    """Raises ConfigError with the nearest name for one that is not in `known_names`."""
    names = tuple(known_names)
    for key in candidates:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            mend = f"did you mean `{close[0]}`?" if close else f"it takes {_name_list(names)}."
            raise ConfigError(f"{what} does not know `{key}`; {mend}")


def require_integer(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"`{name}` is {value!r:.200}; choose an integer from {low} to {high}.")


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    if value not in (allowed_values := tuple(choices)):
        raise ConfigError(f"`{name}` is {value!r:.200}; choose {' or '.join(map(str, allowed_values))}.")


def _name_list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
