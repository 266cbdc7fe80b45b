"""Dataset rows ──► Tasks: an id, an instruction, and the row itself for whoever judges."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

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


def argument_mixtures(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All ways to take one value of each argument that is a list; the last argument changes fastest."""
    choices = [value if isinstance(value, list) else [value] for value in arguments.values()]
    return [dict(zip(arguments, values, strict=True)) for values in itertools.product(*choices)]


def with_defaults(tasks: Sequence[Any], defaults: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
    """The tasks, each with what it does not say itself; `defaults` are gone through in turn, task by task."""
    return _Completed(tasks, defaults) if any(defaults) else tasks


class _Completed(Sequence[dict[str, Any]]):
    """Rows that are put together when somebody looks at them: a task may be drawn only then."""

    def __init__(self, tasks: Sequence[Any], defaults: Sequence[Mapping[str, Any]]) -> None:
        self._tasks = tasks
        self._defaults = defaults

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        task = self._tasks[place]
        row = task.to_row() if isinstance(task, Task) else task
        return {**self._defaults[place % len(self._defaults)], **row}
