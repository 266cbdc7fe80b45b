"""A run that goes on plays the tasks that it began with."""

from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.store.episodes import EpisodeStore
from rllm.trainer.resuming import require_same_tasks
from rllm.types.task import Task

ROWS: list[dict[str, Any]] = [{"task_id": str(number), "letter": "abc"[number % 3]} for number in range(50)]


def _with(tasks: list[Any]) -> dict[str, list[Any]]:
    return {"training": tasks, "held-out": [Task(id="h", instruction="say a")]}


def test_the_same_tasks_are_the_same_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        with EpisodeStore.open(tmp_path / "store.sqlite") as store:
            require_same_tasks(store, _with([dict(row) for row in ROWS]))


@pytest.mark.parametrize(
    "changed",
    [
        ROWS[:-1],
        [*ROWS[1:], ROWS[0]],
        [{**ROWS[0], "letter": "z"}, *ROWS[1:]],
        [Task(id="0", instruction="say a"), *ROWS[1:]],
    ],
    ids=["one less", "another order", "another letter", "another kind"],
)
def test_other_tasks_are_refused_by_what_they_are_for(tmp_path: Path, changed: list[Any]) -> None:
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        require_same_tasks(store, _with(ROWS))
        with pytest.raises(ConfigError, match="other training tasks"):
            require_same_tasks(store, _with(changed))
