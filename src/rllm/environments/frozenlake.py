"""FrozenLake as text: Gymnasium says where a move leads, we draw the maps, show the grid and read the words.

(split, index) ──► lake_map ──► rows ──► FrozenLakeEnv ──► "PFFF\\nFHFH\\nFFFH\\nHFFG"
                                  └────► expert_move, demonstration (what supervised training starts from)
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from rllm.environments.base import BaseEnv, Moved, moved
from rllm.environments.lake_maps import canonical_map, drawn_rows, lake_map, require_drawing, require_steps
from rllm.environments.lake_values import MOVES, best_moves, distances, expected_return, outcomes_of
from rllm.environments.world import OPTIMUM, RANDOM, World
from rllm.errors import AgentError, ConfigError
from rllm.types.episode import Action

PLAYER, DROWNED, ARRIVED = "P", "X", "W"
"""The marks of the player's cell on the ice, in a hole and on the goal."""
_MAX_REPEATS = 500
"""Lakes in a row that were drawn before, after which a held-out split counts as exhausted."""
_POLICIES: dict[str, tuple[float, ...] | None] = {
    OPTIMUM: None,
    RANDOM: (0.25, 0.25, 0.25, 0.25),
    "always Left": (1.0, 0.0, 0.0, 0.0),
    "always Down": (0.0, 1.0, 0.0, 0.0),
    "always Right": (0.0, 0.0, 1.0, 0.0),
    "always Up": (0.0, 0.0, 0.0, 1.0),
    "Down or Right": (0.0, 0.5, 0.5, 0.0),
}
"""Chance of each move, wherever the player is; None looks at the map."""
_MOVE_OF_WORD = {word.lower(): move for move, word in enumerate(MOVES)}
_ENV_KEYS = ("size", "p", "seed", "split", "is_slippery", "desc", "max_steps", "random_start")
_NAMING_KEYS = ("task_id", "uid", "index", "idx", "data_source")
"""The names that data sets give to a row; they say nothing about the environment."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Lake:
    """The facts that all episodes on one map share."""

    rows: tuple[str, ...]
    text: str
    """The rows joined by newlines, the start shown as ice."""
    cells: str
    """The rows joined by nothing: one character a state."""
    num_columns: int
    start: int
    """State (row * num_columns + column) that an episode begins in."""


class FrozenLakeEnv(BaseEnv):
    """Walk over the ice from the top-left corner to the goal; 1 for arriving, 0 for everything else.

    The map is number `seed` of its `split`, or `desc` (rows of S, F, H and G), which sets size, `p` and split
    aside. `random_start` draws the start anywhere on the map instead of in the corner. Actions are the
    words in MOVES, in any case; anything else spends the turn and moves nothing. On slippery ice a move goes
    astray two times out of three; where to, depends on the seed of `reset` and the moves alone.
    """

    def __init__(
        self,
        desc: Sequence[str] | None = None,
        *,
        size: int = 4,
        p: float = 0.8,
        seed: int = 0,
        split: str = "train",
        is_slippery: bool = False,
        max_steps: int = 8,
        random_start: bool = False,
    ) -> None:
        if desc is None:
            require_drawing(split, seed, size, p, max_steps)
            rows = drawn_rows(split, seed, size, p, max_steps, bool(random_start))
        else:
            rows = _given_rows(desc)
            require_steps(max_steps, at_least=1)
        self._lake = _lake(rows)
        self._outcomes = outcomes_of(len(rows), self._lake.num_columns, bool(is_slippery))
        self._is_slippery = bool(is_slippery)
        self._max_steps = max_steps
        self._seed = seed
        self._rng: np.random.Generator | None = None
        self._state = self._lake.start
        self._num_steps = 0
        self._over = True

    @property
    def desc(self) -> tuple[str, ...]:
        """The rows of the map, as Gymnasium writes them."""
        return self._lake.rows

    @property
    def position(self) -> tuple[int, int]:
        """(row, column) of the player."""
        return divmod(self._state, self._lake.num_columns)

    @property
    def is_slippery(self) -> bool:
        return self._is_slippery

    @property
    def max_steps(self) -> int:
        return self._max_steps

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Back to the start. Without a seed, slippery ice goes on with the draws of the episode before."""
        self._state = self._lake.start
        self._num_steps = 0
        self._over = False
        if self._is_slippery:
            if seed is not None or self._rng is None:
                self._rng = np.random.default_rng(self._seed if seed is None else seed)
            self._rng.random()  # Gymnasium draws the start cell here: so one seed slips the same in both
        return self._observation(), {}

    @property
    def grid(self) -> str:
        """The lake and the player as text."""
        lake, state = self._lake, self._state
        cell = lake.cells[state]
        symbol = DROWNED if cell == "H" else ARRIVED if cell == "G" else PLAYER
        place = state + state // lake.num_columns  # each row above ends with a newline
        return f"{lake.text[:place]}{symbol}{lake.text[place + 1 :]}"

    def step(self, action: Any) -> Moved:
        if self._over:
            raise AgentError("FrozenLakeEnv.step: there is no episode to act in; call reset first.")
        word = action.action if isinstance(action, Action) else action
        move = _MOVE_OF_WORD.get(word.lower()) if isinstance(word, str) else None
        before = self._state
        if move is not None:
            self._state = self._next_state(move)
        self._num_steps += 1
        cell = self._lake.cells[self._state]
        terminated = cell in "GH"
        truncated = not terminated and self._num_steps >= self._max_steps
        self._over = terminated or truncated
        info = {"effective": self._state != before, "valid": move is not None}
        return moved(
            self._observation(), float(cell == "G"), info, terminated=terminated, truncated=truncated
        )

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "FrozenLakeEnv":
        """The environment of a task made by `lake_tasks`, or of a dict of constructor arguments."""
        return FrozenLakeEnv(**env_arguments(info))

    def _next_state(self, move: int) -> int:
        outcomes = self._outcomes[self._state][move]
        if len(outcomes) == 1 or self._rng is None:
            return outcomes[0][1]
        draw, cumulative = self._rng.random(), 0.0
        for probability, state in outcomes:
            cumulative += probability
            if cumulative > draw:
                return state
        return outcomes[0][1]  # rounding left the sum below the draw: Gymnasium takes the first, so do we

    def _observation(self) -> Any:
        """The picture of the lake and the player, as an agent reads it."""
        return self.grid


