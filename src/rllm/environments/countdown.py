"""Countdown: make the target from a few numbers, each used exactly once.

    countdown_tasks ──► Problem((3, 7, 2), 12) ──► "3 7 2 target 12" ──► CountdownEnv
                          └────► solutions, demonstration ──► "3+7+2"

Problems are balanced: the sign that is applied last goes through all signs in turn, and half of the answers
begin with a number that is shown before the one they end with. So no expression that is always the same is
right more often than one in so many signs.

A problem belongs to one split by a hash of its target and its numbers in order of size. So training,
validation and test share no problem, not even one with the numbers in another order, however many are drawn.
Of 512 tasks in a row, counted from a multiple of that, none is another again as long as there are so many.
"""

import difflib
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, islice, permutations, product
from numbers import Integral
from random import Random
from typing import Any

import numpy as np

from rllm.environments.base import BaseEnv, Moved
from rllm.environments.world import OPTIMUM, RANDOM, World
from rllm.errors import AgentError, ConfigError
from rllm.rewards.countdown import grade_countdown
from rllm.types.episode import Action

SPLITS = ("train", "validation", "test")
OPERATORS = "+-*/"
_NUM_NUMBERS = range(2, 5)
WRONG_SIGN = "wrong_sign"
HABITS = ("", WRONG_SIGN)
"""What an expert falls into: any expression of the numbers, or the right one with the next sign for each."""
_MAX_DRAWS = 10_000
_STRETCH = 512
"""Tasks in a row that repeat none among them."""
_BEGINNINGS = (8, 64, _STRETCH)
"""How many tasks of a stretch are drawn at once, and kept: somebody may want a few, or one after another."""
_MAX_REPEATS = 20
"""Draws in a row that give a problem again; after so many, problems with that sign begin anew."""
_ENV_KEYS = ("numbers", "target")
_DRAWING_KEYS = ("num_numbers", "max_number", "max_target", "operators")
"""What problems are drawn with: a problem that is drawn is not changed by it."""
_NAMING_KEYS = ("task_id", "uid", "index")
"""What data sets call a row; it says nothing about the problem."""
_KINDS = {"+": "sums", "-": "differences", "*": "products", "/": "quotients"}
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


def identity(task: Mapping[str, Any]) -> str:
    """Numbers in order of size, and the target: the order they are shown in makes no other problem."""
    return f"{sorted(task['numbers'])} {task['target']}"


def kind(task: Mapping[str, Any]) -> str:
    """Of two numbers, which sign makes the target: `sums`, `differences`, `products` or `quotients`."""
    problem = problem_of(task)
    if len(problem.numbers) > 2:
        return f"{len(problem.numbers)} numbers"
    return next((_KINDS[sign] for sign in OPERATORS if solutions(problem, sign)), "none")


