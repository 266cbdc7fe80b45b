"""Arithmetic: one sum, one number. As easy as a tiny model likes it, as hard as one wants.

    (split, index) ──► Sum(numbers, signs) ──► "17 + 4 * 3 =" ──► graded exactly against 29

A sum belongs to one split by a hash of its terms, in whatever order they are added, so splits share none,
however many are drawn.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllm.environments.answers import answer_baselines
from rllm.environments.games.env import require_habit
from rllm.environments.single_turn import SingleTurnEnvironment
from rllm.environments.world import World
from rllm.environments.wrong_answers import stray
from rllm.errors import ConfigError

SPLITS = ("train", "validation", "test")
OPERATORS = "+-*"
_KINDS = {"+": "plus", "-": "minus", "*": "times"}
WRONG_SIGN = "wrong_sign"
_OTHER_SIGN = str.maketrans("+-*", "-++")
"""The signs that an expert reads out of habit."""
_MAX_TERMS = 8
_MAX_DRAWS = 10_000


@dataclass(kw_only=True, slots=True, frozen=True)
class Sum:
    """Numbers with signs between them, read as people do: times before plus and minus."""

    numbers: tuple[int, ...]
    signs: str

    @property
    def text(self) -> str:
        pairs = zip(self.signs, self.numbers[1:], strict=True)
        return f"{self.numbers[0]}{''.join(f' {sign} {number}' for sign, number in pairs)}"

    @property
    def identity(self) -> str:
        """The terms with their signs, in order: 3 + 5 and 5 + 3 are one sum. With products, the text."""
        if "*" in self.signs:
            return self.text
        pairs = zip(f"+{self.signs}", self.numbers, strict=True)
        return " ".join(sorted(f"{sign}{number}" for sign, number in pairs))

    @property
    def value(self) -> int:
        total, product = 0, self.numbers[0]
        for sign, number in zip(self.signs, self.numbers[1:], strict=True):
            if sign == "*":
                product *= number
            else:
                total, product = total + product, number if sign == "+" else -number
        return total + product


def arithmetic_sum(
    split: str,
    index: int,
    *,
    num_terms: int = 2,
    min_number: int = 0,
    max_number: int = 99,
    operators: str = "+-",
) -> Sum:
    """Sum number `index` of a split: a function of these arguments alone."""
    _check(split, index, num_terms, operators)
    if not 0 <= min_number < max_number <= 10**12:
        raise ConfigError(
            f"`min_number` is {min_number} and `max_number` is {max_number}; choose the first from 0 and the "
            f"second above it, up to {10**12}."
        )
    rng = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), index]))
    for _ in range(_MAX_DRAWS):
        numbers = tuple(int(each) for each in rng.integers(min_number, max_number + 1, size=num_terms))
        signs = "".join(operators[rng.integers(len(operators))] for _ in range(num_terms - 1))
        problem = Sum(numbers=numbers, signs=signs)
        if split_of_text(problem.identity) == split:
            return problem
    raise ConfigError(
        f"{_MAX_DRAWS} draws with `num_terms` {num_terms} and `max_number` {max_number} gave no sum of the "
        f"{split} split; raise one of them."
    )


def split_of_text(text: str) -> str:
    """The one split that a question is drawn for: half of all train, a quarter validates, a quarter tests."""
    quarter = hashlib.blake2b(text.encode(), digest_size=8, salt=b"questions").digest()[0] % 4
    return ("test", "validation", "train", "train")[quarter]


def arithmetic_tasks(
    split: str,
    count: int,
    *,
    start: int = 0,
    num_terms: int = 2,
    min_number: int = 0,
    max_number: int = 99,
    operators: str = "+-",
) -> list[dict[str, Any]]:
    """Sums `start` to `start + count - 1` of a split as tasks of a single turn."""
    tasks: list[dict[str, Any]] = []
    for index in range(start, start + count):
        problem = arithmetic_sum(
            split,
            index,
            num_terms=num_terms,
            min_number=min_number,
            max_number=max_number,
            operators=operators,
        )
        tasks.append(
            {
                "task_id": f"arithmetic-{split}-{index}",
                "question": f"{problem.text} =",
                "grader": "exact",
                "grader_args": {},
                "grading": {"answer": str(problem.value)},
                "oracle": str(problem.value),
                "category": " ".join(_KINDS[sign] for sign in sorted(set(problem.signs))),
                "identity": problem.identity,
            }
        )
    return tasks


def answer_text(
    task: dict[str, Any], *, noise: float, rng: np.random.Generator, habit: str = ""
) -> list[tuple[str, str]]:
    """The right number; with probability `noise` another one of as many digits, or with the habit
    `wrong_sign` what it comes to if plus is read for minus and minus for plus."""
    require_habit(habit, (WRONG_SIGN,))
    if not habit:
        return [(task["question"], stray(task["oracle"], noise, rng))]
    if rng.random() >= noise:
        return [(task["question"], task["oracle"])]
    signs = sum_of(task).signs.translate(_OTHER_SIGN)
    return [(task["question"], str(_with_signs(task, signs)))]


def sum_of(task: Mapping[str, Any]) -> Sum:
    """The sum of a task made by `arithmetic_tasks`."""
    first, *others = task["question"].removesuffix(" =").split(" ")
    return Sum(numbers=(int(first), *map(int, others[1::2])), signs="".join(others[::2]))


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[float]]:
    """Those of questions, and what it comes to who reads every sign as the same."""
    return {
        **_of_answers(tasks),
        **{
            f"always {_KINDS[sign]}": [
                float(_with_signs(task, sign * len(sum_of(task).signs)) == sum_of(task).value)
                for task in tasks
            ]
            for sign in sorted({sign for task in tasks for sign in sum_of(task).signs})
        },
    }


def _with_signs(task: Mapping[str, Any], signs: str) -> int:
    return Sum(numbers=sum_of(task).numbers, signs=signs).value


def _check(split: str, index: int, num_terms: int, operators: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; there are {', '.join(SPLITS)}.")
    if index < 0:
        raise ConfigError(f"The index is {index}; questions are counted from 0.")
    if not 2 <= num_terms <= _MAX_TERMS:
        raise ConfigError(f"`num_terms` is {num_terms}; a sum has 2 to {_MAX_TERMS} numbers.")
    if not operators or set(operators) - set(OPERATORS):
        raise ConfigError(f"`operators` is {operators!r}; choose some of {OPERATORS}.")


_of_answers = answer_baselines(lambda task: task["grading"]["answer"])
WORLD = World(
    env_class=SingleTurnEnvironment,
    tasks=arithmetic_tasks,
    demonstrate=answer_text,
    expert_args=("habit",),
    draws=True,
    identity=lambda task: task["identity"],
    kind=lambda task: task["category"],
    baselines=baselines,
)
