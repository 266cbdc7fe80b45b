"""The description of a world of single questions: one right answer a task is all that is needed.

tasks, their right answers ──► "random": the answer of another task, drawn evenly
                           ──► "always 7": the answer that is right most often
                           ──► "optimum": 1

Answers are compared as text: a question with several right answers may pay simple policies a little more.
Where hardly any answer is that of two tasks, such as programs or long numbers, no policy draws from these
answers without knowing them: there are no baselines.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rllm.environments.world import OPTIMUM, RANDOM, Baselines

_TASKS_PER_ANSWER = 2
"""Tasks that share an answer, on average, where simple policies make sense."""
_SHOWN = 40
"""Characters of an answer in the name of the policy that always gives it."""


def answer_baselines(right_answer: Callable[[Mapping[str, Any]], str | None]) -> Baselines:
    """Baselines of tasks with one right answer each, as `right_answer` says; none where a task has none, or
    where nearly all answers differ."""
    return partial(_baselines, right_answer)


def task_oracle(task: Mapping[str, Any]) -> str | None:
    """The right answer that a task of questions carries."""
    return task.get("oracle")


def _baselines(
    right_answer: Callable[[Mapping[str, Any]], str | None], tasks: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """The commonest answer is that of these tasks, so no other constant comes to more on them."""
    answers = [answer for task in tasks if (answer := right_answer(task)) is not None]
    if not answers or len(answers) < len(tasks):
        return {}
    counts = Counter(answers)
    if len(answers) < _TASKS_PER_ANSWER * len(counts):
        return {}
    constant, _ = counts.most_common(1)[0]
    name = constant if len(constant) <= _SHOWN else f"{constant[:_SHOWN]}…"
    return {
        RANDOM: [counts[answer] / len(answers) for answer in answers],
        f"always {name}": [float(answer == constant) for answer in answers],
        OPTIMUM: [1.0] * len(answers),
    }
