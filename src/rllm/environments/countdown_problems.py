"""Countdown problems: what is asked, and every expression that is right.

CountdownProblem((3, 7, 2), 12) ──► solutions ──► ("7+3+2", …)
Expression: a number, or a sign between two expressions
"""

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, permutations
from numbers import Integral
from random import Random
from typing import Any

from rllm.errors import ConfigError

OPERATORS = "+-*/"
NUM_NUMBERS = range(2, 5)
ENV_KEYS = ("numbers", "target")
KINDS = {"+": "sums", "-": "differences", "*": "products", "/": "quotients"}
_HOLDS = {"+": 1, "-": 1, "*": 2, "/": 2}
"""The precedence of each sign."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CountdownProblem:
    """Numbers and a target to reach."""

    numbers: tuple[int, ...]
    """In the order they are shown in."""
    target: int

    @property
    def text(self) -> str:
        """As agents see it."""
        return f"{' '.join(map(str, self.numbers))} target {self.target}"


@dataclass(slots=True, frozen=True)
class Expression:
    """A number, or a sign between two expressions."""

    value: int | Fraction
    place: int = -1
    """Which of the numbers it is; -1 for a sign."""
    sign: str = ""
    left: "Expression | None" = None
    right: "Expression | None" = None

    def places(self) -> tuple[int, ...]:
        """Which of the numbers, in the order they are written in."""
        if self.left is None or self.right is None:
            return (self.place,)
        return self.left.places() + self.right.places()

    def text(self, needs: int = 0, on_the_right_of: str = "") -> str:
        """As people write it: brackets only where they change the value."""
        if self.left is None or self.right is None:
            return str(self.value)
        holds = _HOLDS[self.sign]
        infix = f"{self.left.text(holds)}{self.sign}{self.right.text(holds, self.sign)}"
        is_bare = holds > needs or (holds == needs and on_the_right_of not in ("-", "/"))
        return infix if is_bare else f"({infix})"


def given_problem(numbers: Any, target: Any) -> CountdownProblem:
    given_numbers = list(numbers) if isinstance(numbers, Sequence) and not isinstance(numbers, str) else []
    if len(given_numbers) not in NUM_NUMBERS or not all(is_count(each) for each in given_numbers):
        raise ConfigError(
            f"`numbers` is {numbers!r:.200}; give a list of {NUM_NUMBERS[0]} to {NUM_NUMBERS[-1]} "
            "integers, none of them negative."
        )
    if not is_count(target):
        raise ConfigError(f"`target` is {target!r:.200}; it must be an integer, 0 or more.")
    return CountdownProblem(numbers=tuple(int(each) for each in given_numbers), target=int(target))


def is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def require_operators(operators: Any) -> None:
    if not isinstance(operators, str):
        raise ConfigError(f"`operators` is {operators!r:.200}; it is text, some of {OPERATORS}.")
    if not operators or len(set(operators)) != len(operators) or set(operators) - set(OPERATORS):
        raise ConfigError(f"`operators` is {operators!r}; choose some of {OPERATORS}, each once.")


def problem_of(task: Mapping[str, Any]) -> CountdownProblem:
    """The problem of a task. Raises ConfigError when `numbers` or `target` is missing or none."""
    if missing := [key for key in ENV_KEYS if key not in task]:
        raise ConfigError(f"A countdown task has no `{missing[0]}`: it has {', '.join(task) or 'nothing'}.")
    return given_problem(task["numbers"], task["target"])


def operators_of(task: Mapping[str, Any]) -> str:
    """The signs that a task may be solved with: those that it was drawn with."""
    operators = task.get("operators", OPERATORS)
    require_operators(operators)
    return operators


def identity(task: Mapping[str, Any]) -> str:
    """Numbers in order of size, and the target: the order they are shown in makes no other problem."""
    return f"{sorted(task['numbers'])} {task['target']}"


def kind(task: Mapping[str, Any]) -> str:
    """The sign that makes the target out of two numbers: `sums`, `differences`, `products` or `quotients`."""
    problem = problem_of(task)
    if len(problem.numbers) > 2:
        return f"{len(problem.numbers)} numbers"
    return next((KINDS[sign] for sign in OPERATORS if solutions(problem, sign)), "none")


def split_of(problem: CountdownProblem) -> str:
    """The one split that a problem is drawn for: half of all train, a quarter validates, a quarter tests."""
    text = identity({"numbers": problem.numbers, "target": problem.target}).encode()
    quarter = hashlib.blake2b(text, digest_size=8, salt=b"countdown").digest()[0] % 4
    return ("test", "validation", "train", "train")[quarter]


@lru_cache(maxsize=65_536)
def solutions(problem: CountdownProblem, operators: str = OPERATORS) -> tuple[str, ...]:
    """All expressions that are right, the plainest first: few brackets, large numbers before small ones."""
    numbers = sorted(problem.numbers, reverse=True)
    parts = [Expression(number, place) for place, number in enumerate(numbers)]
    answers = {
        each.text(): [numbers[place] for place in each.places()]
        for each in _all_of(parts, operators)
        if each.value == problem.target
    }
    return tuple(sorted(answers, key=lambda text: (len(text), _num_ascents(answers[text]), text)))


def random_answer(problem: CountdownProblem, rng: Random, operators: str = OPERATORS) -> str:
    """Some expression that uses each number once; right only by luck."""
    while True:
        expression = random_expression(problem.numbers, operators, rng)
        if expression is not None:
            return expression.text()


def luck(problem: CountdownProblem, operators: str) -> float:
    """The probability that `random_answer` is right: all ways to join the numbers are equally likely."""
    num_right, num_all = _num_right(tuple(sorted(map(float, problem.numbers))), problem.target, operators)
    return num_right / num_all


@lru_cache(maxsize=65_536)
def _num_right(parts: tuple[float, ...], target: int, operators: str) -> tuple[int, int]:
    """(ways to join all parts that come to the target, all ways). Floating point: numbers are small, and
    fractions would take ten times as long."""
    if len(parts) == 1:
        return int(abs(parts[0] - target) < 1e-6), 1
    num_right = num_all = 0
    for first, second in permutations(range(len(parts)), 2):
        left, right = parts[first], parts[second]
        others = tuple(part for place, part in enumerate(parts) if place not in (first, second))
        for sign in operators:
            if sign == "/" and right == 0:
                continue
            value = left / right if sign == "/" else APPLY[sign](left, right)
            # Sorted, so that the same parts in another order are found in the cache.
            some_right, some = _num_right(tuple(sorted((value, *others))), target, operators)
            num_right, num_all = num_right + some_right, num_all + some
    return num_right, num_all


def _all_of(parts: list[Expression], operators: str) -> Iterator[Expression]:
    """Every way to join all parts: two of them become one, until one is left."""
    if len(parts) == 1:
        yield parts[0]
        return
    for first, second in combinations(range(len(parts)), 2):
        left, right = parts[first], parts[second]
        others = [part for place, part in enumerate(parts) if place not in (first, second)]
        for sign in operators:
            pairs = ((left, right),) if sign in "+*" else ((left, right), (right, left))
            for one, other in pairs:
                expression = _join(one, sign, other)
                if expression is not None:
                    yield from _all_of([expression, *others], operators)


def random_expression(
    numbers: Sequence[int], operators: str, rng: Random, *, last_sign: str = ""
) -> Expression | None:
    """Numbers joined two at a time, in any order, by any signs; None where that divides by zero.

    `last_sign`: what joins the last two, if it is not drawn.
    """
    parts = [Expression(number, place) for place, number in enumerate(numbers)]
    while len(parts) > 1:
        left = parts.pop(rng.randrange(len(parts)))
        right = parts.pop(rng.randrange(len(parts)))
        whole = _join(left, (not parts and last_sign) or rng.choice(operators), right)
        if whole is None:
            return None
        parts.append(whole)
    return parts[0]


def _join(left: Expression, sign: str, right: Expression) -> Expression | None:
    if sign == "/" and right.value == 0:
        return None
    value = APPLY[sign](left.value, right.value)
    return Expression(value, sign=sign, left=left, right=right)


def _divide(left: int | Fraction, right: int | Fraction) -> int | Fraction:
    """Whole where it can be: integers are ten times as fast."""
    exact = Fraction(left) / Fraction(right)
    return exact.numerator if exact.denominator == 1 else exact


APPLY: dict[str, Callable[[Any, Any], int | Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
}


def _num_ascents(numbers: Sequence[int]) -> int:
    """Pairs of which the smaller is written first."""
    return sum(earlier < later for earlier, later in combinations(numbers, 2))
