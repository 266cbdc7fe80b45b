"""Any game as an environment: who is asked how often, what an invalid move costs, and what is paid.

task ──► GameEnv ──► rules + board ──► "Right" ──► Game.play ──► board, 1.0 for a game that is won
                                         └─ no legal move: nothing changes, one of `max_invalid` is spent
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from rllm.environments.base import BaseEnv, Moved, moved
from rllm.environments.games.game import (
    Game,
    InvalidMove,
    draw_defaults,
    drawn_instance,
    require_choice,
    require_integer,
    require_known,
)
from rllm.errors import AgentError, ConfigError
from rllm.types.episode import Action

_PLAYING_KEYS = ("max_turns", "max_invalid", "shaping", "show_rules")
"""The keys of how a game is played, whatever game it is."""
_INVALID_MOVES = 3
_MAX_TOLD_TURNS = 200
"""Fewer turns than this belong to the rules; nobody plans with more."""
HABITS = {"first": 0, "last": -1}
"""Name of a bad habit -> which of all legal moves it plays, whatever the board shows."""
_NAMING_KEYS = ("task_id", "uid")
"""The names that data sets give to a row; they say nothing about the environment."""


class GameEnv(BaseEnv):
    """One game of its `game_class`; 1 for winning it, 0 for everything else unless the game says otherwise.

    Every answer is a turn. One that is no legal move changes nothing and is told why; the game is lost with
    number `max_invalid` of them, and cut off after `max_turns` answers. With `shaping` s a game that ends
    unwon pays -s * (1 - progress), so that near misses differ and yet nothing but a win is above zero. The
    rules stand above the first board, unless `show_rules` is off. An episode depends on the instance and the
    moves alone: a seed changes nothing.
    """

    game_class: ClassVar[type[Game]]

    def __init__(
        self,
        instance: Mapping[str, Any],
        *,
        max_turns: int | None = None,
        max_invalid: int = _INVALID_MOVES,
        shaping: float = 0.0,
        show_rules: bool = True,
    ) -> None:
        game = self.game_class
        self._instance = dict(instance)
        self._game = game(instance)
        if self._game.is_won or self._game.is_lost:
            raise ConfigError(
                f"This instance of {game.name} is over before it begins: {self._instance!r:.200}"
            )
        self._max_turns = game.turns_for(instance) if max_turns is None else max_turns
        require_integer("max_turns", self._max_turns, 1, 1_000_000)
        require_integer("max_invalid", max_invalid, 1, 1_000_000)
        require_choice("show_rules", show_rules, (True, False))
        self._max_invalid = max_invalid
        self._shaping = self._checked_shaping(shaping)
        self._show_rules = show_rules
        self._num_turns = 0
        self._num_invalid = 0
        self._over = True
        self._at_beginning = True
        """Nobody has had the game in hands, so that `reset` need not set up what may take long again."""

    @property
    def game(self) -> Game:
        """The game as it stands; who looks at it sees what is hidden from the player."""
        self._at_beginning = False
        return self._game

    @property
    def instance(self) -> dict[str, Any]:
        """All there is to know about this one game."""
        return self._instance

    @property
    def max_turns(self) -> int:
        """The number of answers."""
        return self._max_turns

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        if not self._at_beginning:
            self._game = self.game_class(self._instance)
        self._at_beginning = True
        self._num_turns = self._num_invalid = 0
        self._over = False
        board = self._game.board()
        return f"{self._rules()}\n\n{board}" if self._show_rules else board, {}

    def step(self, action: Any) -> Moved:
        if self._over:
            raise AgentError("GameEnv.step: there is no game to play; call reset first.")
        text = action.action if isinstance(action, Action) else action
        self._num_turns += 1
        self._at_beginning = False
        try:
            if not isinstance(text, str):
                raise InvalidMove("a move is text.")
            remark = self._game.play(text.strip())
            is_valid = True
        except InvalidMove as invalid:
            is_valid = False
            self._num_invalid += 1
            left = self._max_invalid - self._num_invalid
            remark = f"Invalid move: {invalid} ({left} more and the game is lost.)"
        is_won = self._game.is_won
        is_over = is_won or self._game.is_drawn or self._game.is_lost
        terminated = is_over or self._num_invalid >= self._max_invalid
        truncated = not terminated and self._num_turns >= self._max_turns
        self._over = terminated or truncated
        outcome = self._outcome(terminated, truncated)
        info = {"valid": is_valid, "invalid_moves": self._num_invalid, "outcome": outcome}
        observation = self._observation(remark, outcome)
        return moved(observation, self._reward(outcome), info, terminated=terminated, truncated=truncated)

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The environment of a task made by `game_tasks`.

        Instead of `split`, `index` and what is drawn with, a task may hold an `instance` of its own.
        """
        game, what = cls.game_class, f"A task of {cls.game_class.name}"
        playing = {key: info[key] for key in _PLAYING_KEYS if key in info}
        parameters = {key: info[key] for key in info if key not in (*_PLAYING_KEYS, *_NAMING_KEYS)}
        if "instance" in parameters:
            require_known(what, info, ("instance", *_PLAYING_KEYS, *_NAMING_KEYS))
            if not isinstance(parameters["instance"], Mapping):
                raise ConfigError(f"`instance` is {parameters['instance']!r:.200}; it must be an object.")
            return cls(parameters["instance"], **playing)
        names = ("instance", "split", "index", *draw_defaults(game), *_PLAYING_KEYS, *_NAMING_KEYS)
        require_known(what, parameters, names)
        for key in ("split", "index"):
            if key not in parameters:
                raise ConfigError(f"{what} needs `split` and `index`, or `instance`.")
        return cls(drawn_instance(game, **parameters, max_turns=playing.get("max_turns")), **playing)

    def _rules(self) -> str:
        """Those of the game, and how many answers there are."""
        turns = f" You have {self._max_turns} turns." if self._max_turns <= _MAX_TOLD_TURNS else ""
        return f"{self._game.rules}{turns}"

    def _observation(self, remark: str, outcome: str) -> str:
        end = {
            "won": "You won.",
            "drawn": "Nobody won.",
            "lost": "You lost.",
            "out_of_turns": "No turns are left.",
            "playing": "",
        }
        return "\n".join(part for part in (remark, self._game.board(), end[outcome]) if part)

    def _outcome(self, is_terminated: bool, truncated: bool) -> str:
        if self._game.is_won:
            return "won"
        if self._game.is_drawn:
            return "drawn"
        return "lost" if is_terminated else "out_of_turns" if truncated else "playing"

    def _reward(self, outcome: str) -> float:
        if outcome not in ("lost", "out_of_turns"):
            return float(outcome == "won")
        distance = 1.0 - (self._game.progress() or 0.0)
        return self._game.losing_pays - self._shaping * distance + 0.0  # no -0.0

    def _checked_shaping(self, shaping: float) -> float:
        if isinstance(shaping, bool) or not isinstance(shaping, int | float) or not 0.0 <= shaping <= 1.0:
            raise ConfigError(
                f"`shaping` is {shaping!r:.200}; it is the most that a lost game costs, from 0 to 1."
            )
        if shaping and self._game.progress() is None:
            raise ConfigError(
                f"`shaping` is {shaping}, but {self._game.name} has no measure of progress; use 0."
            )
        return float(shaping)


