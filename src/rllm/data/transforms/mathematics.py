r"""Problems with one answer: GSM8K, MATH, AIME and their kin.

`answer_in` says where the answer of a row stands: `field` (it is the field), `boxed` (in the last \boxed{…}
of the worked solution), `hashes` (after the last `####`).
"""

import re
from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row

_BOX = re.compile(r"\\f?boxed\s*")


def mathematics(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question, answer; category where there is one."""
    where = options.get("answer_in", "field")
    answers = [_require_answer(row, text, where) for text in row.texts("answer")]
    answers = [each.strip().strip("$") if options.get("strip_dollars") else each.strip() for each in answers]
    grading = {"answer": answers[0]} if len(answers) == 1 else {"answers": answers}
    return Question(
        prompt_values={"question": row.text("question")},
        grading=grading,
        oracle=f"\\boxed{{{answers[0]}}}",
        category=row.optional_text("category"),
    )


def countdown(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: numbers, target. A row does not say how it is done."""
    numbers = [int(each) for each in row.texts("numbers")]
    target = row.integer("target")
    return Question(
        prompt_values={"numbers": " ".join(map(str, numbers)), "target": target},
        grading={"numbers": numbers, "target": target},
    )


def _require_answer(row: Row, text: str, where: str) -> str:
    if where == "hashes":
        if "####" not in text:
            raise row.error(f"has no `####` in its answer, which ends with {text[-60:]!r}.")
        return text.rpartition("####")[2].strip().replace(",", "")
    if where == "boxed":
        box = last_box(text)
        if box is None:
            raise row.error(f"has no \\boxed{{…}} in its solution, which ends with {text[-60:]!r}.")
        return box
    return text


def last_box(text: str) -> str | None:
    """The content of the last box in a text; None without one that is closed."""
    box = None
    for match in _BOX.finditer(text):
        begin = match.end()
        if text[begin : begin + 1] != "{":
            bare = re.compile(r"[^\s$]+").match(text, begin)
            box = bare[0] if bare else box
            continue
        depth = 0
        for place in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                box = text[begin + 1 : place]
                break
    return box