def split_of(problem: Problem) -> str:
    """The one split that a problem is drawn for: half of all train, a quarter validates, a quarter tests."""
    text = identity({"numbers": problem.numbers, "target": problem.target}).encode()
    quarter = hashlib.blake2b(text, digest_size=8, salt=b"countdown").digest()[0] % 4
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
    problems: list[Problem] = []
    for stretch in range(start // _STRETCH, -(-(start + count) // _STRETCH)):
        first = stretch * _STRETCH
        end = min(_STRETCH, start + count - first)
        drawn = _beginning(drawing, stretch, next(each for each in _BEGINNINGS if each >= end))
        problems.extend(drawn[max(start - first, 0) : end])
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
    """What problems are drawn with."""

    split: str
    num_numbers: int
    max_number: int
    max_target: int
    operators: str

    def __post_init__(self) -> None:
        _check_drawing(self)

    def stretch(self, number: int) -> Iterator[Problem]:
        """The problems of one stretch of tasks, from its first on: a function of its number alone."""
        rng = Random(f"countdown {self.split} {number}")
        known: dict[str, set[tuple[tuple[int, ...], int]]] = {sign: set() for sign in self.operators}
        while True:
            for sign in self.operators:
                for ascending in (True, False):
                    yield self._new_problem(rng, sign, known, ascending)

    def _new_problem(
        self, rng: Random, sign: str, known: dict[str, set[tuple[tuple[int, ...], int]]], ascending: bool
    ) -> Problem:
        """A problem that is not among the `known` ones, where it becomes the last one with its sign."""
        num_repeats = 0
        for _ in range(_MAX_DRAWS):
            problem = self._draw(rng, sign, ascending=ascending)
            if problem is None or split_of(problem) != self.split:
                continue
            key = (tuple(sorted(problem.numbers)), problem.target)
            if any(key in each for each in known.values()):
                num_repeats += 1
                if num_repeats < _MAX_REPEATS:
                    continue
                known[sign].clear()
            known[sign].add(key)
            return problem
        raise ConfigError(
            f"{_MAX_DRAWS} draws with `num_numbers` {self.num_numbers}, `max_number` {self.max_number} and "
            f"`max_target` {self.max_target} gave no problem of the {self.split} split with {sign!r} as its "
            "last sign; raise `max_number` or `max_target`, or leave out that sign."
        )

    def _draw(self, rng: Random, sign: str, *, ascending: bool) -> Problem | None:
        """A problem with `sign` last in its answer, which begins with a number that is shown before its last
        number if `ascending`, else after it; None for what cannot be asked."""
        numbers = tuple(rng.randint(1, self.max_number) for _ in range(self.num_numbers))
        drawn = _random_expression(numbers, self.operators, rng, last_sign=sign)
        if drawn is None or not isinstance(drawn.value, int) or not 0 <= drawn.value <= self.max_target:
            return None
        places = drawn.places()
        if (places[0] < places[-1]) != ascending:
            numbers = numbers[::-1]
        problem = Problem(numbers=numbers, target=drawn.value)
        # With two numbers a kind is what it is called: 4 from 2 and 2 is a sum, so no product.
        is_ambiguous = len(numbers) == 2 and _KINDS[sign] != kind({"numbers": numbers, "target": drawn.value})
        return None if is_ambiguous else problem


@lru_cache(maxsize=256)
def _beginning(drawing: _Drawing, stretch: int, count: int) -> tuple[Problem, ...]:
    return tuple(islice(drawing.stretch(stretch), count))


@lru_cache(maxsize=65_536)
def solutions(problem: Problem, operators: str = OPERATORS) -> tuple[str, ...]:
    """All expressions that are right, the plainest first: few brackets, large numbers before small ones."""
    numbers = sorted(problem.numbers, reverse=True)
    parts = [_Expression(number, place) for place, number in enumerate(numbers)]
    found = {
        each.text(): [numbers[place] for place in each.places()]
        for each in _all_of(parts, operators)
        if each.value == problem.target
    }
    return tuple(sorted(found, key=lambda text: (len(text), _num_ascents(found[text]), text)))


def demonstration(task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, habit: str = "") -> str:
    """The plainest right answer to a task; with probability `noise` what `habit` says instead.

    Who imitates the result writes proper expressions and has something left to learn from rewards.
    """
    _require_share("noise", noise)
    if habit not in HABITS:
        raise ConfigError(f"`habit` is {habit!r}; it is {WRONG_SIGN!r}, or left out for any expression.")
    problem, operators = problem_of(task), _operators_of(task)
    if habit and len(operators) < 2:
        raise ConfigError(f"`habit` is {habit!r}, but {operators} is the only sign of {problem.text}.")
    right = solutions(problem, operators)
    if not right:
        raise ConfigError(
            f"Nobody makes {problem.text} with {operators}; demonstrate tasks that have an answer."
        )
    if rng.random() >= noise:
        return right[0]
    if habit == WRONG_SIGN:
        return right[0].translate(str.maketrans(operators, operators[1:] + operators[0]))
    return random_answer(problem, Random(int(rng.integers(2**63))), operators)


def random_answer(problem: Problem, rng: Random, operators: str = OPERATORS) -> str:
    """Some expression that uses each number once; right only by luck."""
    while True:
        drawn = _random_expression(problem.numbers, operators, rng)
        if drawn is not None:
            return drawn.text()


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """What any expression of the numbers comes to, and the one best that never looks at the target.

    The latter writes the numbers from the largest to the smallest and the same signs between them always.
    """
    problems = [(problem_of(task), _operators_of(task)) for task in tasks]
    constants = {
        f"always {signs}": [float(_value_of(problem, signs) == problem.target) for problem, _ in problems]
        for signs in _constant_signs(problems)
    }
    best = max(constants, key=lambda name: sum(constants[name]), default=None)
    return {
        RANDOM: [_luck(problem, operators) for problem, operators in problems],
        **({} if best is None else {best: constants[best]}),
        OPTIMUM: [float(bool(solutions(problem, operators))) for problem, operators in problems],
    }


def _constant_signs(problems: Sequence[tuple[Problem, str]]) -> list[str]:
    """Signs that fit between the numbers of all problems; none where problems differ in length."""
    lengths = {len(problem.numbers) for problem, _ in problems}
    if len(lengths) != 1:
        return []
    signs = sorted(set().union(*(operators for _, operators in problems)))
    return ["".join(each) for each in product(signs, repeat=lengths.pop() - 1)]


def _value_of(problem: Problem, signs: str) -> int | Fraction | None:
    """The largest number, then one sign and number after another."""
    value, *others = sorted(problem.numbers, reverse=True)
    for sign, number in zip(signs, others, strict=True):
        if sign == "/" and number == 0:
            return None
        value = _APPLY[sign](value, number)
    return value


def _luck(problem: Problem, operators: str) -> float:
    """How likely `random_answer` is right: all ways to join the numbers are as likely."""
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
            joined = left / right if sign == "/" else _APPLY[sign](left, right)
            some_right, some = _num_right(tuple(sorted((joined, *others))), target, operators)
            num_right, num_all = num_right + some_right, num_all + some
    return num_right, num_all


def _operators_of(task: Mapping[str, Any]) -> str:
    """The signs that a task may be solved with: those that it was drawn with."""
    operators = task.get("operators", OPERATORS)
    _check_operators(operators)
    return operators


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
    numbers: Sequence[int], operators: str, rng: Random, *, last_sign: str = ""
) -> _Expression | None:
    """Numbers joined two at a time, in any order, by any signs; None where that divides by zero.

    `last_sign`: what joins the last two, if it is not drawn.
    """
    parts = [_Expression(number, place) for place, number in enumerate(numbers)]
    while len(parts) > 1:
        left = parts.pop(rng.randrange(len(parts)))
        right = parts.pop(rng.randrange(len(parts)))
        joined = _joined(left, (not parts and last_sign) or rng.choice(operators), right)
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


