"""FrozenLake as a picture: the same lakes and moves, and nothing of the map is written.

(split, number) ──► lake ──► FrozenLakeEnv      (split, number) ──► LakeLook: scale, place, sprites, colours
                                └── position ──────────────┴──► PNG ──► a message that shows it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllm.environments import frozenlake
from rllm.environments.base import Moved
from rllm.environments.frozenlake import (
    FrozenLakeEnv,
    baselines,
    env_arguments,
    identity,
    kind,
    lake_tasks,
)
from rllm.environments.lake_maps import SPLITS
from rllm.environments.pictures import SHAPES, SIDE, Canvas, Colour, colour_between, showing
from rllm.environments.world import World
from rllm.errors import ConfigError
from rllm.rewards.extraction import Marked, marked_answer
from rllm.types.episode import Action

_MIN_FILL = 0.72
"""Share of the picture's side that a lake takes at least."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LakeLook:
    """The looks of one lake, in all its pictures."""

    cell: int
    """Side of a cell in pixels; at most `SIDE` / cells, and no divisor of a patch but by chance."""
    corner: tuple[int, int]
    """(left, top) of the lake."""
    hole_shape: str
    goal_shape: str
    player_shape: str
    water: Colour
    ice: Colour
    hole: Colour
    goal: Colour
    player: Colour

    @classmethod
    def of_number(cls, split: str, number: int, num_cells: int) -> "LakeLook":
        """Look number `number` of a split, of a lake that many cells wide."""
        rng = np.random.Generator(np.random.Philox(key=[len(SPLITS) + SPLITS.index(split), number]))
        cell = int(rng.integers(int(SIDE / num_cells * _MIN_FILL), SIDE // num_cells + 1))
        left, top = (int(each) for each in rng.integers(0, SIDE - cell * num_cells + 1, 2))
        hole_shape, goal_shape, player_shape = (SHAPES[each] for each in rng.permutation(len(SHAPES))[:3])
        return cls(
            cell=cell,
            corner=(left, top),
            hole_shape=hole_shape,
            goal_shape=goal_shape,
            player_shape=player_shape,
            water=colour_between(rng, (0, 0, 0), (60, 60, 60)),
            ice=colour_between(rng, (150, 150, 150), (230, 230, 230)),
            hole=colour_between(rng, (0, 0, 0), (70, 70, 70)),
            goal=colour_between(rng, (0, 130, 0), (90, 255, 90)),
            player=colour_between(rng, (200, 0, 0), (255, 90, 90)),
        )

    def picture(self, rows: Sequence[str], position: tuple[int, int]) -> str:
        """The lake with the player on it, as a data URL."""
        canvas = Canvas(self.water)
        (left, top), cell = self.corner, self.cell
        for row, line in enumerate(rows):
            for column, kind_of_cell in enumerate(line):
                x, y = left + column * cell, top + row * cell
                canvas.box(x, y, cell - 1, cell - 1, self.ice)
                centre, radius = (x + cell / 2 - 1, y + cell / 2 - 1), cell / 2 - 1.5
                if kind_of_cell == "H":
                    canvas.shape(self.hole_shape, centre, radius, self.hole)
                if kind_of_cell == "G":
                    canvas.shape(self.goal_shape, centre, radius, self.goal)
                if (row, column) == position:
                    canvas.shape(self.player_shape, centre, radius, self.player)
        return canvas.data_url()


class LakePictureEnv(FrozenLakeEnv):
    """`FrozenLakeEnv` whose observations are messages that show a picture and say nothing."""

    def __init__(self, desc: Sequence[str] | None = None, **arguments: Any) -> None:
        super().__init__(desc, **arguments)
        split, number = arguments.get("split", "train"), arguments.get("seed", 0)
        self._look = LakeLook.of_number(split, number, max(len(self.desc), len(self.desc[0])))

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "LakePictureEnv":
        """See `FrozenLakeEnv.from_dict`."""
        return LakePictureEnv(**env_arguments(info))

    def step(self, action: Any) -> Moved:
        """See `FrozenLakeEnv.step`. The move is the last word of the answer, or of its last
        <answer>…</answer>."""
        answer = action.action if isinstance(action, Action) else action
        mark = marked_answer(answer.strip()) if isinstance(answer, str) else None
        return super().step(mark.text.split()[-1] if isinstance(mark, Marked) else answer)

    def _observation(self) -> Any:
        return showing(self._look.picture(self.desc, self.position))


def demonstration(task: dict[str, Any], *, reads: bool = False, **arguments: Any) -> list[tuple[Any, str]]:
    """One episode of the expert; see `frozenlake.demonstration`.

    One that `reads` writes down the cells before each move, row by row: "PFFFFHFHFFFHHFFG Right". So a
    picture has a label for each of its cells, and the move follows from words.
    """
    if not isinstance(reads, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"`reads` is {reads!r}; choose true or false.")
    if reads:
        arguments["answer"] = _cells_and_move
    return frozenlake.demonstration(task, env_class=LakePictureEnv, **arguments)


def _cells_and_move(env: FrozenLakeEnv, move: str) -> str:
    cells = env.grid.replace("\n", "")
    return f"{cells} {move}"


WORLD = World(
    env_class=LakePictureEnv,
    tasks=lake_tasks,
    demonstrate=demonstration,
    expert_args=("strolls", "hasty", "sight", "turns", "reads"),
    identity=identity,
    identity_draws=True,
    kind=kind,
    baselines=baselines,
)
