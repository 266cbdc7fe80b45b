"""A run that goes on has all of its record, and plays the tasks that it began with."""

import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rllm.config.optimizer import OptimizerConfig
from rllm.errors import ConfigError
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.backends import torch_muon
from rllm.trainer.checkpoint import RunState
from rllm.trainer.resuming import (
    go_back_to,
    keep_muon_dtype,
    require_same_tasks,
    settle_muon_dtype,
    take_back,
)
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
        [ROWS[0], {**ROWS[1], "letter": "z"}, *ROWS[2:]],
        [Task(id="0", instruction="say a"), *ROWS[1:]],
    ],
    ids=["one less", "another order", "another letter", "another second letter", "another kind"],
)
def test_other_tasks_are_refused_by_what_they_are_for(tmp_path: Path, changed: list[Any]) -> None:
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        require_same_tasks(store, _with(ROWS))
        with pytest.raises(ConfigError, match="other training tasks"):
            require_same_tasks(store, _with(changed))


def test_values_that_no_json_holds_count_by_their_kind(tmp_path: Path) -> None:
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        require_same_tasks(store, _with([{"task_id": "a", "grader": object()}]))
        require_same_tasks(store, _with([{"grader": object(), "task_id": "a"}]))
        with pytest.raises(ConfigError, match="other training tasks"):
            require_same_tasks(store, _with([{"task_id": "a", "grader": {1}}]))


LOGGED = [
    ("untrained", 0),
    *(("warm_start", step) for step in range(3)),
    ("before", 0),
    *(("train", step) for step in range(4)),
    ("after", 0),
]


@pytest.mark.parametrize(
    ("warm_steps", "steps", "reports", "num_left"),
    [
        (0, 0, (), 0),
        (0, 0, ("untrained",), 1),
        (2, 0, ("untrained",), 3),
        (3, 0, ("untrained",), 4),
        (3, 0, ("untrained", "before"), 5),
        (3, 2, ("untrained", "before"), 7),
        (3, 4, ("untrained", "before"), 9),
        (3, 4, ("untrained", "before", "after"), 10),
    ],
)
def test_what_was_logged_beyond_a_checkpoint_is_taken_back(
    tmp_path: Path, warm_steps: int, steps: int, reports: tuple[str, ...], num_left: int
) -> None:
    directory: Any = SimpleNamespace(metrics_path=tmp_path / "metrics.jsonl", checkpoints_path=tmp_path)
    state = RunState(warm_steps=warm_steps, steps=steps, reports={each: {} for each in reports})
    take_back(directory, state)
    assert not directory.metrics_path.exists()
    lines = [json.dumps({"phase": phase, "step": step}) for phase, step in LOGGED]
    directory.metrics_path.write_text("\n".join(lines) + "\n")
    rolled_back: list[int] = []
    store: Any = SimpleNamespace(count=lambda: 1, rollback_to=rolled_back.append)
    go_back_to(directory, store, state, keep=2)
    left = [(each["phase"], each["step"]) for each in read_metrics(directory.metrics_path)]
    assert left == LOGGED[:num_left]
    assert rolled_back == [steps - 1]
    empty: Any = SimpleNamespace(count=lambda: 0, rollback_to=rolled_back.append, path="store")
    if reports:
        with pytest.raises(ConfigError, match="store is empty"):
            go_back_to(directory, empty, state, keep=2)
    else:
        go_back_to(directory, empty, state, keep=2)


def test_the_precision_of_muon_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_muon, "faster_dtype", lambda device: f"the fastest of {device}")
    chosen = OptimizerConfig(name="muon", muon_dtype="auto")
    settle_muon_dtype(chosen, "cuda:1")
    assert chosen.muon_dtype == "the fastest of cuda"
    for name, dtype in (("muon", "float32"), ("adamw", "auto")):
        optimizer = OptimizerConfig(name=name, muon_dtype=dtype)
        settle_muon_dtype(optimizer, "cpu")
        assert optimizer.muon_dtype == dtype
    again = OptimizerConfig(name="muon", muon_dtype="auto")
    keep_muon_dtype(chosen, again)
    assert again.muon_dtype == chosen.muon_dtype
    for name, dtype in (("muon", "float32"), ("adamw", "auto")):
        other = OptimizerConfig(name=name, muon_dtype=dtype)
        keep_muon_dtype(chosen, other)
        assert other.muon_dtype == dtype


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
