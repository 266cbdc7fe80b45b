"""Small programs: a recipe in words goes in, a function comes out, and it is run.

    (split, index) ──► "f: add 3, times 2" ──► def f(x):     ──► code grader: in its sandbox, on some x
                                                x += 3
                                                x *= 2
                                                return x

A recipe belongs to one split by a hash of the function that it describes ("add 3, add 2" and "add 2, add 3"
are one). A split goes through some thousand functions before one comes again.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rllm.environments.single_turn import SingleTurnEnvironment
from rllm.environments.world import OPTIMUM, RANDOM, Turns, World
from rllm.errors import ConfigError

SPLITS = ("train", "validation", "test")
SIGN_OF = {"add": "+", "take": "-", "times": "*", "mod": "%"}
"""Word of the recipe -> sign of the program."""
MIN_NUMBER, MAX_NUMBER = 2, 9
TRIED_ON = range(-4, 14)
"""The x that a program is run on. They tell any two recipes apart that differ anywhere: without a `mod` a
recipe is a line with a slope, two of which differ on one of two points; with one it has a period of at most
9, and sequences with periods p and q that agree on p + q numbers in a row are one (Fine and Wilf 1965)."""
MISTAKES = ("plus_only", "wrong_sign", "wrong_number", "wrong_order")
"""The mistakes of an inattentive expert; `plus_only` adds every number, whatever the word."""
_MAX_DRAWS = 2_000
"""Draws in a row that give no new function before a split counts as used up."""
_NUM_FUNCTIONS = {"train": 3072, "validation": 1024, "test": 1024}
"""The number of functions that a split goes through, if there are as many, before it begins again."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Recipe:
    """The operations that are asked for, one after the other, from x."""

    parts: tuple[tuple[str, int], ...]
    """(word, number) each."""

    @property
    def text(self) -> str:
        """As agents see it."""
        return f"f: {', '.join(f'{word} {number}' for word, number in self.parts)}"

    def program(self) -> str:
        """One that does it, as short as it gets."""
        lines = [f" x {SIGN_OF[word]}= {number}" for word, number in self.parts]
        return "\n".join(["def f(x):", *lines, " return x"])

    def value(self, x: int) -> int:
        for word, number in self.parts:
            x = _apply(word, x, number)
        return x

    def tests(self, tried_on: Iterable[int]) -> list[dict[str, Any]]:
        """The tests that the code grader runs."""
        return [{"args": [x], "expected": self.value(x)} for x in tried_on]

    @property
    def function(self) -> tuple[int, ...]:
        """Its values on TRIED_ON: the same for two recipes that describe one function, and for no others."""
        return tuple(map(self.value, TRIED_ON))


def small_program_tasks(
    split: str,
    count: int,
    *,
    start: int = 0,
    num_parts: int | Sequence[int] = 2,
    sandbox: str = "bubblewrap",
) -> list[dict[str, Any]]:
    """Recipes `start` to `start + count - 1` of a split, of `num_parts` parts each.

    `sandbox` runs the programs, one of the backends of `rllm.sandbox`. Raises ConfigError for what cannot be
    drawn.
    """
    require_places(split, start, count)
    lengths = [num_parts] if isinstance(num_parts, int) else list(num_parts)
    if not lengths or not all(1 <= length <= 8 for length in lengths):
        raise ConfigError(f"`num_parts` is {num_parts!r}; choose from 1 to 8, or a list of such numbers.")
    recipes = _recipes(split, start, count, tuple(lengths))
    return [
        {
            "task_id": f"small-programs-{split}-{start + offset}",
            "question": recipe.text,
            "parts": [list(part) for part in recipe.parts],
            "grader": "code",
            "grader_args": {"sandbox": sandbox},
            "grading": {"function": "f", "tests": recipe.tests(TRIED_ON)},
        }
        for offset, recipe in enumerate(recipes)
    ]


def require_places(split: str, start: int, count: int) -> None:
    """Raises ConfigError unless `count` recipes from number `start` on of `split` can be asked for."""
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; recipes are drawn for {', '.join(SPLITS)}.")
    if count < 0 or start < 0:
        raise ConfigError(f"`count` is {count} and `start` is {start}; recipes are counted from 0 upwards.")


def demonstration(
    task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, mistakes: Sequence[str] = MISTAKES
) -> Turns:
    """The program, line by line; with probability `noise` it makes one of `mistakes`, each as likely as it is
    often in the list. Raises ConfigError for a mistake that there is not."""
    if unknown := [each for each in mistakes if each not in MISTAKES]:
        raise ConfigError(f"`mistakes` has {unknown[0]!r}; experts know {', '.join(MISTAKES)}.")
    if not 0.0 <= noise <= 1.0:
        raise ConfigError(f"`noise` is {noise}; it is a probability, so choose a number from 0 to 1.")
    recipe = recipe_of(task)
    if mistakes and rng.random() < noise:
        recipe = _spoil(recipe, mistakes[int(rng.integers(len(mistakes)))], rng)
    return [(task["question"], recipe.program())]


