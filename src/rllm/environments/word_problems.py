"""Word problems: a short story with numbers in it, one question, one whole number.

    (split, index) ──► a story, names and numbers drawn into it ──► question ──► steps ──► answer

Each story computes its own answer from the numbers drawn, and never asks for a part of a thing or less than
nothing. A problem belongs to one split by a hash of its story and its numbers: with other names and things
it is the same problem.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllm.environments.answers import answer_baselines
from rllm.environments.single_turn import SingleTurnEnvironment
from rllm.environments.sums import SPLITS, answer_text, split_of_text
from rllm.environments.world import World
from rllm.errors import ConfigError

_NAMES = (
    "Ada",
    "Bruno",
    "Chiara",
    "Deniz",
    "Elif",
    "Farid",
    "Greta",
    "Hana",
    "Igor",
    "Jamila",
    "Kofi",
    "Lena",
)
_THINGS = ("apples", "pencils", "stickers", "marbles", "books", "shells", "stamps", "buttons")
_MAX_DRAWS = 1_000


@dataclass(kw_only=True, slots=True)
class Draw:
    """The random source of a story's details."""

    rng: np.random.Generator
    max_number: int

    def number(self, low: int = 2, high: int = 0) -> int:
        """From `low` to `high`, or to the largest number that was asked for."""
        return int(self.rng.integers(low, max(low, high or self.max_number) + 1))

    def few(self) -> int:
        return self.number(2, min(12, max(3, self.max_number // 4)))

    def two_names(self) -> tuple[str, str]:
        first, second = self.rng.choice(len(_NAMES), size=2, replace=False)
        return _NAMES[first], _NAMES[second]

    def thing(self) -> str:
        return _THINGS[self.rng.integers(len(_THINGS))]


@dataclass(kw_only=True, slots=True, frozen=True)
class Story:
    """A problem that is told, and what it comes to."""

    text: str
    steps: tuple[str, ...]
    """The working, one line a step."""
    answer: int


def _gather(draw: Draw) -> Story:
    (one, two), thing = draw.two_names(), draw.thing()
    a, b = draw.number(), draw.number()
    return Story(
        text=f"{one} has {a} {thing} and {two} has {b}. How many {thing} do they have together?",
        steps=(f"{a} + {b} = {a + b}",),
        answer=a + b,
    )


def _give_away(draw: Draw) -> Story:
    (one, two), thing = draw.two_names(), draw.thing()
    a, b = sorted((draw.number(), draw.number()), reverse=True)
    return Story(
        text=f"{one} had {a} {thing} and gave {b} of them to {two}. How many {thing} does {one} have left?",
        steps=(f"{a} - {b} = {a - b}",),
        answer=a - b,
    )


def _boxes(draw: Draw) -> Story:
    (one, _), thing = draw.two_names(), draw.thing()
    boxes, each, loose = draw.few(), draw.few(), draw.number()
    return Story(
        text=(
            f"{one} has {boxes} boxes with {each} {thing} in each of them, and {loose} more on the table. "
            f"How many {thing} is that in all?"
        ),
        steps=(f"{boxes} * {each} = {boxes * each}", f"{boxes * each} + {loose} = {boxes * each + loose}"),
        answer=boxes * each + loose,
    )


def _shopping(draw: Draw) -> Story:
    one, _ = draw.two_names()
    pens, pen, books, book = draw.few(), draw.few(), draw.few(), draw.few()
    cost = pens * pen + books * book
    payment = cost + draw.number(1)
    return Story(
        text=(
            f"A pen costs {pen} coins and a book costs {book} coins. {one} buys {pens} pens and {books} "
            "books "
            f"and pays with {payment} coins. How many coins does {one} get back?"
        ),
        steps=(
            f"{pens} * {pen} = {pens * pen}",
            f"{books} * {book} = {books * book}",
            f"{pens * pen} + {books * book} = {cost}",
            f"{payment} - {cost} = {payment - cost}",
        ),
        answer=payment - cost,
    )


def _sharing(draw: Draw) -> Story:
    (one, _), thing = draw.two_names(), draw.thing()
    friends, each = draw.few(), draw.few()
    own_part = draw.number(1)
    total = friends * each + own_part
    return Story(
        text=(
            f"{one} has {total} {thing}, keeps {own_part} and shares the rest equally among {friends} "
            f"friends. How many {thing} does each friend get?"
        ),
        steps=(f"{total} - {own_part} = {friends * each}", f"{friends * each} / {friends} = {each}"),
        answer=each,
    )


def _ages(draw: Draw) -> Story:
    one, two = draw.two_names()
    age, times, years = draw.number(2, 12), draw.number(2, 4), draw.few()
    older = age * times
    return Story(
        text=(
            f"{one} is {age} years old. {two} is {times} times as old as {one}. How old will {two} be in "
            f"{years} years?"
        ),
        steps=(f"{times} * {age} = {older}", f"{older} + {years} = {older + years}"),
        answer=older + years,
    )


def _trip(draw: Draw) -> Story:
    one, _ = draw.two_names()
    hours, speed, rest = draw.few(), draw.number(), draw.number()
    distance = hours * speed
    return Story(
        text=(
            f"{one} cycles for {hours} hours and covers {speed} kilometres in each hour. The way is "
            f"{distance + rest} kilometres long. How many kilometres are left?"
        ),
        steps=(f"{hours} * {speed} = {distance}", f"{distance + rest} - {distance} = {rest}"),
        answer=rest,
    )


def _difference(draw: Draw) -> Story:
    (one, two), thing = draw.two_names(), draw.thing()
    a, more, few = draw.number(), draw.number(1), draw.few()
    b = a + more
    left = abs(b - a - few)
    steps = (f"{a} + {more} = {b}", f"{a} + {few} = {a + few}")
    high, low = max(b, a + few), min(b, a + few)
    return Story(
        text=(
            f"{one} has {a} {thing}. {two} has {more} more than {one}. Then {one} finds {few} {thing}. "
            f"By how many do their numbers differ now?"
        ),
        steps=(*steps, f"{high} - {low} = {left}"),
        answer=left,
    )


STORIES: tuple[Callable[[Draw], Story], ...] = (
    *(_gather, _give_away, _boxes, _shopping),
    *(_sharing, _ages, _trip, _difference),
)


def word_problem(split: str, index: int, *, max_number: int = 50, max_steps: int = 4) -> tuple[Story, str]:
    """Problem number `index` of a split, and the name of its story: a function of these arguments alone."""
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; there are {', '.join(SPLITS)}.")
    if index < 0:
        raise ConfigError(f"The index is {index}; questions are counted from 0.")
    if not 4 <= max_number <= 10**6:
        raise ConfigError(f"`max_number` is {max_number}; choose 4 to {10**6}.")
    if max_steps < 1:
        raise ConfigError(f"`max_steps` is {max_steps}; a problem takes at least one step.")
    rng = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), index]))
    draw = Draw(rng=rng, max_number=max_number)
    for _ in range(_MAX_DRAWS):
        tell = STORIES[rng.integers(len(STORIES))]
        story = tell(draw)
        kind = tell.__name__.strip("_")
        if len(story.steps) <= max_steps and split_of_text(_identity(kind, story)) == split:
            return story, kind
    raise ConfigError(
        f"{_MAX_DRAWS} draws with `max_number` {max_number} gave no problem of the {split} split; raise it."
    )


