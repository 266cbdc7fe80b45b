"""Sokoban: push every box onto a goal. Boxes cannot be pulled, so a wrong push may be for ever."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_integer
from rllm.environments.games.parsing import STEP_OF, direction
from rllm.environments.games.world import game_world
from rllm.environments.symmetry import smallest_drawing
from rllm.errors import ConfigError

_SYMBOLS = "#_.$*@+"
_MAX_STATES = 100_000
_Place = tuple[int, int]
_State = tuple[_Place, frozenset[_Place]]
"""Where the player is, and the boxes."""


@dataclass(slots=True, frozen=True)
class _Yard:
    """The parts of a level that never move."""

    floor: frozenset[_Place]
    goals: frozenset[_Place]

    def after(self, state: _State, move: str) -> _State | None:
        """The state that a move leads to; None for one that is not possible."""
        player, boxes = state
        target = _beside(player, move)
        if target not in self.floor:
            return None
        if target not in boxes:
            return target, boxes
        behind = _beside(target, move)
        if behind not in self.floor or behind in boxes:
            return None
        return target, boxes - {target} | {behind}

    def is_solved(self, state: _State) -> bool:
        return state[1] == self.goals

    def has_stuck_box(self, state: _State) -> bool:
        """A box in a corner that is no goal: it will never move again."""
        return any(
            (_beside(box, "Up") not in self.floor or _beside(box, "Down") not in self.floor)
            and (_beside(box, "Left") not in self.floor or _beside(box, "Right") not in self.floor)
            for box in state[1] - self.goals
        )


class Sokoban(Game):
    """An instance is a drawing in the usual symbols, with _ for floor."""

    name = "sokoban"
    title = "Sokoban"
    turns = 30
    instance_keys = ("rows",)

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        rows = instance["rows"]
        if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
            raise ConfigError(f"`rows` is {rows!r:.200}; give the rows of a yard as a list of text.")
        cells = "".join(rows)
        num_boxes, num_goals = (sum(map(cells.count, symbols)) for symbols in ("$*", ".*+"))
        if set(cells) - set(_SYMBOLS) or cells.count("@") + cells.count("+") != 1 or num_boxes != num_goals:
            raise ConfigError(
                f"`rows` is {rows!r:.200}; a yard is made of {_SYMBOLS}, with one player and a goal for each "
                "box."
            )
        places = {(row, column): each for row, line in enumerate(rows) for column, each in enumerate(line)}
        self._num_columns = [len(row) for row in rows]
        self._yard = _Yard(
            frozenset(place for place, each in places.items() if each != "#"),
            frozenset(place for place, each in places.items() if each in ".*+"),
        )
        player = next(place for place, each in places.items() if each in "@+")
        self._state: _State = player, frozenset(place for place, each in places.items() if each in "$*")
        self._plan: dict[_State, str] = {}

    @staticmethod
    def draw(rng: Random, *, size: int = 6, num_boxes: int = 2, num_walls: int = 2) -> dict[str, Any] | None:
        """A yard of `size` x `size` with its outer wall; `num_walls` more stand inside."""
        require_integer("size", size, 5, 9)
        inside = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
        require_integer("num_boxes", num_boxes, 1, 3)
        require_integer("num_walls", num_walls, 0, len(inside) // 3)
        places = rng.sample(inside, 2 * num_boxes + 1 + num_walls)
        grid = [["#"] * size for _ in range(size)]
        for row, column in inside:
            grid[row][column] = "_"
        for number, (row, column) in enumerate(places):
            kind = (
                "@"
                if number == 0
                else "$"
                if number <= num_boxes
                else "."
                if number <= 2 * num_boxes
                else "#"
            )
            grid[row][column] = kind
        return {"rows": ["".join(row) for row in grid]}

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """The drawing, however it is turned or mirrored."""
        return smallest_drawing(instance["rows"])

    @property
    def rules(self) -> str:
        return (
            "Sokoban: push every box onto a goal. # wall, _ floor, @ you, + you on a goal, $ box, * box on a "
            "goal, . goal. Walk into a box to push it; two boxes at once are too heavy, and boxes cannot be "
            "pulled. Answer with one word: Up, Down, Left or Right."
        )

    def board(self) -> str:
        return "\n".join(
            "".join(self._symbol((row, column)) for column in range(num_columns))
            for row, num_columns in enumerate(self._num_columns)
        )

    def play(self, move: str) -> str:
        state = self._yard.after(self._state, direction(move))
        if state is None:
            raise InvalidMove("a wall, or a box that cannot be pushed, is in the way.")
        self._state = state
        return ""

    @property
    def is_won(self) -> bool:
        return self._yard.is_solved(self._state)

    @property
    def is_lost(self) -> bool:
        """A box stands in a corner that is no goal, or nothing can move."""
        return self._yard.has_stuck_box(self._state) or not self.moves()

    def moves(self) -> list[str]:
        return [each for each in STEP_OF if self._yard.after(self._state, each) is not None]

    def expert_move(self) -> str:
        """The next move of a shortest solution."""
        if self._state not in self._plan:
            state = self._state
            for move in _solution(self._yard, state) or ():
                self._plan[state] = move
                state = self._yard.after(state, move) or state
        return self._plan.get(self._state) or self.moves()[0]

    def progress(self) -> float:
        return len(self._state[1] & self._yard.goals) / len(self._yard.goals)

    def _symbol(self, place: _Place) -> str:
        player, boxes = self._state
        if place not in self._yard.floor:
            return "#"
        is_goal = place in self._yard.goals
        if place == player:
            return "+" if is_goal else "@"
        if place in boxes:
            return "*" if is_goal else "$"
        return "." if is_goal else "_"


def _beside(place: _Place, towards: str) -> _Place:
    down, right = STEP_OF[towards]
    return place[0] + down, place[1] + right


@lru_cache(maxsize=4096)
def _solution(yard: _Yard, start: _State) -> tuple[str, ...] | None:
    """The moves of a shortest solution: breadth-first; None where there is none, or it is too far to find."""
    came_from: dict[_State, tuple[_State, str] | None] = {start: None}
    queue = deque([start])
    while queue and len(came_from) < _MAX_STATES:
        state = queue.popleft()
        if yard.is_solved(state):
            moves: list[str] = []
            while (step := came_from[state]) is not None:
                state, move = step
                moves.append(move)
            return tuple(reversed(moves))
        for move in STEP_OF:
            following = yard.after(state, move)
            if following is None or following in came_from or yard.has_stuck_box(following):
                continue
            came_from[following] = state, move
            queue.append(following)
    return None


class SokobanEnv(GameEnv):
    """Sokoban for agents."""

    game_class = Sokoban


WORLD = game_world(SokobanEnv)
