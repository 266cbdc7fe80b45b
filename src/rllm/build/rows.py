"""`--dataset` ──► the rows that programs and workflows work on.

rows.jsonl, rows.csv, rows.parquet   ──► its rows
mine                                 ──► a registered data set: the split that is asked for
mine=3,rows.jsonl=1                  ──► both, three rows of the one for each of the other
benchmark:gsm8k                      ──► the tasks of a benchmark, which name their grader
verifiers:gsm8k                      ──► the tasks that a program of another library brings
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm.data.mixture import mix, parse_mixture
from rllm.data.registry import DatasetRegistry, require_dataset
from rllm.data.rows import FORMATS, read_rows
from rllm.errors import ConfigError
from rllm.eval.catalogue import Benchmark, benchmark_named
from rllm.eval.tasks import benchmark_world
from rllm.integrations.task_programs import is_task_program, task_program
from rllm.types.task import Task, tasks_of

BENCHMARK = "benchmark:"
"""The prefix of a data set's name that stands for a benchmark's tasks."""
HELD_OUT = ("test", "validation")
MOST_DRAWN = 10_000
"""Tasks that a program trains on, of a world that draws as many as one likes."""


def training_rows(dataset: str) -> list[Task]:
    """Rows to train on: of names with splits, `train`; of a mixture, each of its sets by its weight."""
    weights = mixture_of(dataset)
    if not weights:
        return _named_rows(dataset, "train", MOST_DRAWN)
    return mix({name: _named_rows(name, "train", MOST_DRAWN) for name in weights}, weights)


def mixture_of(dataset: str) -> dict[str, float]:
    """Set -> weight, of several data sets; empty for one."""
    is_one = Path(dataset).exists() or is_task_program(dataset)
    return {} if is_one else parse_mixture(dataset)


def held_out_rows(dataset: str, most: int) -> list[Task]:
    """The tasks that are measured on: of names with splits, `test` or else `validation`; `most` of an endless
    one."""
    return _named_rows(dataset, _held_out_split(dataset), most)


def validation_rows(dataset: str, most: int, *, start: int) -> list[Task] | None:
    """The tasks that are evaluated on while training, of names whose `test` is measured on; None where there
    are none. Of a world that draws tasks, `most` from number `start` on."""
    if _held_out_split(dataset) != "test":
        return None
    if dataset.startswith(BENCHMARK):
        spec = benchmark_named(dataset.removeprefix(BENCHMARK))
        return for_programs(benchmark_world(spec).tasks("validation", most, start=start, **spec.task))
    if is_task_program(dataset) or "validation" not in DatasetRegistry.get_dataset_splits(dataset):
        return None
    return _named_rows(dataset, "validation", most)


def held_out_name(dataset: str) -> str:
    """The data set's own name where it holds tasks out, and otherwise nothing."""
    return dataset if not mixture_of(dataset) and _held_out_split(dataset) else ""


def rows_of(dataset: str, split: str) -> list[dict[str, Any]]:
    """The rows of a file, or of a registered data set: of `split`, or what is measured on."""
    if not is_file_name(dataset):
        return list(require_dataset(dataset, split))
    if split:
        raise ConfigError(f"{dataset} is a file and has no splits; leave --split {split} out.")
    return read_rows(Path(dataset))


def is_file_name(dataset: str) -> bool:
    return dataset.endswith(FORMATS) or Path(dataset).exists()


def for_programs(tasks: Sequence[Mapping[str, Any]]) -> list[Task]:
    """A benchmark's tasks as programs take them: told what is asked last; where that comes after other
    messages, `messages` has all."""
    return tasks_of([_with_instruction(task) for task in tasks])


def _named_rows(dataset: str, split: str, most: int) -> list[Task]:
    if is_task_program(dataset):
        return task_program(dataset).tasks(split, most)
    if dataset.startswith(BENCHMARK):
        spec = benchmark_named(dataset.removeprefix(BENCHMARK))
        return for_programs(benchmark_world(spec).tasks(split, most, **spec.task))
    if is_file_name(dataset):
        return tasks_of(read_rows(Path(dataset)), dataset=dataset)
    splits = DatasetRegistry.get_dataset_splits(dataset)
    return tasks_of(require_dataset(dataset, split if split in splits else ""), dataset=dataset)


def _held_out_split(dataset: str) -> str:
    """Empty where there is none, as of files."""
    if mixture_of(dataset):
        raise ConfigError(f"`{dataset:.200}` are several data sets; what is measured on is one.")
    if dataset.startswith(BENCHMARK):
        return _split_of(benchmark_named(dataset.removeprefix(BENCHMARK)))
    if is_task_program(dataset):
        return HELD_OUT[0]
    splits = () if is_file_name(dataset) else DatasetRegistry.get_dataset_splits(dataset)
    return next((each for each in HELD_OUT if each in splits), "")


def _split_of(spec: Benchmark) -> str:
    """A benchmark without held-out rows holds some of `train` out by itself."""
    return next((each for each in HELD_OUT if each in spec.splits), HELD_OUT[0])


def _with_instruction(task: Mapping[str, Any]) -> dict[str, Any]:
    messages = task.get("messages")
    return {"instruction": messages[-1]["content"], **task} if messages else dict(task)
