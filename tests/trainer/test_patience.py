"""Evaluations between: on what, how often, and when they end a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.eval.words import compared_sentence
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.patience import Patience
from rllm.trainer.replay import replay

STANDING_STILL = {
    "steps": 9,
    "warm_start": {"steps": 0},
    "optimizer": {"learning_rate": 1e-12},
    "evaluation": {"every_steps": 1, "patience": 2},
    "checkpoint": {"every_steps": 2},
}


def validated(run: Path) -> list[int]:
    """Steps after which the run was evaluated."""
    lines = read_metrics(run / "metrics.jsonl")
    return [line["step"] + 1 for line in lines if "heldout_success" in line]


class Stopping:
    """A tracker that breaks off at a step, as a machine may."""

    def __init__(self, at: int) -> None:
        self.at = at

    def begin(self, phase: str) -> None: ...
    def advance(self, done: int, total: int) -> None: ...
    def close(self) -> None: ...
    def log(self, step: int, phase: str, metrics: Mapping[str, Any]) -> None:
        if (phase, step) == ("train", self.at):
            raise OSError("the machine is gone")


def test_the_curve_has_its_interval(letters: ModuleType, tmp_path: Path) -> None:
    letters.make_trainer(tmp_path / "run", {"steps": 1, "evaluation": {"every_steps": 1}}).train()
    (line,) = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "train"]
    for name in ("heldout_success", "heldout_greedy"):
        assert line[f"{name}_low"] <= line[name] <= line[f"{name}_high"]
        assert line[f"{name}_low"] < line[f"{name}_high"]


def without_seconds(summary: Mapping[str, Any]) -> dict[str, Any]:
    """As `summary.json` holds it, without what was measured of the machine."""
    kept = {name: value for name, value in summary.items() if not name.endswith(("_s", "machines"))}
    return json.loads(json.dumps(kept))


def test_a_flat_run_ends_early_and_one_that_broke_off_ends_at_the_same_step(
    letters: ModuleType, tmp_path: Path
) -> None:
    changes = STANDING_STILL
    whole = letters.make_trainer(tmp_path / "whole", changes).train()
    assert whole.summary["ended_early_after"] == 3, "the first sets the mark, and two more show no gain"
    assert validated(tmp_path / "whole") == [1, 2, 3]
    again = letters.make_trainer(tmp_path / "whole", changes).train()
    assert without_seconds(again.summary) == without_seconds(whole.summary)
    run = tmp_path / "broken"
    with pytest.raises(OSError, match="the machine is gone"):
        letters.make_trainer(run, changes, tracker=Stopping(1)).train()
    assert RunDirectory.read(run).summary() is None
    resumed = letters.make_trainer(run, changes).train()
    assert without_seconds(resumed.summary) == without_seconds(whole.summary)
    assert validated(run) == [1, 2, 3]
    replayed = replay(letters.make_trainer(run, changes).run)
    assert replayed.is_identical, "the steps that were never taken are none of the run"
    assert replayed.num_train_steps == 3


def test_a_gain_is_one_that_the_interval_of_the_pairs_shows() -> None:
    tasks = [str(place) for place in range(40)]
    instances = {task: task for task in tasks}
    patience = Patience()
    for solved, flat in ((10, 0), (12, 1), (11, 2), (20, 0), (20, 1), (40, 0)):
        patience.note({task: float(int(task) < solved) for task in tasks}, instances)
        assert patience.flat == flat, solved
    assert Patience(**json.loads(json.dumps(patience.state()))) == patience


def test_a_gain_shows_where_some_tasks_failed_and_nothing_is_said_where_all_did() -> None:
    tasks = [str(place) for place in range(40)]
    instances = {task: task for task in tasks}
    patience = Patience()
    for values, flat in (
        (dict.fromkeys(tasks, 0.0), 0),
        (dict.fromkeys(tasks[:20], 1.0), 0),
        ({}, 1),
        (dict.fromkeys(tasks[20:], 1.0), 2),
    ):
        patience.note(values, instances)
        assert patience.flat == flat


def test_a_slow_rise_is_not_flat() -> None:
    """Two tasks more each time: no two neighbours differ for certain, and the curve goes on."""
    tasks = [str(place) for place in range(64)]
    patience, longest = Patience(), 0
    for solved in range(0, 64, 2):
        patience.note({task: float(int(task) < solved) for task in tasks}, {task: task for task in tasks})
        longest = max(longest, patience.flat)
    assert longest <= 2


def test_a_run_is_evaluated_ten_times_unless_told_otherwise() -> None:
    periods = [load_config([f"steps={steps}"]).evaluation_period for steps in (7, 100, 125)]
    assert periods == [1, 10, 13]
    assert load_config(["steps=100", "evaluation.every_steps=0"]).evaluation_period == 0
    assert load_config(["steps=100", "evaluation.every_steps=7"]).evaluation_period == 7


def test_patience_without_evaluations_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`evaluation.patience` is 3, but `evaluation.every_steps` is 0"):
        load_config(["evaluation.patience=3", "evaluation.every_steps=0"])


def test_what_is_reported_is_never_what_is_evaluated_between(letters: ModuleType, tmp_path: Path) -> None:
    tasks = letters.TASKS
    twin = [{**task, "task_id": f"twin-{task['letter']}"} for task in tasks]
    one = letters.make_trainer(
        tmp_path / "run", val_dataset=tasks[:4], validation_dataset=[*twin[:2], *twin[5:6]]
    )
    assert [task["letter"] for task in one.tasks.validation] == ["F"], "another name is no other task"
    spare = letters.make_trainer(tmp_path / "run", val_dataset=tasks, validation_dataset=None)
    assert [task["letter"] for task in spare.tasks.validation] == ["E", "F"], (
        "what is beyond the reported ones"
    )
    unset = {"evaluation": {"num_tasks": 4, "every_steps": -1}}
    none = letters.make_trainer(tmp_path / "run", unset, val_dataset=tasks[:4], validation_dataset=None)
    assert list(none.tasks.validation) == []
    with pytest.raises(ConfigError, match=r"`evaluation.every_steps` is 2, .*validation"):
        letters.make_trainer(tmp_path / "run", val_dataset=tasks[:4], validation_dataset=None)
    with pytest.raises(ConfigError, match="all 4 "):
        letters.make_trainer(tmp_path / "run", val_dataset=tasks[:4], validation_dataset=twin[:4])


def test_a_world_too_small_for_two_sets_of_one_split_evaluates_on_what_is_not_reported(
    tmp_path: Path,
) -> None:
    """Hanoi's validation split: 32 tasks are reported, and none of their positions is watched."""
    settings = ("evaluation.split=validation", "evaluation.num_tasks=32", "evaluation.every_num_tasks=16")
    run = build_run(training_config("hanoi", None, (*settings, "steps=10")), tmp_path / "run")
    assert run.tasks.world is not None
    reported, watched = (
        {run.tasks.world.identity(task) for task in tasks}
        for tasks in (run.tasks.heldout, run.tasks.validation)
    )
    assert len(run.tasks.heldout) == 32
    assert watched
    assert not reported & watched


