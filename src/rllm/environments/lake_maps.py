"""Maps of lakes: drawn by number, each for the one split that it belongs to.

    (split, index) ──► lake_map ──► ["SFFF", "FHFH", "FFFH", "HFFG"] ──► split_of ──► the same split

A map belongs to one split by a hash of where its holes are, up to rotation and reflection. So training,
validation and test cannot share a lake, however many are drawn; to have different seeds would not be enough,
because small maps repeat.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from numbers import Integral, Real

import numpy as np

from rllm.environments.lake_values import distances, outcomes_of
from rllm.environments.symmetry import smallest_image
from rllm.errors import ConfigError

SPLITS = ("train", "validation", "test")
_SIZES = range(3, 9)
_SALT = b"lake-404"
"""Chosen so that the maps without holes, of all sizes, fall in the training split, and that the 27 lakes of
3 x 3, with the start in a corner, are about evenly divided."""
_MAX_DRAWS = 10_000
_DRAWS_AT_ONCE = 16


def lake_map(
    split: str, index: int, *, size: int = 4, p: float = 0.8, max_steps: int = 8, random_start: bool = False
) -> list[str]:
    """Map number `index` of `split`: a cell is ice with chance `p`, the goal at most `max_steps` moves away.

    Counter-based: a map is a function of these arguments alone. Small maps may come up more than once within
    a split.
    """
    require_drawing(split, index, size, p, max_steps)
    return list(drawn_rows(split, index, size, p, max_steps, random_start))


def split_of(rows: Sequence[str]) -> str:
    """The one split that a map is drawn for: half of all maps train, a quarter validates, a quarter tests.

    It depends on where the holes are, up to rotation and reflection, and not on start and goal: a mirrored
    lake is no new one, and neither is one with another start.
    """
    holes = canonical_map([row.replace("S", "F").replace("G", "F") for row in rows])
    quarter = hashlib.blake2b(holes.encode(), digest_size=8, salt=_SALT).digest()[0] % 4
    return ("test", "validation", "train", "train")[quarter]


def canonical_map(rows: Sequence[str]) -> str:
    """The same text for all eight rotations and reflections of a map."""
    return "\n".join(smallest_image(rows))


@lru_cache(maxsize=16_384)
def drawn_rows(
    split: str, index: int, size: int, p: float, max_steps: int, random_start: bool
) -> tuple[str, ...]:
    # A key names the map, so any map is drawn without the ones before it.
    rng = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), index]))
    firm = outcomes_of(size, size, False)
    grids = np.full((_DRAWS_AT_ONCE, size, size + 1), ord("\n"), dtype=np.uint8)
    start, goal = 0, size * size - 1
    for _ in range(_MAX_DRAWS // _DRAWS_AT_ONCE):
        grids[:, :, :size] = np.where(rng.random((_DRAWS_AT_ONCE, size, size)) < p, ord("F"), ord("H"))
        for grid in grids:
            if random_start:
                start = int(rng.integers(goal))
            grid[divmod(start, size)], grid[divmod(goal, size)] = ord("S"), ord("G")
            rows = tuple(grid.tobytes()[:-1].decode().split("\n"))
            if split_of(rows) == split and distances("".join(rows), firm)[start] <= max_steps:
                return rows
    raise ConfigError(
        f"{_MAX_DRAWS} draws with `size` {size} and `p` {p} gave no map of the {split} split whose goal is "
        f"within `max_steps` {max_steps} moves; raise `max_steps`, or bring `p` nearer to 0.8."
    )


def require_drawing(split: str, index: int, size: int, p: float, max_steps: int) -> None:
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; FrozenLake has {', '.join(SPLITS)}.")
    if not isinstance(index, Integral) or not 0 <= index < 2**63:
        raise ConfigError(
            f"`seed` is {index!r}; it is the number of a map, so choose an integer from 0 to 2**63 - 1."
        )
    if not isinstance(size, Integral) or size not in _SIZES:
        raise ConfigError(
            f"`size` is {size!r}; maps are drawn {_SIZES[0]} to {_SIZES[-1]} cells wide, so choose one "
            "of these or give `desc`."
        )
    if not isinstance(p, Real) or not 0.0 < p <= 1.0:
        raise ConfigError(
            f"`p` is {p!r}; it is the chance that a cell is ice, so choose a number above 0 and up to 1."
        )
    require_steps(max_steps, at_least=2 * (int(size) - 1))


def require_steps(max_steps: int, *, at_least: int) -> None:
    if not isinstance(max_steps, Integral) or max_steps < at_least:
        raise ConfigError(
            f"`max_steps` is {max_steps!r}; the goal is {at_least} or more moves away, so allow as many."
        )
