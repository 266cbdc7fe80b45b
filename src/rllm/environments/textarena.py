"""TextArena's games for one player that run without a network: `textarena/NAME`, such as
`textarena/Mastermind`.

    name, seed ──► TextArena's own rules ──► what is new since the last move ──► "[3 1 4 2]"

Won is what TextArena pays 1 or more for; a share of the way is no win, and neither is a reward that is text,
which is how some games report a bad action. Its games draw from Python's global generator, at the start and
in between: each game here has a state of that generator to itself, put in place for its own steps and taken
out again, under a lock. Splits are by seed: several games have few different beginnings, so one may come up
in two splits.
"""

import random
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_integer, require_known
from rllm.environments.games.parsing import short_repr
from rllm.environments.games.world import game_world
from rllm.environments.textarena_experts import EXPERTS
from rllm.environments.world import World
from rllm.errors import ConfigError, MissingExtraError

TURNS = {
    "2048": 2000,
    "Blackjack": 40,
    "Countdown": 12,
    "Crosswords": 60,
    "Cryptarithm": 100,
    "FifteenPuzzle": 200,
    "FrozenLake": 100,
    "GuessTheNumber": 10,
    "LightsOut": 20,
    "LogicPuzzle": 60,
    "Mastermind": 20,
    "Minesweeper": 100,
    "PegJump": 20,
    "RushHour": 100,
    "Secretary": 6,
    "Set": 20,
    "Slitherlink": 200,
    "Sokoban": 30,
    "Sudoku": 100,
    "ThreeCardMonte": 3,
    "TowerOfHanoi": 14,
}
"""The games, and how many answers each has here."""
_WORDS_NEEDED = "its words are downloaded from NLTK when it is played"
_JUDGE_NEEDED = "a model behind OpenRouter leads the game"
_NEWER_PYTHON = "its source is written for Python 3.12"
_TWO_PLAYERS = "it needs a second player"
REFUSED = {
    **dict.fromkeys(
        ("Hangman", "WordLadder", "Wordle", "WordSearch", "WordChains", "SpellingBee", "Codenames"),
        _WORDS_NEEDED,
    ),
    **dict.fromkeys(("GuessWho", "TwentyQuestions"), _JUDGE_NEEDED),
    **dict.fromkeys(("Klondike", "Chess"), _NEWER_PYTHON),
    **dict.fromkeys(
        ("TicTacToe", "KuhnPoker", "ConnectFour", "Nim", "PigDice", "LiarsDice", "SimpleNegotiation"),
        _TWO_PLAYERS,
    ),
    "IteratedPrisonersDilemma": _TWO_PLAYERS,
    "Bandit": "its test for the best button is never true, so nobody can win",
    "BabyAiText": "it needs packages that nobody can install here; play babyai/NAME instead",
}
"""Games that are in TextArena and not here, and why."""
SLOW = frozenset({"RushHour", "Sokoban"})
"""A second or more to begin."""
_MINE = "You hit a mine"
_MOVE = re.compile(r"\[[^\[\]\n]{1,100}\](?:[\s,]*\[[^\[\]\n]{1,100}\]){0,200}")
_CHATTY = ("LogicPuzzle", "RushHour")
"""Games that print what is meant for their authors."""
_ENDLESS = 10**9
_RANDOM = threading.Lock()