def test_rows_that_are_trained_on_are_not_called_held_out(
    letters: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = letters.TASKS
    for train, title, count in (
        (tasks, "training tasks", 4),
        (tasks[4:], "held-out tasks", 0),
        (tasks[3:], "tasks, 1 of them training tasks", 1),
    ):
        facts = letters.make_trainer(tmp_path / "run", train_dataset=train).tasks.facts()
        assert (facts.title, len(facts.trained_on)) == (title, count)
        assert facts.num_compared == facts.num_train == len(train)
        assert compared_sentence(facts.to_dict()) == ""
    assert "such as say-D" in caplog.text
    assert len(caplog.records) == 1, "who gives no others knows that they are trained on"


def test_what_is_held_out_says_with_how_many_training_tasks_it_was_compared(tmp_path: Path) -> None:
    """With all that the run draws, unless an instance has to be drawn to be known."""
    small = ("steps=20", "warm_start.steps=4", "evaluation.num_tasks=8", "rollout.tasks_per_step=32")
    for name, compared in (("arithmetic", 640), ("hanoi", 256)):
        run = build_run(training_config(name, None, small), tmp_path / name)
        counts = run.tasks.facts().to_dict()
        assert (counts["train_tasks"], counts["train_tasks_compared"]) == (640, compared)
        assert ("256 of the 640" in compared_sentence(counts)) == (compared < 640)


def test_no_more_episodes_are_evaluated_than_trained_on() -> None:
    words = ["steps=8", "rollout.tasks_per_step=8", "rollout.group_size=8", "evaluation.every_num_tasks=64"]
    assert load_config(words).evaluation_period == 2  # 64 episodes a step, and 64 tasks, sampled and greedy