def _num_ascents(numbers: Sequence[int]) -> int:
    """Pairs of which the smaller is written first."""
    return sum(earlier < later for earlier, later in combinations(numbers, 2))


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


def _check_drawing(drawing: _Drawing) -> None:
    if drawing.split not in SPLITS:
        raise ConfigError(f"`split` is {drawing.split!r}; countdown has {', '.join(SPLITS)}.")
    if drawing.num_numbers not in _NUM_NUMBERS:
        raise ConfigError(
            f"`num_numbers` is {drawing.num_numbers!r}; there are {_NUM_NUMBERS[0]} to {_NUM_NUMBERS[-1]} of "
            "them."
        )
    if not _is_count(drawing.max_number) or drawing.max_number < 2:
        raise ConfigError(
            f"`max_number` is {drawing.max_number!r}; numbers are drawn from 1 up to it, so choose 2 or more."
        )
    if not _is_count(drawing.max_target):
        raise ConfigError(f"`max_target` is {drawing.max_target!r}; it must be an integer, 0 or more.")
    _check_operators(drawing.operators)


def _check_operators(operators: Any) -> None:
    if not isinstance(operators, str):
        raise ConfigError(f"`operators` is {operators!r:.200}; it is text, some of {OPERATORS}.")
    if not operators or len(set(operators)) != len(operators) or set(operators) - set(OPERATORS):
        raise ConfigError(f"`operators` is {operators!r}; choose some of {OPERATORS}, each once.")


def _require_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"`{name}` is {value}; it is a probability, so choose a number from 0 to 1.")


def _shown(
    task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, habit: str = ""
) -> list[tuple[str, str]]:
    return [(problem_of(task).text, demonstration(task, noise=noise, rng=rng, habit=habit))]


WORLD = World(
    env_class=CountdownEnv,
    draws=True,
    tasks=countdown_tasks,
    demonstrate=_shown,
    expert_args=("habit",),
    identity=identity,
    kind=kind,
    baselines=baselines,
)
