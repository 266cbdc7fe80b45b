"""`DatasetRegistry` of published programs: ours, and the rows of benchmarks that make their tasks themselves.

load_dataset("gsm8k", "train")      the rows that were registered or pulled; None where there are none
load_dataset("countdown", "train")  registered ones, else tasks of our world, under published keys too
"""

from typing import Any

from rllm.data.dataset import Dataset
from rllm.data.published_names import own_name
from rllm.data.registry import DatasetRegistry

NUM_TRAIN_ROWS, NUM_OTHER_ROWS = 4096, 512
"""Rows of a split of a world, which has no end: of `train`, and of each other one."""


class PublishedRegistry(DatasetRegistry):
    """The same data sets on the same disk."""

    @classmethod
    def load_dataset(cls, name: str, split: str = "default") -> Dataset | None:
        rows = DatasetRegistry.load_dataset(name, split)
        return _rows_made_here(name, split) if rows is None else rows


def _rows_made_here(name: str, split: str) -> Dataset | None:
    # The catalogue is read for a name that nobody registered, not for every program that has a registry.
    from rllm.eval.catalogue import FOLLOW_UPS, SWE, TASK_DIRECTORY, benchmark_named, benchmark_names
    from rllm.eval.tasks import benchmark_tasks

    own = own_name(name, benchmark_names())
    if own is None:
        return None
    benchmark = benchmark_named(own)
    has_rows = benchmark.environment in (FOLLOW_UPS, SWE, TASK_DIRECTORY)
    if benchmark.source is not None or has_rows or split not in benchmark.splits:
        return None
    tasks = benchmark_tasks(benchmark, split, NUM_TRAIN_ROWS if split == "train" else NUM_OTHER_ROWS)
    return Dataset([_published_row(own, each) for each in tasks], name, split)


def _published_row(name: str, task: dict[str, Any]) -> dict[str, Any]:
    """A task with the keys that published preparations leave, where they have names of their own."""
    if name != "countdown":
        return task
    numbers, target = list(task["numbers"]), task["target"]
    question = (
        f"Using the numbers {numbers}, each exactly once, with + - * / and brackets, make {target}. "
        "End with the expression in <answer> </answer>."
    )
    facts = {"nums": numbers, "ground_truth": str(target), "data_source": "countdown"}
    return {**task, "question": question, **facts}
