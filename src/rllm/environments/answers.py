"""The description of a world of single questions: one right answer a task is all that is needed.

tasks, their right answers ──► "random": the answer of another task, drawn evenly
                           ──► "always 7": the answer that is right most often
                           ──► "optimum": 1

Answers are compared as text: a question with several right answers may pay simple policies a little more.
An answer that no other task shares is worth nothing to either policy: a sample's own answers are not known
without it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rllm.environments.world import OPTIMUM, RANDOM, Baselines

_SHOWN = 40
"""Characters of an answer in the name of the policy that always gives it."""


def answer_baselines(right_answer: Callable[[Mapping[str, Any]], str | None]) -> Baselines:
    """Baselines of tasks with one right answer each, as `right_answer` says; none where a task has none."""
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
    constant, num_tasks = counts.most_common(1)[0]
    name = constant if len(constant) <= _SHOWN else f"{constant[:_SHOWN]}…"
    always = {f"always {name}": [float(answer == constant) for answer in answers]} if num_tasks > 1 else {}
    num_others = max(1, len(answers) - 1)
    return {
        RANDOM: [(counts[answer] - 1) / num_others for answer in answers],
        **always,
        OPTIMUM: [1.0] * len(answers),
    }
