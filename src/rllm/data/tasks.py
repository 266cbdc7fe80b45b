"""Dataset rows ──► Tasks: an id, an instruction, and the row itself for whoever judges."""

from collections.abc import Iterable, Mapping
from typing import Any

from rllm.errors import ConfigError
from rllm.types.task import Task

ID_FIELDS = ("task_id", "id", "uid")
INSTRUCTION_FIELDS = ("instruction", "question", "prompt", "problem")


def tasks_of(rows: Iterable[Task | Mapping[str, Any]], *, dataset: str = "The dataset") -> list[Task]:
    """Tasks as they are; of a mapping the first id and instruction field that it has.

    A row without an id is named by its position. Raises ConfigError, naming dataset and row, for an id that
    is there twice: attempts at different tasks would be compared with each other.
    """
    tasks = [task_of(row, position, dataset) for position, row in enumerate(rows)]
    first_place: dict[str, int] = {}
    for position, task in enumerate(tasks):
        if task.id in first_place:
            raise ConfigError(
                f"{dataset} has the task id {task.id!r} in row {first_place[task.id]} and in row {position}; "
                "give each task an id of its own."
            )
        first_place[task.id] = position
    return tasks


def task_of(row: Task | Mapping[str, Any], position: int = 0, dataset: str = "The dataset") -> Task:
    if isinstance(row, Task):
        return row
    if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{dataset}: row {position} is {row!r:.80} (a {type(row).__name__}); give Tasks or dicts."
        )
    identity = next((row[name] for name in ID_FIELDS if row.get(name) is not None), position)
    instruction = next((row[name] for name in INSTRUCTION_FIELDS if row.get(name) is not None), "")
    if not isinstance(instruction, str | list):
        raise ConfigError(
            f"{dataset}: the instruction of row {position} is {instruction!r:.80}; "
            "it must be text or a list of content parts."
        )
    return Task(id=str(identity), instruction=instruction, metadata=dict(row))
