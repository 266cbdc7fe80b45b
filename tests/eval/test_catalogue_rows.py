"""Every hosted benchmark on small rows of its published schema, which we wrote ourselves.

rows/NAME.jsonl ──transform, prompt──► tasks ──► the right answer scores 1, junk 0, and nothing else happens
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rllm.data.rows import read_rows
from rllm.environments.single_turn import SingleTurnEnvironment
from rllm.errors import ConfigError
from rllm.eval.catalogue import Benchmark, benchmark_named, benchmarks
from rllm.eval.tasks import benchmark_world, task_of_row
from rllm.rewards.grade import Grader
from rllm.rewards.graders import grader_named
from rllm.sandbox.backends import BACKENDS, require_backend

ROWS = Path(__file__).parent / "rows"
HOSTED = [each.name for each in benchmarks() if not each.offline and each.asks_questions]
ELSEWHERE = ("judge", "swebench")
"""Graders whose verdict is a model's or a container's; tests/rewards has their judgements."""
JUNK = ("", "I do not know.", "<answer>nonsense</answer>", "\\boxed{nonsense}", "<think>\\boxed{1}")


def cases(name: str) -> list[tuple[dict[str, Any], str | None]]:
    """(row, right answer where the row itself has none)."""
    return [(each["row"], each.get("oracle")) for each in read_rows(ROWS / f"{name}.jsonl")]


def tasks(benchmark: Benchmark) -> list[dict[str, Any]]:
    made = []
    for number, (row, oracle) in enumerate(cases(benchmark.name)):
        task = task_of_row(benchmark, benchmark.eval_split, number, row)
        made.append(task if oracle is None else {**task, "oracle": oracle})
    return made


@cache
def grader_of(name: str, arguments: str) -> Grader:
    options = json.loads(arguments)
    if name == "code":
        usable = [each for each in ("bubblewrap", "unshare") if each in BACKENDS and is_here(each)]
        if not usable:
            pytest.skip("no sandbox for code on this machine")
        options["sandbox"] = usable[0]
    if name == "equality":  # an answer that is the reference, or none, is judged without its model
        options |= {"base_url": "http://127.0.0.1:9/v1", "model": "nobody"}
    return grader_named(name, **options)


def is_here(backend: str) -> bool:
    try:
        require_backend(backend)
    except ConfigError:
        return False
    return True


def test_every_hosted_benchmark_has_rows_of_its_schema() -> None:
    assert [name for name in HOSTED if not (ROWS / f"{name}.jsonl").is_file()] == []


def test_rows_become_tasks_that_an_environment_shows(subtests: pytest.Subtests) -> None:
    for name in HOSTED:
        with subtests.test(name=name):
            benchmark = benchmark_named(name)
            made = tasks(benchmark)
            assert made == tasks(benchmark)
            assert len({task["task_id"] for task in made}) == len(made)
            for task in made:
                shown = task.get("question") or task["messages"][-1]["content"]
                text = shown if isinstance(shown, str) else shown[-1]["text"]
                assert text.strip()
                assert not re.search(r"\{\{\w+\}\}", text)
                json.dumps(task)


def test_the_right_answer_scores_one_and_junk_scores_nothing(subtests: pytest.Subtests) -> None:
    for name in HOSTED:
        with subtests.test(name=name):
            benchmark = benchmark_named(name)
            if benchmark.evaluator in ELSEWHERE:
                pytest.skip(f"`{benchmark.evaluator}` grades it, which is tested where it lives")
            grader = grader_of(benchmark.evaluator, json.dumps(benchmark.evaluator_args))
            for task in tasks(benchmark):
                assert task["oracle"] is not None
                right = grader.grade(task["oracle"], task["grading"])
                assert (right.score, right.is_correct) == (1.0, True), (right, task["oracle"])
                for junk in JUNK if benchmark.evaluator != "equality" else ("", "<think>\\boxed{1}"):
                    found = grader.grade(junk, task["grading"])
                    assert not found.is_correct, (junk, found)
                    assert found.score < 0.1 or benchmark.evaluator == "translation", (junk, found)


@pytest.mark.parametrize("name", ["gsm8k", "mmlu", "boolq", "squad", "nq"])
def test_the_environment_pays_what_the_grader_says(name: str) -> None:
    task = tasks(benchmark_named(name))[0]
    environment = SingleTurnEnvironment.from_dict(task)
    observation, _ = environment.reset()
    assert observation == task["question"]
    assert environment.step(task["oracle"])[1] == 1.0


def test_the_turns_of_a_conversation_are_asked_one_after_the_other() -> None:
    benchmark = benchmark_named("multi-if")
    environment = benchmark_world(benchmark).env_class.from_dict(tasks(benchmark)[0])
    assert environment.reset()[0] == "Write about the sea."
    assert environment.step("The sea, and more of it.")[:3] == ("Use no commas.", 0.5, False)
    observation, reward, done, info = environment.step("The sea.")
    assert (observation, reward, done, info["is_correct"]) == ({}, 0.5, True, True)


def test_a_row_that_lacks_a_field_is_named_by_number_and_field(subtests: pytest.Subtests) -> None:
    for name in HOSTED:
        with subtests.test(name=name):
            benchmark = benchmark_named(name)
            row = cases(name)[0][0]
            with pytest.raises(ConfigError) as caught:
                task_of_row(benchmark, benchmark.eval_split, 17, {"unrelated": 1})
            assert re.match(rf"{re.escape(name)} \({benchmark.eval_split}\): row 17 ", str(caught.value))
            refused = [
                column
                for column in row
                if is_refused(benchmark, {key: row[key] for key in row if key != column})
            ]
            assert refused


def is_refused(benchmark: Benchmark, row: dict[str, Any]) -> bool:
    """Whether a row lacks what its question needs; an error of another kind flies."""
    try:
        task_of_row(benchmark, benchmark.eval_split, 17, row)
    except ConfigError:
        return True
    return False
