"""The arguments that tasks of a world share: every mixture of them, and rows completed by them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, overload

from rllm.types.task import Task


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