def _identity(kind: str, story: Story) -> str:
    return f"{kind}: {', '.join(story.steps)}"


def word_problem_tasks(
    split: str, count: int, *, start: int = 0, max_number: int = 50, max_steps: int = 4
) -> list[dict[str, Any]]:
    """Problems `start` to `start + count - 1` of a split as tasks of a single turn."""
    tasks: list[dict[str, Any]] = []
    for index in range(start, start + count):
        story, kind = word_problem(split, index, max_number=max_number, max_steps=max_steps)
        tasks.append(
            {
                "task_id": f"word-problems-{split}-{index}",
                "question": f"{story.text}\n\nWork it out line by line and end with <answer>NUMBER</answer>.",
                "grader": "exact",
                "grader_args": {},
                "grading": {"answer": str(story.answer)},
                "oracle": "\n".join((*story.steps, f"<answer>{story.answer}</answer>")),
                "category": kind,
                "identity": _identity(kind, story),
            }
        )
    return tasks


WORLD = World(
    env_class=SingleTurnEnvironment,
    tasks=word_problem_tasks,
    demonstrate=answer_text,
    draws=True,
    identity=lambda task: task["identity"],
    kind=lambda task: task["category"],
    baselines=answer_baselines(lambda task: task["grading"]["answer"]),
)
