"""Tic-tac-toe against an opponent whose replies are settled by a seed and the board.

Against the random opponent only a win counts. Nobody beats the perfect one, so against it a draw counts too.
A game begins with the board empty, or in a position that both came to by random moves. Positions are few: two
that differ in the seed of the opponent alone are the same instance.
"""

from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_choice, require_integer
from rllm.environments.games.parsing import number
from rllm.environments.games.world import game_world
from rllm.environments.symmetry import smallest_image
from rllm.errors import ConfigError

OPPONENTS = ("random", "perfect")
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_FREE, _YOU, _THEY = ".XO"
_BEST_FIRST = (4, 0, 2, 6, 8, 1, 3, 5, 7)


class TicTacToe(Game):
    """The player is X and moves next in `board`: nine characters, row by row, X, O, and a dot for free."""

    name = "tic-tac-toe"
    title = "Tic-tac-toe"
    turns = 7
    instance_keys = ("board", "seed", "opponent")

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        require_integer("seed", instance["seed"], 0, 2**63 - 1)
        require_choice("opponent", instance["opponent"], OPPONENTS)
        self._seed: int = instance["seed"]
        self._opponent: str = instance["opponent"]
        self._board: str = _checked_board(instance["board"])

    @staticmethod
    def draw(rng: Random, *, opponent: str = "random", max_played: int = 5) -> dict[str, Any] | None:
        """A position after up to `max_played` random moves of both; None where the game is over."""
        require_choice("opponent", opponent, OPPONENTS)
        require_integer("max_played", max_played, 0, 7)
        board = _FREE * 9
        for number_left in range(rng.randint(0, max_played), 0, -1):
            board = _take(board, rng.choice(_free(board)), _YOU if number_left % 2 == 0 else _THEY)
            if _is_over(board):
                return None
        return {"board": board, "seed": rng.getrandbits(32), "opponent": opponent}

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """The position, whichever way the board is turned, and who the opponent is."""
        board = instance["board"]
        return [smallest_image([board[row : row + 3] for row in (0, 3, 6)]), instance["opponent"]]

    @classmethod
    def kind(cls, instance: Mapping[str, Any]) -> str:
        return f"{instance['board'].count(_FREE)} free"

    @property
    def rules(self) -> str:
        goal = "A draw counts as a win." if self._opponent == "perfect" else "A draw counts as a loss."
        return (
            f"Tic-tac-toe: you are X. Three in a row, a column or a diagonal win. {goal} Free places show "
            "their number. Answer with the number of the place to take."
        )

    def board(self) -> str:
        cells = [str(place + 1) if each == _FREE else each for place, each in enumerate(self._board)]
        return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))

    def play(self, move: str) -> str:
        place = number(move, 1, 9) - 1
        if self._board[place] != _FREE:
            raise InvalidMove("that place is taken.")
        self._board = _take(self._board, place, _YOU)
        if not _is_over(self._board):
            self._board = _reply(self._board, self._seed, self._opponent)
        return "A draw." if _is_over(self._board) and _winner(self._board) is None else ""

    @property
    def is_won(self) -> bool:
        return _succeeds(self._board, self._opponent)

    @property
    def is_lost(self) -> bool:
        return _is_over(self._board) and not self.is_won

    def moves(self) -> list[str]:
        return [str(place + 1) for place in _free(self._board)]

    def expert_move(self) -> str:
        """A move that leads to the goal, as it knows the reply, and is sound anyway."""
        winning_move = _winning_move(self._board, self._seed, self._opponent)
        return str(_soundest_first(self._board)[0] + 1 if winning_move is None else winning_move + 1)


def _checked_board(board: Any) -> str:
    if not isinstance(board, str) or len(board) != 9 or set(board) - {_FREE, _YOU, _THEY}:
        raise ConfigError(f"`board` is {board!r:.200}; give nine places, each X, O or a dot.")
    if board.count(_THEY) - board.count(_YOU) not in (0, 1):
        raise ConfigError(f"`board` is {board!r}; X moves next, so O has as many places or one more.")
    return board


def _winner(board: str) -> str | None:
    return next(
        (board[one] for one, two, three in _LINES if _FREE != board[one] == board[two] == board[three]), None
    )


def _is_over(board: str) -> bool:
    return _winner(board) is not None or _FREE not in board


def _succeeds(board: str, opponent: str) -> bool:
    winner = _winner(board)
    return winner == _YOU or (opponent == "perfect" and winner is None and _FREE not in board)


def _free(board: str) -> list[int]:
    return [place for place, each in enumerate(board) if each == _FREE]


def _take(board: str, place: int, who: str) -> str:
    return f"{board[:place]}{who}{board[place + 1 :]}"


def _reply(board: str, seed: int, opponent: str) -> str:
    """The board after the opponent's move."""
    places = _free(board)
    if opponent == "perfect":
        values = {place: _value(_take(board, place, _THEY), _YOU) for place in places}
        places = [place for place in places if values[place] == min(values.values())]
    return _take(board, Random(f"{seed} {board}").choice(places), _THEY)


@lru_cache(maxsize=8192)
def _value(board: str, mover: str) -> int:
    """The value of a position for X under perfect play of both: 1, 0 or -1."""
    if _is_over(board):
        return {_YOU: 1, _THEY: -1, None: 0}[_winner(board)]
    other = _THEY if mover == _YOU else _YOU
    values = [_value(_take(board, place, mover), other) for place in _free(board)]
    return max(values) if mover == _YOU else min(values)


def _soundest_first(board: str) -> list[int]:
    """Free places for X by what perfect play comes to, the middle before the corners."""
    return sorted(
        _free(board), key=lambda place: (-_value(_take(board, place, _YOU), _THEY), _BEST_FIRST.index(place))
    )


@lru_cache(maxsize=65_536)
def _winning_move(board: str, seed: int, opponent: str) -> int | None:
    """A move of X after which the goal can be reached, whatever it takes; None where there is none."""
    if _is_over(board):
        return None
    for place in _soundest_first(board):
        after = _take(board, place, _YOU)
        if _succeeds(after, opponent):
            return place
        if not _is_over(after):
            board_after = _reply(after, seed, opponent)
            if _succeeds(board_after, opponent) or _winning_move(board_after, seed, opponent) is not None:
                return place
    return None


class TicTacToeEnv(GameEnv):
    """Tic-tac-toe for agents."""

    game_class = TicTacToe


WORLD = game_world(TicTacToeEnv)
