"""Pairs of a right answer and what a model wrote, labelled before any grader saw them.

corpus/pairs/*.jsonl: {"id", "kind", "gold", "answer", "label", "question"?, "choices"?}
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rllm.rewards.grade import Grade
from rllm.rewards.graders import grader_named
from rllm.rewards.parallel_grading import grade_many

sys.path.insert(0, str(Path(__file__).parent))
from code_answers import open_grader

PAIRS = sorted(Path(__file__).with_name("corpus").glob("pairs/*.jsonl"))
KINDS = ("math", "choice", "code", "schema")
MOST_UNPAID = 0.03


def pairs_of(kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for path in PAIRS for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == kind]


def task_of(pair: dict[str, Any]) -> dict[str, Any]:
    if pair["kind"] == "code":
        return pair["gold"]
    if pair["kind"] == "schema":
        return {"schema": pair["gold"]}
    return {"answer": pair["gold"]} | {name: pair[name] for name in ("question", "choices") if name in pair}


def grades_of(kind: str) -> list[tuple[dict[str, Any], bool]]:
    pairs = pairs_of(kind)
    answers = [(pair["answer"], task_of(pair)) for pair in pairs]
    if kind == "code":
        with open_grader() as grader:
            results = grade_many(grader, answers)
    else:
        options = {"reading": "lenient"} if kind in ("math", "choice") else {}
        results = grade_many(grader_named(kind, **options), answers)
    assert all(isinstance(result, Grade) for result in results)
    return [(pair, getattr(result, "is_correct", False)) for pair, result in zip(pairs, results, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_wrong_answer_is_paid_and_few_right_ones_are_not(kind: str) -> None:
    grades = grades_of(kind)
    assert [pair["id"] for pair, is_paid in grades if is_paid and not pair["label"]] == []
    unpaid = [pair["id"] for pair, is_paid in grades if pair["label"] and not is_paid]
    assert len(unpaid) <= MOST_UNPAID * sum(pair["label"] for pair, _ in grades), unpaid


def test_there_are_hundreds_of_pairs_of_every_kind_and_label() -> None:
    for kind in KINDS:
        labels = [pair["label"] for pair in pairs_of(kind)]
        assert min(labels.count(True), labels.count(False)) >= 20, kind
    assert sum(len(pairs_of(kind)) for kind in KINDS) >= 300
