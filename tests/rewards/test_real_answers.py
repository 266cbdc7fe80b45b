"""Answers that two pretrained models gave to built-in tasks, with the label of a reader: corpus/real.

No wrong one is paid under any reading, and at most 2 % of the right ones are refused.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rllm.environments.worlds import world_named
from rllm.rewards.graders import grader_named

CORPUS = Path(__file__).with_name("corpus") / "real" / "answers.jsonl"
REASONING_GYM = "reasoning-gym/"


@cache
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CORPUS.read_text().splitlines()]


def is_paid(row: Mapping[str, Any], reading: str) -> bool:
    if row["task"].startswith(REASONING_GYM):
        return is_paid_by_reasoning_gym(row)
    if row["task"] == "countdown":
        return grader_named("countdown").grade(row["answer"], row).is_correct
    task = {"answer": row["gold"], "question": row["question"]}
    return grader_named("exact", reading=reading).grade(row["answer"], task).is_correct


def is_paid_by_reasoning_gym(row: Mapping[str, Any]) -> bool:
    """Of which there is one reading."""
    dataset = row["task"].removeprefix(REASONING_GYM)
    task = {"dataset": dataset, "split": "train", "index": row["index"], **row.get("args", {})}
    env: Any = world_named(row["task"]).env_class.from_dict(task)
    digest = hashlib.sha256(env.reset()[0].encode()).hexdigest()
    assert digest.startswith(row["question_sha256"]), f"{row['task']} {row['index']} is another question"
    return env.step(row["answer"])[1] == 1.0


@pytest.mark.parametrize(("reading", "most_refused"), [("strict", 0.02), ("lenient", 0.02)])
def test_what_models_answer_is_graded_as_a_reader_does(reading: str, most_refused: float) -> None:
    pytest.importorskip("reasoning_gym")
    judged = [(row, is_paid(row, reading)) for row in rows()]
    assert [row for row, paid in judged if paid and not row["right"]] == []
    refused = [row["answer"] for row, paid in judged if row["right"] and not paid]
    assert len(refused) <= most_refused * sum(row["right"] for row in rows()), refused


def test_the_corpus_is_large_and_of_both_models_and_all_kinds_of_tasks() -> None:
    assert len(rows()) >= 1_500
    assert sum(row["right"] for row in rows()) >= 150
    assert {row["model"] for row in rows()} == {"smollm2-135m-instruct", "gemma3-270m"}
    tasks = {row["task"] for row in rows()}
    assert {"arithmetic", "word-problems", "countdown"} <= tasks
    assert len(tasks) >= 95


SAYS_25 = (
    *("57 - 32 = 25", "57 - 32 = 25.", "The answer is 57 - 32 = 25.", "Output: 25", "Output: 57 - 32 = 25"),
    *("57-32=25", "$57 - 32 = 25$", "**57 - 32 = 25**", r"\boxed{57 - 32 = 25}", "57 − 32 = 25"),
    *("57 - 32 equals 25.", "<answer>57 - 32 = 25</answer>", "The difference of 57 and 32 is 25."),
    *("57 - 32 = 25\n\nThat was easy.", "57 - 32 = 20 + 5 = 25", "So, 57 - 32 = 25."),
)
SAYS_NOT_25 = (
    *("57 - 33 = 25", "57 - 32 = 24", "not 25", "5 = 25", "25 = 25", "I guess 57 - 32 = 25"),
    *("57 - 32 = 25 or 24", "57 - 32 = 25. Wait, that is wrong.", "It is not true that 57 - 32 = 25."),
    *(
        "57 - 32 = 25\n57 - 32 = 24",
        "57 - 32 = 25\n\nThis is 42.",
        "25 is a classic number.",
        "57 - 32 = 25 = 26",
    ),
    *("1. 57\n2. 32\n25.", "#### 25\n####", "157 - 32 = 25", "57 - 32 * 2 = 25"),
)


def test_an_equation_is_read_by_its_result_and_only_where_it_is_true(subtests: pytest.Subtests) -> None:
    task = {"answer": "25", "question": "57 - 32 ="}
    for reading in ("strict", "lenient"):
        grader = grader_named("exact", reading=reading)
        for answers, is_right in ((SAYS_25, True), (SAYS_NOT_25, False)):
            for answer in answers:
                with subtests.test(answer=answer, reading=reading):
                    assert grader.grade(answer, task).is_correct is is_right


def test_a_counted_thing_is_the_one_that_was_asked_for(subtests: pytest.Subtests) -> None:
    task = {"answer": "13", "question": "Lena has 5 shells and Igor has 8. How many shells do they have?"}
    for answer, is_right in (
        ("So, there are 13 shells in total.", True),
        ("They have 13 shells together.", True),
        ("So, Lena has 13 boxes.", False),
        ("So, Lena has 13 shells and Igor has 8 shells.", False),
        ("So, Lena has 13", False),
    ):
        with subtests.test(answer=answer):
            assert grader_named("exact", reading="lenient").grade(answer, task).is_correct is is_right