def split_of(recipe: Recipe) -> str:
    """The one split that a function is drawn for: half of all train, a quarter validates, a quarter tests."""
    digest = hashlib.blake2b(repr(recipe.function).encode(), digest_size=8, salt=b"small-programs").digest()
    return ("test", "validation", "train", "train")[digest[0] % 4]


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Scores of programs that copy the numbers and do not read the words, and of the best constant
    program."""
    recipes = [recipe_of(task) for task in tasks]
    functions = [recipe.function for recipe in recipes]
    most = max(functions, key=Counter(functions).__getitem__, default=())
    return {
        RANDOM: [_luck(recipe) for recipe in recipes],
        OPTIMUM: [1.0] * len(recipes),
        "one program for all": [float(function == most) for function in functions],
        **{
            f"always {word}": [
                float(_with_words(recipe, [word] * len(recipe.parts)).function == recipe.function)
                for recipe in recipes
            ]
            for word in SIGN_OF
        },
    }


def recipe_of(task: Mapping[str, Any]) -> Recipe:
    return Recipe(parts=tuple((word, number) for word, number in task["parts"]))


def _luck(recipe: Recipe) -> float:
    """The probability that random signs before the right numbers make the right function."""
    values_S_X = np.array([TRIED_ON])  # [sequences of signs so far, x]
    for _, number in recipe.parts:
        values_S_X = np.concatenate([_apply(word, values_S_X, number) for word in SIGN_OF])
    return float((values_S_X == np.array(recipe.function)).all(axis=1).mean())


def _with_words(recipe: Recipe, words: Sequence[str]) -> Recipe:
    numbers = (number for _, number in recipe.parts)
    return Recipe(parts=tuple(zip(words, numbers, strict=True)))


def _recipes(split: str, start: int, count: int, lengths: tuple[int, ...]) -> list[Recipe]:
    """Recipes of different functions; from the first again once all were drawn."""
    recipes = _draw_recipes(split, lengths)
    if count and not recipes:
        raise ConfigError(
            f"{_MAX_DRAWS} draws gave no recipe of the {split} split; raise `num_parts`, which is {lengths}."
        )
    return [recipes[index % len(recipes)] for index in range(start, start + count)]


@lru_cache(maxsize=16)
def _draw_recipes(split: str, lengths: tuple[int, ...]) -> list[Recipe]:
    def draw(rng: np.random.Generator) -> Recipe:
        return Recipe(parts=tuple(_part(rng) for _ in range(lengths[int(rng.integers(len(lengths)))])))

    return distinct_recipes(split, draw)


def distinct_recipes(split: str, draw: Callable[[np.random.Generator], Recipe]) -> list[Recipe]:
    """Recipes that `draw` makes of random numbers of the split's own, each function once."""
    rng = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), 0]))
    recipes: list[Recipe] = []
    functions: set[tuple[int, ...]] = set()
    fruitless = 0
    while len(recipes) < _NUM_FUNCTIONS[split] and fruitless < _MAX_DRAWS:
        recipe = draw(rng)
        fruitless += 1
        if (function := recipe.function) not in functions:
            functions.add(function)
            if split_of(recipe) == split:
                recipes.append(recipe)
                fruitless = 0
    return recipes


def _part(rng: np.random.Generator) -> tuple[str, int]:
    words = list(SIGN_OF)
    return words[int(rng.integers(len(words)))], int(rng.integers(MIN_NUMBER, MAX_NUMBER + 1))


def identity(task: Mapping[str, Any]) -> str:
    """The function that is asked for, however a recipe describes it."""
    return repr(recipe_of(task).function)


def _kind(task: Mapping[str, Any]) -> str:
    return "with mod" if any(word == "mod" for word, _ in task["parts"]) else "without mod"


def _spoil(recipe: Recipe, mistake: str, rng: np.random.Generator) -> Recipe:
    parts = list(recipe.parts)
    place = int(rng.integers(len(parts)))
    word, number = parts[place]
    if mistake == "plus_only":
        return _with_words(recipe, ["add"] * len(parts))
    if mistake == "wrong_order":
        parts.reverse()
    elif mistake == "wrong_sign":
        others = [each for each in SIGN_OF if each != word]
        parts[place] = (others[int(rng.integers(len(others)))], number)
    else:
        others = [each for each in range(MIN_NUMBER, MAX_NUMBER + 1) if each != number]
        parts[place] = (word, others[int(rng.integers(len(others)))])
    return Recipe(parts=tuple(parts))


def _apply(word: str, x: Any, number: int) -> Any:
    """`x`: a number, or an array of them."""
    if word == "add":
        return x + number
    if word == "take":
        return x - number
    return x * number if word == "times" else x % number


WORLD = World(
    env_class=SingleTurnEnvironment,
    tasks=small_program_tasks,
    draws=True,
    demonstrate=demonstration,
    expert_args=("mistakes",),
    identity=identity,
    kind=_kind,
    baselines=baselines,
)