def env_arguments(info: dict[str, Any]) -> dict[str, Any]:
    """The constructor arguments in a task. Raises ConfigError for a key that is none."""
    for key in info:
        if key not in _ENV_KEYS and key not in _NAMING_KEYS:
            close = difflib.get_close_matches(key, _ENV_KEYS, n=1)
            mend = f"did you mean `{close[0]}`?" if close else f"it takes {', '.join(_ENV_KEYS)}."
            raise ConfigError(f"FrozenLakeEnv does not know `{key}`; {mend}")
    return {key: info[key] for key in _ENV_KEYS if key in info}


def lake_tasks(
    split: str,
    count: int,
    *,
    start: int = 0,
    size: int | Sequence[int] = 4,
    p: float = 0.8,
    is_slippery: bool = False,
    max_steps: int = 8,
    random_start: bool = False,
) -> list[dict[str, Any]]:
    """Tasks for maps of a split, from number `start` on; each goes into FrozenLakeEnv.from_dict.

    Several sizes take turns, by the number of the map. Of the held-out splits a map that is there already, up
    to rotation and reflection, is left out and the next number taken: so no two tasks are the same lake, and
    there are fewer than `count` where no more lakes are found. Training maps come as they are drawn.
    """
    if count < 0 or start < 0:
        raise ConfigError(f"`count` is {count} and `start` is {start}; maps are counted from 0 upwards.")
    sizes: list[Any] = list(size) if isinstance(size, Sequence) and not isinstance(size, str) else [size]
    if not sizes:
        raise ConfigError("`size` is an empty list; give at least one size of lakes.")
    for place, each in enumerate(sizes[:count]):  # refuses impossible arguments before work starts
        lake_map(split, start + place, size=each, p=p, max_steps=max_steps, random_start=random_start)
    numbers = range(start, start + count)
    if split != "train":
        draw_rows = partial(drawn_rows, p=p, max_steps=max_steps, random_start=bool(random_start))
        numbers = _distinct_numbers(
            lambda number: draw_rows(split, number, sizes[number % len(sizes)]), start, count
        )
    return [
        {
            "task_id": f"frozenlake-{split}-{number}",
            "split": split,
            "seed": number,
            "size": sizes[number % len(sizes)],
            "p": p,
            "is_slippery": is_slippery,
            "max_steps": max_steps,
            "random_start": random_start,
        }
        for number in numbers
    ]


def _distinct_numbers(rows_of: Callable[[int], Sequence[str]], start: int, count: int) -> list[int]:
    """The first `count` numbers from `start` on whose lakes differ by more than rotation and reflection."""
    first_number: dict[str, int] = {}
    number, num_repeats = start, 0
    while len(first_number) < count and num_repeats < _MAX_REPEATS:
        is_new = first_number.setdefault(canonical_map(rows_of(number)), number) == number
        num_repeats = 0 if is_new else num_repeats + 1
        number += 1
    return list(first_number.values())


def expert_move(
    desc: Sequence[str], position: tuple[int, int], rng: np.random.Generator, *, is_slippery: bool = False
) -> str:
    """A best move at (row, column), any of them where several are equally good.

    On firm ice the first move of a shortest path; on slippery ice the move with the highest discounted chance
    to arrive.
    """
    row, column = position
    best = best_moves(tuple(desc), is_slippery)[row * len(desc[0]) + column]
    return best[0] if len(best) == 1 else best[rng.integers(len(best))]


