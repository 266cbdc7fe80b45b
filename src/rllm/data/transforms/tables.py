"""Questions about tables of financial reports: FinQA and TAT-QA."""

from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row


def finqa(row: Row, options: Mapping[str, Any]) -> Question:
    """Text before and after a table, and a question whose answer is a number, or yes or no."""
    answer = row.value("qa.exe_ans")
    right = str(answer)
    parts = [*row.texts("pre_text"), _table(row, row.value("table")), *row.texts("post_text")]
    return Question(
        prompt_values={"question": row.text("qa.question"), "context": "\n".join(parts)},
        grading={"answer": right},
        oracle=f"\\boxed{{{right}}}",
    )


def tatqa(row: Row, options: Mapping[str, Any]) -> Question:
    """One question of a table with paragraphs. A scale such as `thousand` or `percent` is part of the
    answer."""
    answer = row.value("answer")
    values = answer if isinstance(answer, list) else [answer]
    scale = row.optional_text("scale")
    right = ", ".join(str(each) for each in values)
    right = f"{right} {scale}" if scale else right
    paragraphs = [str(each["text"]) for each in row.records("paragraphs")]
    return Question(
        prompt_values={
            "question": row.text("question"),
            "context": "\n".join([_table(row, row.value("table.table")), *paragraphs]),
        },
        grading={"answer": right},
        oracle=f"<answer>{right}</answer>",
        category=row.optional_text("answer_type"),
    )


def _table(row: Row, lines: Any) -> str:
    if not isinstance(lines, list) or not all(isinstance(line, list) for line in lines):
        raise row.error(f"has the table {lines!r:.80}; it must be a list of lines.")
    return "\n".join(" | ".join(str(cell) for cell in line) for line in lines)
