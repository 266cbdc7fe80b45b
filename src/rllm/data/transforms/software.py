"""Issues of software projects: SWE-bench in its published forms."""

from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row

_GRADED_BY = (
    *("instance_id", "repo", "base_commit", "version", "test_patch"),
    *(
        "image",
        "dockerhub_tag",
        "patch",
        "source",
        "install",
        "test_command",
        "test_files",
        "python",
        "eval_type",
    ),
)
"""Columns that the grader reads, where a row has them."""


def swebench(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: problem_statement, repo, base_commit, patch, test_patch, FAIL_TO_PASS, PASS_TO_PASS."""
    grading = {name: row.optional(name) for name in _GRADED_BY if row.optional(name) is not None}
    grading |= {name: row.value(name) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    return Question(
        prompt_values={
            "question": row.text("problem_statement"),
            "repo": row.text("repo"),
            "base_commit": row.text("base_commit"),
        },
        grading=grading,
        oracle=f"```diff\n{row.text('patch').rstrip()}\n```",
        category=row.text("repo"),
    )
