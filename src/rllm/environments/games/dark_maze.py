"""A maze in the dark: who walks feels which ways are open and no more, and has to remember how they came.

Its instances are those of `maze`. Who keeps a hand on one wall walks each corridor at most once in each
direction, so that the turns there are suffice for every maze, whatever its drawing.
"""

from collections.abc import Mapping
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.maze import Maze
from rllm.environments.games.world import game_world


class DarkMaze(Maze):
    """`maze` without its drawing: the player is told the open ways."""

    name = "dark-maze"
    title = "Maze in the dark"

    @classmethod
    def turns_for(cls, arguments: Mapping[str, Any]) -> int:
        """Every corridor between two cells there and back, at two characters each."""
        size = arguments["size"] if "size" in arguments else len(arguments["rows"]) // 2
        return 4 * (size**2 - 1)

    @property
    def rules(self) -> str:
        return (
            "Maze in the dark: find the goal. You are told which ways are open. Answer with one word: Up, "
            "Down, Left or Right."
        )

    def board(self) -> str:
        return " ".join(self.moves())


class DarkMazeEnv(GameEnv):
    """The maze in the dark for agents."""

    game_class = DarkMaze


WORLD = game_world(DarkMazeEnv)
