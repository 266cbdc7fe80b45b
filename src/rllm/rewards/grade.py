"""One answer, one task row, one grade: what every grader takes and gives.

    (answer, task row) ──► Grader ──► Grade(score, is_correct, extracted, reason)
                             └──────► RewardError: the data or the grader is at fault, never the answer

Whatever a model can write has a grade. What the row lacks, and what the grader's own machinery could not do,
is a RewardError: a failure is never a zero.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from rllm.errors import RewardError


@dataclass(kw_only=True, slots=True, frozen=True)
class Grade:
    """One answer, judged."""

    score: float
    """Finite; from 0 to 1 unless the grader says otherwise."""
    is_correct: bool
    extracted: str | None = None
    """The text that was taken for the answer; None where none was found."""
    reason: str = ""
    """The reason in a few words: for people and for counting."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further facts from the grader, as plain JSON."""

    def __post_init__(self) -> None:
        score = self.score
        if isinstance(score, bool) or not isinstance(score, Real) or not math.isfinite(score):
            raise RewardError(
                f"A grade has the score {score!r:.200} (a {type(score).__name__}); "
                "it must be a finite number."
            )
        if not isinstance(self.is_correct, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RewardError(f"A grade says is_correct={self.is_correct!r:.200}; it must be True or False.")


def right(reason: str, extracted: str | None = None, **metadata: Any) -> Grade:
    """Full score."""
    return Grade(score=1.0, is_correct=True, extracted=extracted, reason=reason, metadata=metadata)


def wrong(reason: str, extracted: str | None = None, **metadata: Any) -> Grade:
    """No score: the answer is at fault."""
    return Grade(score=0.0, is_correct=False, extracted=extracted, reason=reason, metadata=metadata)


@runtime_checkable
class Grader(Protocol):
    """Grades answers, from any thread."""

    @property
    def name(self) -> str:
        """For messages and metrics: the one that it is found by."""
        ...

    @property
    def task_fields(self) -> tuple[str, ...]:
        """Fields of a task row that it reads; "a|b" where either will do."""
        ...

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """The grade of what a model wrote. Raises RewardError where the row or the grader is at fault."""
        ...

    def close(self) -> None:
        """Ends what it holds; again is harmless."""
        ...


def require_answer(answer: Any, grader: str) -> str:
    """The answer, if it is text. Raises RewardError: whoever called passed something else."""
    if isinstance(answer, str):
        return answer
    raise RewardError(
        f"The {grader} grader was given {answer!r:.200} (a {type(answer).__name__}) as the answer; "
        "it must be text."
    )


def task_field(task: Mapping[str, Any], name: str, grader: str) -> Any:
    """The row's value under `name`. Raises RewardError that names the field where there is none."""
    if not isinstance(task, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RewardError(
            f"The {grader} grader was given {task!r:.200} (a {type(task).__name__}) as the task; it must be "
            "a mapping, one row of a data set."
        )
    value = task.get(name)
    if value is None:
        nearest = difflib.get_close_matches(name, [str(key) for key in task], n=1)
        hint = f"; it has `{nearest[0]}`" if nearest and nearest[0] != name else ""
        has = "is None" if name in task else f"is missing: the row has {_field_list(task)}{hint}"
        raise RewardError(f"The {grader} grader needs the task field `{name}`, which {has}.")
    return value


def gold_texts(task: Mapping[str, Any], grader: str) -> list[str]:
    """The right answers of a row: `answers` (a list, any of them will do) or else `answer`, as texts.

    Numbers are written out. Raises RewardError for a row that has none, or an empty one.
    """
    field_name = "answers" if task_has(task, "answers") else "answer"
    value = task_field(task, field_name, grader)
    golds = list(value) if isinstance(value, list | tuple) else [value]
    texts = [_gold_text(each, field_name, grader) for each in golds]
    if not texts:
        raise RewardError(f"The {grader} grader needs the task field `{field_name}`, which is an empty list.")
    return texts


MOST_BITS = 10_000
"""The size of an integer as a right answer: Python itself refuses to write much longer ones out."""


def task_has(task: Mapping[str, Any], name: str) -> bool:
    return isinstance(task, Mapping) and task.get(name) is not None  # pyright: ignore[reportUnnecessaryIsInstance]


def shown_value(value: Any, max_chars: int = 200) -> str:
    """A field of a row for a message, cut short; also a number with more digits than Python writes out."""
    try:
        return f"{value!r:.{max_chars}}"
    except (ValueError, RecursionError) as error:
        return f"a {type(value).__name__} that cannot be written ({error})"


def _gold_text(value: Any, field_name: str, grader: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise RewardError(
            f"The {grader} grader was given an integer of {value.bit_length()} bits in the task field "
            f"`{field_name}`; one of more than {MOST_BITS} is written as text."
        )
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return repr(value)
    raise RewardError(
        f"The {grader} grader was given {shown_value(value)} (a {type(value).__name__}) in the task field "
        f"`{field_name}`; a right answer is text that is not empty, or a finite number."
    )


def _field_list(task: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}`" for key in list(task)[:12]) or "no fields"
