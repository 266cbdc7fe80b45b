"""Countdown: make the target from a few numbers, each used exactly once.

countdown_tasks ──► CountdownProblem((3, 7, 2), 12) ──► "3 7 2 target 12" ──► CountdownEnv
                      └────► solutions, demonstration ──► "3+7+2"
"""

import difflib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

import numpy as np

from rllm.environments.base import BaseEnv, Moved
from rllm.environments.countdown_problems import (
    APPLY,
    ENV_KEYS,
    OPERATORS,
    CountdownProblem,
    given_problem,
    identity,
    kind,
    luck,
    operators_of,
    problem_of,
    random_answer,
    solutions,
)
from rllm.environments.countdown_tasks import countdown_tasks
from rllm.environments.world import OPTIMUM, RANDOM, World
from rllm.errors import AgentError, ConfigError
from rllm.rewards.countdown import grade_countdown
from rllm.types.episode import Action

FOREIGN_SIGN = "foreign_sign"
HABITS = ("", FOREIGN_SIGN)
"""The habits of an expert: any expression of the numbers, or the right one with a sign that its problem is
not drawn with, which says nothing of the right sign."""
_DRAWING_KEYS = ("num_numbers", "max_number", "max_target", "operators")
"""The parameters that problems are drawn with: a problem that is drawn is not changed by them."""
_NAMING_KEYS = ("task_id", "uid", "index")
"""The names that data sets give to a row; they say nothing about the problem."""


class CountdownEnv(BaseEnv):
    """One question, one answer: 1 for an expression that is right, 0 for everything else.

    The action is a model's whole answer; `rllm.rewards.countdown` judges it, and `info["reason"]` says why.
    """

    def __init__(self, numbers: Sequence[int], target: int) -> None:
        self.problem = given_problem(numbers, target)
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
            if key not in (*ENV_KEYS, *_DRAWING_KEYS, *_NAMING_KEYS):
                close = difflib.get_close_matches(key, ENV_KEYS, n=1)
                mend = f"did you mean `{close[0]}`?" if close else f"it takes {' and '.join(ENV_KEYS)}."
                raise ConfigError(f"CountdownEnv does not know `{key}`; {mend}")
        problem = problem_of(info)
        return CountdownEnv(problem.numbers, problem.target)


def demonstration(task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, habit: str = "") -> str:
    """The plainest right answer to a task; with probability `noise` what `habit` says instead.

    Who imitates the result writes proper expressions and has something left to learn from rewards.
    """
    _require_share("noise", noise)
    if habit not in HABITS:
        raise ConfigError(f"`habit` is {habit!r}; it is {FOREIGN_SIGN!r}, or left out for any expression.")
    problem, operators = problem_of(task), operators_of(task)
    foreign = next((sign for sign in "*/-+" if sign not in operators), "")  # * before /: nothing divides by 0
    if habit and not foreign:
        raise ConfigError(
            f"`habit` is {habit!r}, but {problem.text} is drawn with all of {OPERATORS}; leave a sign out of "
            "`operators`, or leave out `habit`."
        )
    right = solutions(problem, operators)
    if not right:
        raise ConfigError(
            f"Nobody makes {problem.text} with {operators}; demonstrate tasks that have an answer."
        )
    if rng.random() >= noise:
        return right[0]
    if habit == FOREIGN_SIGN:
        return right[0].translate(str.maketrans(operators, foreign * len(operators)))
    return random_answer(problem, Random(int(rng.integers(2**63))), operators)


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Scores of any expression of the numbers, and of the best one that never looks at the target.

    The latter writes the numbers from the largest to the smallest and the same signs between them always.
    """
    problems = [(problem_of(task), operators_of(task)) for task in tasks]
    constants = {
        f"always {signs}": [float(_value_of(problem, signs) == problem.target) for problem, _ in problems]
        for signs in _constant_signs(problems)
    }
    best = max(constants, key=lambda name: sum(constants[name]), default=None)
    return {
        RANDOM: [luck(problem, operators) for problem, operators in problems],
        **({} if best is None else {best: constants[best]}),
        OPTIMUM: [float(bool(solutions(problem, operators))) for problem, operators in problems],
    }


def _constant_signs(problems: Sequence[tuple[CountdownProblem, str]]) -> list[str]:
    """Signs that fit between the numbers of all problems; none where problems differ in length."""
    lengths = {len(problem.numbers) for problem, _ in problems}
    if len(lengths) != 1:
        return []
    signs = sorted(set().union(*(operators for _, operators in problems)))
    return ["".join(each) for each in product(signs, repeat=lengths.pop() - 1)]


def _value_of(problem: CountdownProblem, signs: str) -> int | Fraction | None:
    """The largest number, then one sign and number after another."""
    value, *others = sorted(problem.numbers, reverse=True)
    for sign, number in zip(signs, others, strict=True):
        if sign == "/" and number == 0:
            return None
        value = APPLY[sign](value, number)
    return value


def _require_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"`{name}` is {value}; it is a probability, so choose a number from 0 to 1.")


def _observation(
    task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, habit: str = ""
) -> list[tuple[str, str]]:
    return [(problem_of(task).text, demonstration(task, noise=noise, rng=rng, habit=habit))]


WORLD = World(
    env_class=CountdownEnv,
    draws=True,
    tasks=countdown_tasks,
    demonstrate=_observation,
    expert_args=("habit",),
    identity=identity,
    kind=kind,
    baselines=baselines,
)
