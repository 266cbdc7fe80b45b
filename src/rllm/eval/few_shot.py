"""Worked examples before each question: rows of another split than the measured one.

train (else validation) rows ──seed──► N places ──► question and right answer, as messages or as questions
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllm.data.questions import Question
from rllm.errors import ConfigError
from rllm.eval.catalogue import Benchmark
from rllm.eval.tasks import benchmark_rows, kept_places, question_of_row, task_of_row
from rllm.types.draws import draw_seed

SOURCES = ("train", "validation")
"""Splits that examples come from, the first that there is. Never `test`."""


def example_split(benchmark: Benchmark, eval_split: str) -> str:
    """The split that examples come from. Raises ConfigError where only the measured split exists."""
    measured_rows = benchmark.splits[eval_split].published
    for name in SOURCES:
        if (
            name in benchmark.splits
            and name != eval_split
            and benchmark.splits[name].published != measured_rows
        ):
            return name
    raise ConfigError(
        f"--few-shot takes examples from {' or '.join(SOURCES)}, and `{benchmark.name}` has "
        f"{', '.join(benchmark.splits)}, of which {eval_split} is measured; leave it out."
    )


def example_places(benchmark: Benchmark, eval_split: str, count: int, seed: int) -> tuple[str, list[int]]:
    """(split, places of the rows of so many examples), by the seed. Raises ConfigError for too few rows."""
    split = example_split(benchmark, eval_split)
    places = kept_places(benchmark, benchmark_rows(benchmark, split))
    if count > len(places):
        raise ConfigError(f"--few-shot is {count}, and {split} of `{benchmark.name}` has {len(places)} rows.")
    rng = np.random.default_rng(draw_seed(seed, "few-shot", split))
    return split, [places[number] for number in rng.permutation(len(places))[:count]]


def example_questions(benchmark: Benchmark, eval_split: str, count: int, seed: int) -> list[Question]:
    """Examples as questions with their right answers."""
    split, places = example_places(benchmark, eval_split, count, seed)
    rows = benchmark_rows(benchmark, split)
    return [question_of_row(benchmark, split, place, rows[place]) for place in places]


def with_examples(
    tasks: Sequence[Mapping[str, Any]], benchmark: Benchmark, eval_split: str, count: int, seed: int
) -> list[dict[str, Any]]:
    """Tasks whose question stands behind `count` worked examples, each a question of the user and its answer.

    Raises ConfigError for an example without a right answer.
    """
    split, places = example_places(benchmark, eval_split, count, seed)
    rows = benchmark_rows(benchmark, split)
    examples: list[dict[str, Any]] = []
    for place in places:
        example = task_of_row(benchmark, split, place, rows[place])
        if example["oracle"] is None:
            raise ConfigError(
                f"--few-shot shows right answers, and row {place} of {split} of `{benchmark.name}` has none; "
                "leave it out."
            )
        examples += [_task_messages(example)[-1], {"role": "assistant", "content": example["oracle"]}]
    return [_behind(task, examples) for task in tasks]


def _behind(task: Mapping[str, Any], examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = _task_messages(task)
    num_system = int(own[0]["role"] == "system")
    others = {name: value for name, value in task.items() if name != "question"}
    return {**others, "messages": [*own[:num_system], *examples, *own[num_system:]]}


def _task_messages(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    return task.get("messages") or [{"role": "user", "content": task["question"]}]
