"""Rows of a person's own: tasks as they are, or a question and an answer under the usual names."""

from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row

QUESTIONS = ("question", "prompt", "problem", "instruction", "input")
ANSWERS = ("answer", "answers", "target", "ground_truth", "output", "solution")


def own(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question and answer, found under the usual names unless the benchmark names them.

    A row with `grading` is graded by that; all of the row may be shown by the prompt.
    """
    question = row.text(_present(row, "question", QUESTIONS))
    shown_fields = {
        "question": question,
        **{name: value for name, value in row.values.items() if name != "question"},
    }
    grading = row.optional("grading")
    if isinstance(grading, Mapping):
        return Question(
            prompt_values=shown_fields, grading=dict(grading), category=row.optional_text("category")
        )
    answers = row.texts(_present(row, "answer", ANSWERS))
    return Question(
        prompt_values=shown_fields,
        grading={**row.values, **({"answer": answers[0]} if len(answers) == 1 else {"answers": answers})},
        oracle=f"<answer>{answers[0]}</answer>",
        category=row.optional_text("category"),
    )


def _present(row: Row, name: str, usual: tuple[str, ...]) -> str:
    """The field's name, or the first of the usual ones that the row has."""
    if name in row.fields:
        return name
    return next((each for each in usual if row.optional(each) is not None), name)
