"""What models really write is read as it was meant: no wrong answer is paid, nearly every right one is.

Two corpora, each half right and half wrong by construction: `corpus/blind`, by somebody who had not read a
grader, and `answer_forms.py`, forms × values. Both readings are of one grading.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.rewards.grade import Grader
from rllm.rewards.graders import grader_named

sys.path.insert(0, str(Path(__file__).parent))
import answer_forms

BLIND = Path(__file__).with_name("corpus") / "blind" / "blind_answers.jsonl"
KINDS = {"math": "math", "numeric": "math", "choice": "choice", "exact": "exact"}


@cache
def grader(kind: str) -> Grader:
    return grader_named(KINDS[kind])


def blind_rows() -> Iterator[dict[str, Any]]:
    for line in BLIND.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        gold = row["gold"]
        if row["kind"] == "numeric" and "####" in gold:
            gold = gold.rpartition("####")[2].strip().replace(",", "")
        yield row | {"task": {"question": row["question"], "answer": gold, "choices": row.get("choices")}}


def developed_rows() -> Iterator[dict[str, Any]]:
    yield from answer_forms.rows()


def verdicts(rows: Iterator[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, bool]]]:
    graded = [(row, grader(row["kind"]).grade(row["answer"], row["task"])) for row in rows]
    return [(row, grade.metadata["readings"]) for row, grade in graded]


def shown(row: dict[str, Any]) -> str:
    return f"{row['kind']}, {row['form']}: {row['answer'][-120:]!r} to {row['task']['answer']!r}"


def wrong_ones_paid(judged: list[tuple[dict[str, Any], dict[str, bool]]]) -> list[str]:
    return [shown(row) for row, paid in judged if not row["right"] and any(paid.values())]


def test_of_answers_that_a_stranger_wrote_no_wrong_one_is_paid_and_few_right_ones_are_not() -> None:
    judged = verdicts(blind_rows())
    unpaid = {
        "lenient": [shown(row) for row, paid in judged if row["right"] and not paid["lenient"]],
        "strict": [shown(row) for row, paid in judged if row["strict"] and not paid["strict"]],
    }
    assert len(judged) == 500
    assert wrong_ones_paid(judged) == []
    assert len(unpaid["lenient"]) <= 0.02 * sum(row["right"] for row, _ in judged), unpaid["lenient"]
    assert len(unpaid["strict"]) <= 0.05 * sum(row["strict"] for row, _ in judged), unpaid["strict"]


def test_every_form_with_every_value_is_judged_by_its_value() -> None:
    judged = verdicts(developed_rows())
    right = sum(row["right"] for row, _ in judged)
    assert min(right, len(judged) - right) >= 500
    assert wrong_ones_paid(judged) == []
    assert [shown(row) for row, paid in judged if row["right"] and not paid["lenient"]] == []
    assert [shown(row) for row, paid in judged if row["strict"] and not paid["strict"]] == []


def test_the_setting_says_which_reading_is_the_score() -> None:
    text, row = r"It is \boxed{5}, because 2+3=5.", {"answer": "5"}
    for reading, score in (("strict", 0.0), ("lenient", 1.0)):
        grade = grader_named("math", reading=reading).grade(text, row)
        assert (grade.score, grade.is_correct) == (score, bool(score))
        assert grade.metadata["readings"] == {"strict": False, "lenient": True}
    for name in ("math", "choice", "exact"):
        with pytest.raises(
            ConfigError, match=re.escape("`reading` is 'loose'; choose one of strict, lenient.")
        ):
            grader_named(name, reading="loose")


FLOODS = (
    "answer is ",
    "Answer: ",
    "**",
    "wait ",
    "\\boxed{5} and ",
    "$",
    "#### 5\n",
    "A) ",
    "is ",
    "(",
    "1 ",
    "`",
)


def test_a_flood_of_statements_is_read_in_moments() -> None:
    for kind in ("math", "choice", "exact"):
        row = {"answer": "A" if kind == "choice" else "5"}
        for flood in FLOODS:
            begun = time.process_time()
            grader(kind).grade(flood * (100_000 // len(flood)), row)
            assert time.process_time() - begun < 5.0, (kind, flood)