def demonstration(
    task: dict[str, Any],
    *,
    noise: float,
    rng: np.random.Generator,
    strolls: bool = False,
    hasty: bool = False,
    sight: int | None = None,
    turns: int | None = None,
    env_class: type[FrozenLakeEnv] = FrozenLakeEnv,
    answer: Callable[[FrozenLakeEnv, str], str] = lambda env, move: move,
) -> list[tuple[Any, str]]:
    """One episode of the expert in `env_class` as (observation, answer) pairs; `answer` writes a move down.

    With probability `noise` a move is drawn from all four instead, or, if it `strolls`, from those to a
    neighbouring cell without a hole, or, if it is `hasty`, from those that were best if slippery ice were
    firm; shown as if it were meant: who imitates the result has something left to learn from rewards. A
    short-sighted expert knows the way from at most `sight` moves away and errs further off. `turns`: at most
    so many pairs, the first ones.
    """
    if not 0.0 <= noise <= 1.0:
        raise ConfigError(f"`noise` is {noise}; it is a probability, so choose a number from 0 to 1.")
    for name, value in (("strolls", strolls), ("hasty", hasty)):
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"`{name}` is {value!r}; choose true or false.")
    if sight is not None and (not isinstance(sight, int) or isinstance(sight, bool) or sight < 0):
        raise ConfigError(f"`sight` is {sight!r}; it is a number of moves, so choose an integer from 0 up.")
    if turns is not None and (not isinstance(turns, int) or isinstance(turns, bool) or turns < 1):
        raise ConfigError(f"`turns` is {turns!r}; it is a number of moves, so choose an integer from 1 up.")
    env = env_class.from_dict(task)
    if hasty and (strolls or not env.is_slippery):
        raise ConfigError(
            "`hasty` is true; an expert errs so on slippery ice, and without `strolls`: set `is_slippery`, "
            "and `strolls` to false."
        )
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    to_go = distances("".join(env.desc), outcomes_of(len(env.desc), len(env.desc[0]), False))
    pairs: list[tuple[Any, str]] = []
    done = False
    while not done and len(pairs) != turns:
        row, column = env.position
        sees = sight is None or to_go[row * len(env.desc[0]) + column] <= sight
        if not sees or rng.random() < noise:
            mistakes = (
                _moves_over_ice(env.desc, env.position)
                if strolls
                else best_moves(env.desc, False)[row * len(env.desc[0]) + column]
                if hasty
                else MOVES
            )
            move = mistakes[rng.integers(len(mistakes))]
        else:
            move = expert_move(env.desc, env.position, rng, is_slippery=env.is_slippery)
        pairs.append((observation, answer(env, move)))
        observation, _, done, _ = env.step(move)
    return pairs


def _moves_over_ice(rows: Sequence[str], position: tuple[int, int]) -> list[str]:
    """Moves towards a neighbouring cell that is no hole; all of them where there is none."""
    row, column = position
    neighbours = ((row, column - 1), (row + 1, column), (row, column + 1), (row - 1, column))
    safe = [
        move
        for move, (down, right) in zip(MOVES, neighbours, strict=True)
        if 0 <= down < len(rows) and 0 <= right < len(rows[0]) and rows[down][right] != "H"
    ]
    return safe or list(MOVES)


def _given_rows(desc: Sequence[str]) -> tuple[str, ...]:
    if (
        not isinstance(desc, Sequence)
        or isinstance(desc, str)
        or not all(isinstance(row, str) for row in desc)
    ):
        raise ConfigError(
            f'`desc` is {desc!r}; give the rows of a map as a list of text, such as ["SF", "HG"].'
        )
    cells = "".join(desc)
    if (
        set(cells) - set("SFHG")
        or cells.count("S") != 1
        or "G" not in cells
        or len({len(row) for row in desc}) != 1
    ):
        raise ConfigError(
            f"`desc` is {list(desc)}; its rows must be equally long and made of F and H, with one S "
            "and at least one G."
        )
    return tuple(desc)


@lru_cache(maxsize=16_384)
def _lake(rows: tuple[str, ...]) -> Lake:
    cells = "".join(rows)
    return Lake(
        rows=rows,
        text="\n".join(rows).replace("S", "F"),
        cells=cells,
        num_columns=len(rows[0]),
        start=cells.index("S"),
    )


def identity(task: Mapping[str, Any]) -> str:
    """The lake of a task up to rotation and reflection, start and goal included, and how it is played."""
    env = FrozenLakeEnv.from_dict(dict(task))
    return f"{canonical_map(env.desc)} {env.max_steps} moves{' slippery' if env.is_slippery else ''}"


def kind(task: Mapping[str, Any]) -> str:
    """Size of the lake, such as `4x4`."""
    rows = FrozenLakeEnv.from_dict(dict(task)).desc
    return f"{len(rows)}x{len(rows[0])}"


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Exact returns of the best policy, of random moves, and of each policy that looks at nothing."""
    envs = [FrozenLakeEnv.from_dict(dict(task)) for task in tasks]
    return {
        name: [expected_return(env.desc, env.is_slippery, env.max_steps, policy) for env in envs]
        for name, policy in _POLICIES.items()
    }


WORLD = World(
    env_class=FrozenLakeEnv,
    tasks=lake_tasks,
    demonstrate=demonstration,
    expert_args=("strolls", "hasty", "sight", "turns"),
    identity=identity,
    identity_draws=True,
    kind=kind,
    baselines=baselines,
)