def game_tasks(
    env_class: type[GameEnv],
    split: str,
    count: int,
    *,
    start: int = 0,
    label: str = "",
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Instances `start` to `start + count - 1` of a split as tasks; each goes into `env_class.from_dict`.

    `label`: what task ids begin with, if not with the game's name. `arguments`: what the game is drawn with,
    and `max_turns`, `max_invalid`, `shaping`, `show_rules`. An instance is drawn when its task is played, so
    that a hundred thousand tasks cost nothing.
    """
    if count < 0 or start < 0:
        raise ConfigError(f"`count` is {count} and `start` is {start}; instances are counted from 0 upwards.")
    game = env_class.game_class
    defaults = draw_defaults(game)
    require_known(f"The tasks of {game.name}", arguments, (*defaults, *_PLAYING_KEYS))
    parameters = {name: arguments.get(name, default) for name, default in defaults.items()}
    settings = {
        "max_turns": game.turns_for(parameters),
        "max_invalid": _INVALID_MOVES,
        **parameters,
        **arguments,
    }
    tasks = [
        {
            "task_id": f"{label or game.name}-{split}-{index}",
            "split": split,
            "index": index,
            **settings,
        }
        for index in range(start, start + count)
    ]
    if tasks:
        env_class.from_dict(tasks[0])  # refuses impossible arguments before work starts
    return tasks


def require_habit(habit: str, habits: Iterable[str] = tuple(HABITS)) -> None:
    """Raises ConfigError for one that is not among `habits`; "" is none."""
    if habit and habit not in (names := tuple(habits)):
        raise ConfigError(f"`habit` is {habit!r:.200}; choose {' or '.join(names)}, or leave it out.")


def demonstration(
    env_class: type[GameEnv],
    task: Mapping[str, Any],
    *,
    noise: float,
    rng: np.random.Generator,
    tags: bool = False,
    habit: str = "",
    whole_games: bool = False,
) -> list[tuple[str, str]]:
    """One game of the expert as (observation, answer) pairs.

    With probability `noise` a move is any legal one instead, shown as if it were meant, or with a `habit`
    always the first or the last of them: whoever imitates that greedily falls into the habit, and learns the
    right move as well. With `whole_games` the habit is that of a game instead of a move: where one bad move
    loses, a right one is followed by right ones and seen to pay. A game that the expert gives up after a move
    of this kind breaks off. With `tags` an answer is <answer>move</answer>, without it the move alone.
    """
    require_habit(habit)
    if not 0.0 <= noise <= 1.0:
        raise ConfigError(f"`noise` is {noise}; it is a probability, so choose a number from 0 to 1.")
    env = env_class.from_dict(dict(task))
    observation, _ = env.reset()
    turns: list[tuple[str, str]] = []
    done = False
    strays_always = whole_games and rng.random() < noise
    while not done and not env.game.expert_gave_up:
        if strays_always or (noise and not whole_games and rng.random() < noise):
            moves = env.game.moves()
            move = moves[HABITS[habit]] if habit else moves[rng.integers(len(moves))]
        else:
            move = env.game.expert_move()
        turns.append((observation, f"<answer>{move}</answer>" if tags else move))
        observation, _, done, _ = env.step(move)
    return turns
