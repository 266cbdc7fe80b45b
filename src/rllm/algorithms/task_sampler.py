"""The order of tasks as a pure function of (seed, position): a resumed run asks for the same tasks again."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rllm.errors import ConfigError
from rllm.types.draws import draw_seed
from rllm.types.task import Task

AnyTask = TypeVar("AnyTask", Task, dict[str, Any])


class TaskSampler(Generic[AnyTask]):
    """Walks through all tasks in a shuffled order, then through all of them again in another one."""

    def __init__(self, tasks: Sequence[AnyTask], *, seed: int, purpose: str) -> None:
        if not tasks:
            raise ConfigError("There are no training tasks; give at least one.")
        self._tasks = tasks
        self._seed = seed
        self._purpose = purpose
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def batch(self, position: int, count: int) -> list[AnyTask]:
        """`count` tasks from `position` (in tasks, counted from the start of the run)."""
        return [self._at(index) for index in range(position, position + count)]

    def _at(self, index: int) -> AnyTask:
        epoch, place = divmod(index, len(self._tasks))
        number = int(self._order(epoch)[place])
        task = self._tasks[number]
        # Two visits of one task within a step stay two groups: their attempts had different weights or draws.
        if epoch == 0:
            return task
        if isinstance(task, Task):
            return replace(task, id=f"{task.id}@{epoch}")
        return {**task, "task_id": f"{task.get('task_id', number)}@{epoch}"}

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng(draw_seed(self._seed, self._purpose, epoch)).permutation(
            len(self._tasks)
        )