class TextArenaGame(Game):
    """A move stands in square brackets, which may be left out; text around them makes it none.

    Some games take several at once, one after the other: [0 1 A] [0 2 T].
    """

    name = "textarena"
    title = "TextArena"
    turns = 100
    instance_keys = ("title", "seed")

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        require_playable(instance["title"])
        require_integer("seed", instance["seed"], 0, 2**32 - 1)
        self._name: str = instance["title"]
        self.has_expert = self._name in EXPERTS
        self._random_state = Random(instance["seed"]).getstate()
        self._seen: list[str] = []
        self._done = False
        self._final_reward: Any = 0.0
        with self._own_randomness():
            self._env = _make(self._name)
            self._env.reset(num_players=1, seed=instance["seed"])
            self._env.state.error_allowance = (
                _ENDLESS  # how many invalid moves there are is for GameEnv to say
            )
        prompt = self._news()
        self._rules, self._board = prompt[0] if prompt else "", "\n".join(prompt[1:])

    @staticmethod
    def draw(rng: Random, *, title: str = "GuessTheNumber") -> dict[str, Any] | None:
        require_playable(title)
        instance = {"title": title, "seed": rng.getrandbits(32)}
        if title == "FifteenPuzzle" and not _can_be_ordered(TextArenaGame(instance)._env.board):
            return None  # every other shuffle of its tiles
        return instance

    @classmethod
    def turns_for(cls, arguments: Mapping[str, Any]) -> int:
        require_playable(arguments["title"])
        return TURNS[arguments["title"]]

    @property
    def rules(self) -> str:
        return f"{self._rules.strip()}\n\nAnswer with your move in square brackets and nothing else."

    def board(self) -> str:
        return self._board

    def play(self, move: str) -> str:
        bare = move if move.startswith("[") else f"[{move}]"
        if _MOVE.fullmatch(bare) is None:
            raise InvalidMove(f"{short_repr(move)} is not a move in square brackets.")
        errors_before = self._env.state.error_count
        try:
            with self._own_randomness():
                self._done, _ = self._env.step(action=bare)
        except Exception as error:  # what a game stumbles over is the move: it was well before
            raise InvalidMove(f"the game does not know what to do with {short_repr(bare)}.") from error
        news = self._news()
        # A game counts its errors; a valid move after one sets the count back to zero.
        if self._env.state.error_count > errors_before:
            complaint = self._complaint(news)
            if _MINE in complaint:  # it calls that an invalid move, which could be tried again
                self._done = True
                return complaint
            raise InvalidMove(complaint)
        if self._done:
            self._final_reward = self._env.close()[0][0]
            self._board = "\n".join([*news, str(self._env.state.game_info[0].get("reason") or "")]).strip()
            if isinstance(self._final_reward, str):
                return "That was no valid action."
        elif news:
            self._board = "\n".join(news)
        return ""

    @property
    def is_won(self) -> bool:
        """Rewards that are text are complaints."""
        return self._done and not isinstance(self._final_reward, str) and float(self._final_reward) >= 1.0

    @property
    def is_lost(self) -> bool:
        return self._done and not self.is_won

    def moves(self) -> list[str]:
        """The expert's moves, or nothing sensible: TextArena does not say which moves there are."""
        return [self.expert_move()]

    def expert_move(self) -> str:
        """A move that leads to a win, by what is hidden in the game."""
        return EXPERTS[self._name](self._env)

    def _news(self) -> list[str]:
        """The game's messages since the last call, without the player's own words."""
        _, messages = self._env.get_observation()
        return [str(message) for speaker, message, _ in messages if speaker == -1]

    def _complaint(self, news: list[str]) -> str:
        text = " ".join(news)
        match = re.search(r"Reason: (.*?) Please resubmit", text, re.DOTALL)
        reason = " ".join((match[1] if match else text).split())
        return "the game does not take it." if reason in ("", "None") or reason[-1].isdigit() else reason

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        with _RANDOM:
            outside = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(outside)


class TextArenaEnv(GameEnv):
    """A game of TextArena for agents."""

    game_class = TextArenaGame


def require_playable(title: str) -> None:
    """Raises ConfigError for a game that is not here, with the reason or the nearest name."""
    if title in REFUSED:
        raise ConfigError(f"textarena/{title} cannot be played: {REFUSED[title]}.")
    require_known("textarena", (title,), TURNS)


def world_of(title: str) -> World:
    """The world of `textarena/TITLE`."""
    return game_world(TextArenaEnv, label=f"textarena/{title}", has_expert=title in EXPERTS, title=title)


def _make(title: str) -> Any:
    try:
        import textarena  # heavy: only who plays waits for it
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "TextArena", "games") from error
    environment: Any = textarena.make(f"{title}-v0-raw")
    if title in _CHATTY:
        # To redirect stdout would swallow what other threads print meanwhile.
        sys.modules[type(environment).__module__].print = _say_nothing  # pyright: ignore[reportAttributeAccessIssue]
    return environment


def _can_be_ordered(board: list[list[int | None]]) -> bool:
    """Whether slides can order the tiles: every slide changes both parities that are compared here."""
    cells = [16 if cell is None else cell for row in board for cell in row]
    num_swaps = sum(cells[one] > cells[other] for other in range(len(cells)) for one in range(other))
    gap = cells.index(16)
    distance = (3 - gap // 4) + (3 - gap % 4)
    return num_swaps % 2 == distance % 2


def _say_nothing(*words: Any) -> None:
    """Drop the lines that the games print; players have no use for them."""
