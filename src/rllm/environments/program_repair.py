"""Programs that are mended: the recipe hides its last part, and the test that fails shows it.

    "f: times 3, mod 7, ?" ──► a program that guesses ──► code grader: f(0) is 5, expected -7
                                                                  └──► the same program with x -= 7

The hidden part adds or takes a number, and what stands before it leaves 0 alone, so f(0) is that number. One
of sixteen guesses is right; who reads the test that failed is right at the second try.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rllm.environments.code import CodeEnv
from rllm.environments.small_programs import (
    MAX_NUMBER,
    MIN_NUMBER,
    TRIED_ON,
    Recipe,
    distinct_recipes,
    identity,
    recipe_of,
    require_places,
)
from rllm.environments.world import OPTIMUM, RANDOM, Turns, World
from rllm.errors import ConfigError

SHOWN_WORDS = ("times", "mod")
"""They leave 0 alone."""
HIDDEN_WORDS = ("add", "take")
HIDDEN_PARTS = tuple(itertools.product(HIDDEN_WORDS, range(MIN_NUMBER, MAX_NUMBER + 1)))
"""All that may be hidden, each as likely as any other."""
TESTS = (0, *(x for x in TRIED_ON if x != 0))
"""The first test that fails is shown, so the one that tells the hidden part comes first."""
MAX_TURNS = 2
MISTAKES = ("same_again", "one_test")
"""The mistakes of an inattentive expert at the second try: sends the program that failed once more, or one
that passes the test that was shown and has nothing left of the recipe."""


def program_repair_tasks(
    split: str, count: int, *, start: int = 0, num_parts: int = 3, sandbox: str = "bubblewrap"
) -> list[dict[str, Any]]:
    """Recipes `start` to `start + count - 1` of a split, of `num_parts` parts, the last of them hidden.

    `sandbox` runs the programs, one of the backends of `rllm.sandbox`. Raises ConfigError for what cannot be
    drawn.
    """
    require_places(split, start, count)
    if not 2 <= num_parts <= 8:
        raise ConfigError(f"`num_parts` is {num_parts}; one is hidden, so choose from 2 to 8.")
    recipes = _draw_recipes(split, num_parts)
    return [
        {
            "task_id": f"program-repair-{split}-{index}",
            "question": f"{Recipe(parts=recipe.parts[:-1]).text}, ?",
            "parts": [list(part) for part in recipe.parts],
            "max_turns": MAX_TURNS,
            "grader": "code",
            "grader_args": {"sandbox": sandbox},
            "grading": {"function": "f", "tests": recipe.tests(TESTS)},
        }
        for index in range(start, start + count)
        for recipe in (recipes[index % len(recipes)],)
    ]


def demonstration(
    task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, mistakes: Sequence[str] = MISTAKES
) -> Turns:
    """A program with a guess, and where that is wrong the right program; with probability `noise` one of
    `mistakes` instead, each as likely as it is often in the list. Raises ConfigError for a mistake that there
    is not."""
    if unknown := [each for each in mistakes if each not in MISTAKES]:
        raise ConfigError(f"`mistakes` has {unknown[0]!r}; experts know {', '.join(MISTAKES)}.")
    if not 0.0 <= noise <= 1.0:
        raise ConfigError(f"`noise` is {noise}; it is a probability, so choose a number from 0 to 1.")
    recipe = recipe_of(task)
    hidden_part = HIDDEN_PARTS[int(rng.integers(len(HIDDEN_PARTS)))]
    guess = Recipe(parts=(*recipe.parts[:-1], hidden_part))
    first = (task["question"], guess.program())
    if guess == recipe:
        return [first]
    second = recipe
    if mistakes and rng.random() < noise:
        mistake = mistakes[int(rng.integers(len(mistakes)))]
        second = guess if mistake == "same_again" else Recipe(parts=recipe.parts[-1:])
    return [first, ({"test_results": [failed_test(guess, recipe)]}, second.program())]


def failed_test(guess: Recipe, recipe: Recipe) -> dict[str, Any]:
    """CodeEnv's report of a guess that fails at 0."""
    return {
        "input": "f(0)",
        "expected": str(recipe.value(0)),
        "actual": str(guess.value(0)),
        "error": None,
        "passed": False,
    }


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Policies that copy what is shown; only the optimum reads the test that failed."""
    hidden_parts = [recipe_of(task).parts[-1] for task in tasks]
    first, second = sorted(HIDDEN_PARTS, key=hidden_parts.count, reverse=True)[:2]
    chance = 1 / len(HIDDEN_PARTS)
    return {
        RANDOM: [1 - (1 - chance) ** MAX_TURNS] * len(hidden_parts),
        OPTIMUM: [1.0] * len(hidden_parts),
        "one guess for all": [float(part == first) for part in hidden_parts],
        "two guesses for all": [float(part in (first, second)) for part in hidden_parts],
    }


@lru_cache(maxsize=16)
def _draw_recipes(split: str, num_parts: int) -> list[Recipe]:
    def draw(rng: np.random.Generator) -> Recipe:
        words = (SHOWN_WORDS[each] for each in rng.integers(len(SHOWN_WORDS), size=num_parts - 1))
        numbers = (int(each) for each in rng.integers(MIN_NUMBER, MAX_NUMBER + 1, size=num_parts - 1))
        hidden_part = HIDDEN_PARTS[int(rng.integers(len(HIDDEN_PARTS)))]
        return Recipe(parts=(*zip(words, numbers, strict=True), hidden_part))

    return distinct_recipes(split, draw)


def _kind(task: Mapping[str, Any]) -> str:
    return f"hidden: {task['parts'][-1][0]}"


WORLD = World(
    env_class=CodeEnv,
    tasks=program_repair_tasks,
    draws=True,
    demonstrate=demonstration,
    expert_args=("mistakes",),
    identity=identity,
    kind=_kind,
    baselines=baselines,
)
