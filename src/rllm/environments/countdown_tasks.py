"""Countdown problems drawn as tasks.

    (split, stretch of 512 tasks) ──► draws, balanced by the last sign ──► those of the split ──► tasks

Problems are balanced: the sign that is applied last goes through all signs in turn, and half of the answers
begin with a number that is shown before the one they end with. So no expression that is always the same is
right more often than one in so many signs.

A problem belongs to one split by a hash of its target and its numbers in order of size. So training,
validation and test share no problem, not even one with the numbers in another order, however many are drawn.
Of 512 tasks in a row, counted from a multiple of that, none is another again as long as there are so many.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any

from rllm.environments.countdown_problems import (
    KINDS,
    NUM_NUMBERS,
    OPERATORS,
    CountdownProblem,
    is_count,
    kind,
    random_expression,
    require_operators,
    split_of,
)
from rllm.errors import ConfigError

SPLITS = ("train", "validation", "test")
_MAX_DRAWS = 10_000
_STRETCH = 512
"""Tasks in a row that repeat none among them."""
_BEGINNINGS = (8, 64, _STRETCH)
"""The number of tasks of a stretch that are drawn at once, and kept: somebody may want a few, or one after
another."""
_MAX_REPEATS = 20
"""Draws in a row that give a problem again; after so many, problems with that sign begin anew."""


def countdown_tasks(
    split: str,
    count: int,
    *,
    start: int = 0,
    num_numbers: int = 3,
    max_number: int = 9,
    max_target: int = 99,
    operators: str = OPERATORS,
) -> list[dict[str, Any]]:
    """Problems `start` to `start + count - 1` of a split as tasks; each goes into CountdownEnv.from_dict.

    They can be solved, with `operators` alone. Problem number n is the same however many are drawn.
    """
    if count < 0 or start < 0:
        raise ConfigError(f"`count` is {count} and `start` is {start}; problems are counted from 0 upwards.")
    drawing = _Drawing(
        split=split,
        num_numbers=num_numbers,
        max_number=max_number,
        max_target=max_target,
        operators=operators,
    )
    problems: list[CountdownProblem] = []
    for stretch in range(start // _STRETCH, -(-(start + count) // _STRETCH)):
        first = stretch * _STRETCH
        end = min(_STRETCH, start + count - first)
        first_problems = _beginning(drawing, stretch, next(each for each in _BEGINNINGS if each >= end))
        problems.extend(first_problems[max(start - first, 0) : end])
    return [
        {
            "task_id": f"countdown-{split}-{index}",
            "numbers": list(problem.numbers),
            "target": problem.target,
            "operators": operators,
        }
        for index, problem in enumerate(problems, start=start)
    ]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Drawing:
    """The parameters that problems are drawn with."""

    split: str
    num_numbers: int
    max_number: int
    max_target: int
    operators: str

    def __post_init__(self) -> None:
        _check_drawing(self)

    def stretch(self, number: int) -> Iterator[CountdownProblem]:
        """The problems of one stretch of tasks, from its first on: a function of its number alone."""
        rng = Random(f"countdown {self.split} {number}")
        used_by_sign: dict[str, set[tuple[tuple[int, ...], int]]] = {sign: set() for sign in self.operators}
        while True:
            for sign in self.operators:
                for ascending in (True, False):
                    yield self._new_problem(rng, sign, used_by_sign, ascending)

    def _new_problem(
        self,
        rng: Random,
        sign: str,
        used_by_sign: dict[str, set[tuple[tuple[int, ...], int]]],
        ascending: bool,
    ) -> CountdownProblem:
        """A problem that is not among those in `used_by_sign`, where it becomes the last with its sign."""
        num_repeats = 0
        for _ in range(_MAX_DRAWS):
            problem = self._draw(rng, sign, ascending=ascending)
            if problem is None or split_of(problem) != self.split:
                continue
            key = (tuple(sorted(problem.numbers)), problem.target)
            if any(key in each for each in used_by_sign.values()):
                num_repeats += 1
                if num_repeats < _MAX_REPEATS:
                    continue
                used_by_sign[sign].clear()
            used_by_sign[sign].add(key)
            return problem
        raise ConfigError(
            f"{_MAX_DRAWS} draws with `num_numbers` {self.num_numbers}, `max_number` {self.max_number} and "
            f"`max_target` {self.max_target} gave no problem of the {self.split} split with {sign!r} as its "
            "last sign; raise `max_number` or `max_target`, or leave out that sign."
        )

    def _draw(self, rng: Random, sign: str, *, ascending: bool) -> CountdownProblem | None:
        """A problem with `sign` last in its answer, which begins with a number that is shown before its last
        number if `ascending`, else after it; None for what cannot be asked."""
        numbers = tuple(rng.randint(1, self.max_number) for _ in range(self.num_numbers))
        expression = random_expression(numbers, self.operators, rng, last_sign=sign)
        if (
            expression is None
            or not isinstance(expression.value, int)
            or not 0 <= expression.value <= self.max_target
        ):
            return None
        places = expression.places()
        if (places[0] < places[-1]) != ascending:
            numbers = numbers[::-1]
        problem = CountdownProblem(numbers=numbers, target=expression.value)
        # With two numbers a kind is what it is called: 4 from 2 and 2 is a sum, so no product.
        is_ambiguous = len(numbers) == 2 and KINDS[sign] != kind(
            {"numbers": numbers, "target": expression.value}
        )
        return None if is_ambiguous else problem


@lru_cache(maxsize=256)
def _beginning(drawing: _Drawing, stretch: int, count: int) -> tuple[CountdownProblem, ...]:
    return tuple(islice(drawing.stretch(stretch), count))


def _check_drawing(drawing: _Drawing) -> None:
    if drawing.split not in SPLITS:
        raise ConfigError(f"`split` is {drawing.split!r}; countdown has {', '.join(SPLITS)}.")
    if drawing.num_numbers not in NUM_NUMBERS:
        raise ConfigError(
            f"`num_numbers` is {drawing.num_numbers!r}; there are {NUM_NUMBERS[0]} to {NUM_NUMBERS[-1]} of "
            "them."
        )
    if not is_count(drawing.max_number) or drawing.max_number < 2:
        raise ConfigError(
            f"`max_number` is {drawing.max_number!r}; numbers are drawn from 1 up to it, so choose 2 or more."
        )
    if not is_count(drawing.max_target):
        raise ConfigError(f"`max_target` is {drawing.max_target!r}; it must be an integer, 0 or more.")
    require_operators(drawing.operators)
