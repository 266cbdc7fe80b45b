"""A run that goes on has all of its record, and plays the tasks that it began with."""

import shutil
from pathlib import Path
from types import ModuleType
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


SMALL: dict[str, Any] = {"steps": 1, "warm_start": {"steps": 1}, "evaluation": {"num_tasks": 2}}


def test_a_run_with_checkpoints_and_without_its_record_is_refused_and_nothing_of_it_is_lost(
    letters: ModuleType, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    letters.make_trainer(stopped, SMALL).train()
    (stopped / "summary.json").unlink()
    for name in ("store.sqlite", "metrics.jsonl", "config.json"):
        run = tmp_path / name
        shutil.copytree(stopped, run)
        (run / name).unlink()
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "lock"}
        with pytest.raises(ConfigError, match=f"checkpoints .*{name}"):
            letters.make_trainer(run, SMALL).train()
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "lock"} == before
    (stopped / "store.sqlite").unlink()
    EpisodeStore.open(stopped / "store.sqlite").close()
    with pytest.raises(ConfigError, match="episodes"):
        letters.make_trainer(stopped, SMALL).train()


def test_a_supervised_run_without_its_record_is_refused_as_well(chats: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "run"
    chats.make_trainer(run, {"epochs": 1}).train()
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"checkpoints .*metrics\.jsonl"):
        chats.make_trainer(run, {"epochs": 1}).train()
    assert list((run / "checkpoints").iterdir())


def test_auto_and_what_it_comes_to_are_one_data_type(letters: ModuleType, tmp_path: Path) -> None:
    """Runs from before `auto` have `float32` in their record."""
    run = tmp_path / "run"
    letters.make_trainer(run, SMALL | {"model": {"dtype": "float32"}}).train()
    letters.make_trainer(run, SMALL).train()
    with pytest.raises(ConfigError, match=r"model\.dtype: 'float32' there, 'bfloat16' here"):
        letters.make_trainer(run, SMALL | {"model": {"dtype": "bfloat16"}}).train()
