"""Countdown: make the target from a few numbers, each used exactly once.

    (split, index) ──► countdown_problem ──► Problem((3, 7, 2), 12) ──► "3 7 2 target 12" ──► CountdownEnv
                                               └────► solutions, demonstration ──► "3+7+2"

A problem belongs to one split by a hash of its target and its numbers in order of size. So training,
validation and test share no problem, not even one with the numbers in another order, however many are drawn.
"""

import difflib
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from numbers import Integral
from typing import Any

import numpy as np

from rllm.environments.base import BaseEnv, Moved
from rllm.environments.world import World
from rllm.errors import AgentError, ConfigError
from rllm.rewards.countdown import grade_countdown
from rllm.types.episode import Action

SPLITS = ("train", "validation", "test")
OPERATORS = "+-*/"
_NUM_NUMBERS = range(2, 5)
_MAX_DRAWS = 10_000
_ENV_KEYS = ("numbers", "target")
_DRAWING_KEYS = ("num_numbers", "max_number", "max_target", "operators")
"""What problems are drawn with: a problem that is drawn is not changed by it."""
_NAMING_KEYS = ("task_id", "uid", "index")
"""What data sets call a row; it says nothing about the problem."""
_HOLDS = {"+": 1, "-": 1, "*": 2, "/": 2}
"""How tightly a sign binds."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Problem:
    """What is asked."""

    numbers: tuple[int, ...]
    """In the order they are shown in."""
    target: int

    @property
    def text(self) -> str:
        """As agents see it."""
        return f"{' '.join(map(str, self.numbers))} target {self.target}"


@dataclass(slots=True, frozen=True)
class _Expression:
    """A number, or a sign between two expressions."""

    value: int | Fraction
    place: int = -1
    """Which of the numbers it is; -1 for a sign."""
    sign: str = ""
    left: "_Expression | None" = None
    right: "_Expression | None" = None

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
        said = f"{self.left.text(holds)}{self.sign}{self.right.text(holds, self.sign)}"
        is_bare = holds > needs or (holds == needs and on_the_right_of not in ("-", "/"))
        return said if is_bare else f"({said})"


class CountdownEnv(BaseEnv):
    """One question, one answer: 1 for an expression that is right, 0 for everything else.

    The action is a model's whole answer; `rllm.rewards.countdown` judges it, and `info["reason"]` says why.
    """

    def __init__(self, numbers: Sequence[int], target: int) -> None:
        self.problem = _given_problem(numbers, target)
        self._over = True

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """The question. Nothing is drawn, so the seed changes nothing."""
        self._over = False
        return self.problem.text, {}

    def step(self, action: Any) -> Moved:
        if self._over:
            raise AgentError("CountdownEnv.step: there is no question to answer; call reset first.")
        self._over = True
        answer = action.action if isinstance(action, Action) else action
        grade = grade_countdown(str(answer), self.problem.numbers, self.problem.target)
        return self.problem.text, float(grade.is_correct), True, {"reason": str(grade.reason)}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "CountdownEnv":
        """The environment of a task made by `countdown_tasks`, or of any dict with `numbers` and `target`."""
        for key in info:
            if key not in (*_ENV_KEYS, *_DRAWING_KEYS, *_NAMING_KEYS):
                close = difflib.get_close_matches(key, _ENV_KEYS, n=1)
                mend = f"did you mean `{close[0]}`?" if close else f"it takes {' and '.join(_ENV_KEYS)}."
                raise ConfigError(f"CountdownEnv does not know `{key}`; {mend}")
        problem = problem_of(info)
        return CountdownEnv(problem.numbers, problem.target)


def problem_of(task: Mapping[str, Any]) -> Problem:
    """The problem of a task. Raises ConfigError when `numbers` or `target` is missing or none."""
    if missing := [key for key in _ENV_KEYS if key not in task]:
        raise ConfigError(f"A countdown task has no `{missing[0]}`: it has {', '.join(task) or 'nothing'}.")
    return _given_problem(task["numbers"], task["target"])


def countdown_problem(
    split: str,
    index: int,
    *,
    num_numbers: int = 3,
    max_number: int = 9,
    max_target: int = 99,
    operators: str = OPERATORS,
) -> Problem:
    """Problem number `index` of `split`: it can be solved, with `operators` alone.

    Counter-based: a problem is a function of these arguments alone. It may come up more than once in a split.
    """
    _check_drawing(split, index, num_numbers, max_number, max_target, operators)
    # A key names the problem, so any problem is drawn without the ones before it.
    rng = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), index]))
    for _ in range(_MAX_DRAWS):
        numbers = tuple(int(each) for each in rng.integers(1, max_number + 1, size=num_numbers))
        drawn = _random_expression(numbers, operators, rng)
        if drawn is None or not isinstance(drawn.value, int) or not 0 <= drawn.value <= max_target:
            continue
        problem = Problem(numbers=numbers, target=drawn.value)
        if split_of(problem) == split:
            return problem
    raise ConfigError(
        f"{_MAX_DRAWS} draws with `num_numbers` {num_numbers}, `max_number` {max_number} and `max_target` "
        f"{max_target} gave no problem of the {split} split; raise `max_number` or `max_target`."
    )


def split_of(problem: Problem) -> str:
    """The one split that a problem is drawn for: half of all train, a quarter validates, a quarter tests."""
    asked = f"{sorted(problem.numbers)} {problem.target}".encode()
    quarter = hashlib.blake2b(asked, digest_size=8, salt=b"countdown").digest()[0] % 4
    return ("test", "validation", "train", "train")[quarter]


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
    """Problems `start` to `start + count - 1` of a split as tasks; each goes into CountdownEnv.from_dict."""
    if count < 0 or start < 0:
        raise ConfigError(f"`count` is {count} and `start` is {start}; problems are counted from 0 upwards.")
    problems = [
        countdown_problem(
            split,
            index,
            num_numbers=num_numbers,
            max_number=max_number,
            max_target=max_target,
            operators=operators,
        )
        for index in range(start, start + count)
    ]
    return [
        {
            "task_id": f"countdown-{split}-{start + offset}",
            "numbers": list(problem.numbers),
            "target": problem.target,
        }
        for offset, problem in enumerate(problems)
    ]


@lru_cache(maxsize=65_536)
def solutions(problem: Problem, operators: str = OPERATORS) -> tuple[str, ...]:
    """All expressions that are right, the plainest first: few brackets, the numbers in the order shown."""
    numbers = [_Expression(number, place) for place, number in enumerate(problem.numbers)]
    found = {
        each.text(): each.places() for each in _all_of(numbers, operators) if each.value == problem.target
    }
    return tuple(sorted(found, key=lambda text: (len(text), _swaps(found[text]), text)))


def demonstration(
    task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, operators: str = OPERATORS
) -> str:
    """The plainest right answer to a task; with probability `noise` any expression of its numbers instead.

    Who imitates the result writes proper expressions and has something left to learn from rewards.
    """
    _require_share("noise", noise)
    problem = problem_of(task)
    right = solutions(problem, operators)
    if not right:
        raise ConfigError(
            f"Nobody makes {problem.text} with {operators}; demonstrate tasks that have an answer."
        )
    return random_answer(problem, rng, operators) if rng.random() < noise else right[0]


def random_answer(problem: Problem, rng: np.random.Generator, operators: str = OPERATORS) -> str:
    """Some expression that uses each number once; right only by luck."""
    while True:
        drawn = _random_expression(problem.numbers, operators, rng)
        if drawn is not None:
            return drawn.text()


def _all_of(parts: list[_Expression], operators: str) -> Iterator[_Expression]:
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
                joined = _joined(one, sign, other)
                if joined is not None:
                    yield from _all_of([joined, *others], operators)


def _random_expression(
    numbers: Sequence[int], operators: str, rng: np.random.Generator
) -> _Expression | None:
    """Numbers joined two at a time, in any order, by any signs; None where that divides by zero."""
    parts = [_Expression(number, place) for place, number in enumerate(numbers)]
    while len(parts) > 1:
        left = parts.pop(rng.integers(len(parts)))
        right = parts.pop(rng.integers(len(parts)))
        joined = _joined(left, operators[rng.integers(len(operators))], right)
        if joined is None:
            return None
        parts.append(joined)
    return parts[0]


def _joined(left: _Expression, sign: str, right: _Expression) -> _Expression | None:
    if sign == "/" and right.value == 0:
        return None
    value = _APPLY[sign](left.value, right.value)
    return _Expression(value, sign=sign, left=left, right=right)


def _divided(left: int | Fraction, right: int | Fraction) -> int | Fraction:
    """Whole where it can be: integers are ten times as fast."""
    exact = Fraction(left) / Fraction(right)
    return exact.numerator if exact.denominator == 1 else exact


_APPLY: dict[str, Callable[[Any, Any], int | Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divided,
}


def _swaps(places: Sequence[int]) -> int:
    """Pairs that are written in another order than they are shown in."""
    return sum(earlier > later for earlier, later in combinations(places, 2))


def _given_problem(numbers: Any, target: Any) -> Problem:
    given = list(numbers) if isinstance(numbers, Sequence) and not isinstance(numbers, str) else []
    if len(given) not in _NUM_NUMBERS or not all(_is_count(each) for each in given):
        raise ConfigError(
            f"`numbers` is {numbers!r:.200}; give a list of {_NUM_NUMBERS[0]} to {_NUM_NUMBERS[-1]} "
            "integers, none of them negative."
        )
    if not _is_count(target):
        raise ConfigError(f"`target` is {target!r:.200}; it must be an integer, 0 or more.")
    return Problem(numbers=tuple(int(each) for each in given), target=int(target))


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _check_drawing(
    split: str, index: int, num_numbers: int, max_number: int, max_target: int, operators: str
) -> None:
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; countdown has {', '.join(SPLITS)}.")
    if not _is_count(index) or index >= 2**63:
        raise ConfigError(
            f"The index is {index!r}; it is the number of a problem, so choose an integer from 0 up."
        )
    if num_numbers not in _NUM_NUMBERS:
        raise ConfigError(
            f"`num_numbers` is {num_numbers!r}; there are {_NUM_NUMBERS[0]} to {_NUM_NUMBERS[-1]} of them."
        )
    if not _is_count(max_number) or max_number < 2:
        raise ConfigError(
            f"`max_number` is {max_number!r}; numbers are drawn from 1 up to it, so choose 2 or more."
        )
    if not _is_count(max_target):
        raise ConfigError(f"`max_target` is {max_target!r}; it must be an integer, 0 or more.")
    if not operators or len(set(operators)) != len(operators) or set(operators) - set(OPERATORS):
        raise ConfigError(f"`operators` is {operators!r}; choose some of {OPERATORS}, each once.")


def _require_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"`{name}` is {value}; it is a probability, so choose a number from 0 to 1.")


def _shown(
    task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, operators: str = OPERATORS
) -> list[tuple[str, str]]:
    return [(problem_of(task).text, demonstration(task, noise=noise, rng=rng, operators=operators))]


WORLD = World(env_class=CountdownEnv, tasks=countdown_tasks, demonstrate=_shown, expert_args=("operators",))
