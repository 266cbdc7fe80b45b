"""A maze in the dark: who walks feels which ways are open and no more, and has to remember how they came.

    P . . .      "Right" goes on past the straight corridor, to the corner; "Down Left" is all one is told
    # # # .

Its instances are those of `maze`. Who keeps a hand on one wall walks each corridor at most once in each
direction, so that the turns there are suffice for every maze, whatever its drawing. The expert does that: it
sees no more than the player does, so that what it shows can be learned.
"""

from collections.abc import Mapping
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.maze import Maze
from rllm.environments.games.parsing import direction
from rllm.environments.games.world import game_world

_AROUND = ("Up", "Left", "Down", "Right")
"""Each is a turn to the left of the one before."""
_LEFT_AHEAD_RIGHT_BACK = (1, 0, 3, 2)


class DarkMaze(Maze):
    """`maze` without its drawing: the player is told the open ways, wherever there is a choice of them."""

    name = "dark-maze"
    title = "Maze in the dark"

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        self._heading = 0

    @classmethod
    def turns_for(cls, arguments: Mapping[str, Any]) -> int:
        """Every corridor between two cells there and back."""
        size = arguments["size"] if "size" in arguments else len(arguments["rows"]) // 2
        return 2 * (size**2 - 1)

    @property
    def rules(self) -> str:
        return (
            "Maze in the dark: find the goal. You are told which ways are open. A move goes on to where the "
            "corridor bends, forks or ends, or to the goal. Answer with one word: Up, Down, Left or Right."
        )

    def board(self) -> str:
        return " ".join(self.moves())

    def play(self, move: str) -> str:
        super().play(move)
        self._heading = _AROUND.index(direction(move))
        straight = {_AROUND[self._heading], _AROUND[self._heading - 2]}
        while not self.is_won and set(self.moves()) == straight:
            super().play(move)
        return ""

    def expert_move(self) -> str:
        """Keep the left hand on the wall."""
        ways = [_AROUND[(self._heading + turn) % 4] for turn in _LEFT_AHEAD_RIGHT_BACK]
        return next(way for way in ways if way in self.moves())


class DarkMazeEnv(GameEnv):
    """The maze in the dark for agents."""

    game_class = DarkMaze


WORLD = game_world(DarkMazeEnv)
