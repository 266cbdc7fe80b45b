"""The moments of one run: when it saves, evaluates, stores and may be stopped, and what it says at each."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.numpy import load_file

from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer import loop
from rllm.trainer.record import RunRecord

HELD_OUT = 4
SETTINGS = {
    "warm_start": {"steps": 3},
    "steps": 4,
    "evaluation": {"every_steps": 3},
    "checkpoint": {"every_steps": 2, "keep": 99},
}


@dataclass
class Notebook:
    """A tracker that keeps what it is told, and what the run did in between."""

    path: Path
    progress: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    logged: list[dict[str, Any]] = field(default_factory=list)
    saved: list[tuple[str, int]] = field(default_factory=list)
    sampled: list[tuple[str, float]] = field(default_factory=list)
    whole_at: list[tuple[str, bool]] = field(default_factory=list)
    phase: str = ""

    def begin(self, phase: str) -> None:
        self.phase = phase

    def advance(self, done: int, total: int) -> None:
        self.progress.setdefault(self.phase, []).append((done, total))

    def log(self, step: int, phase: str, metrics: dict[str, Any]) -> None:
        self.logged.append({"step": step, "phase": phase, **metrics})

    def close(self) -> None: ...

    def lines(self, phase: str) -> list[dict[str, Any]]:
        return [each for each in read_metrics(self.path / "metrics.jsonl") if each["phase"] == phase]


@pytest.fixture(scope="module")
def notebook(letters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Notebook:
    run = tmp_path_factory.mktemp("runs") / "run"
    notes = Notebook(run)
    training: list[loop.RunParts] = []
    with pytest.MonkeyPatch.context() as patch:

        def watch(owner: Any, name: str, note: Any) -> None:
            plain = getattr(owner, name)

            def watched(*args: Any, **more: Any) -> Any:
                note(*args)
                return plain(*args, **more)

            patch.setattr(owner, name, watched)

        watch(loop, "report", lambda run, name: training.append(run))
        for each in ("imitate", "learn"):
            watch(loop, each, lambda *args, at=each: notes.whole_at.append((at, training[0].is_whole)))
        watch(loop, "publish", lambda run, rows: notes.whole_at.append(("publish", run.is_whole)))
        watch(
            RunRecord,
            "save_checkpoint",
            lambda record, state, backends: notes.saved.append((notes.phase, state.position)),
        )
        watch(
            loop,
            "evaluate",
            lambda engine, tasks, sampling, purpose, *args: notes.sampled.append(
                (purpose, sampling.temperature)
            ),
        )
        letters.make_trainer(run, SETTINGS, tracker=notes).train()
    return notes


def test_a_run_is_saved_with_each_report_every_so_many_steps_at_both_ends_and_where_it_is_best(
    notebook: Notebook,
) -> None:
    """Positions count the steps of both phases; the only evaluation between is of position 6."""
    warm, trained = [2, 3], [3 + 2, 3 + 3, 3 + 4]
    assert notebook.saved == [
        ("untrained", 0),
        *(("warm_start", each) for each in warm),
        ("before", 3),
        *(("train", each) for each in trained),
        ("after", 7),
    ]


def test_what_is_stopped_in_the_middle_of_a_step_is_not_saved_as_it_is(notebook: Notebook) -> None:
    assert notebook.whole_at == [("imitate", False)] * 3 + [("learn", False), ("publish", False)] * 4


def test_the_optimizer_begins_anew_with_the_phase_of_rewards(notebook: Notebook) -> None:
    """What imitation has collected of gradients is of another objective; a checkpoint has the counts."""
    run = RunDirectory.read(notebook.path)
    per_step = run.config()["algorithm"]["updates_per_step"]
    counts = [
        max((float(value) for name, value in load_file(file).items() if name.endswith(".step")), default=0.0)
        for file in sorted(run.checkpoints_path.rglob("optimizer.safetensors"))
    ]
    assert counts == [0, 2, 0, 2 * per_step, 3 * per_step, 4 * per_step], (
        "at 0, 2 and 3 of imitation, 2, 3, 4"
    )


def test_the_validation_split_is_played_every_so_many_steps(notebook: Notebook) -> None:
    (line,) = [each for each in notebook.lines("train") if "heldout_success" in each]
    assert line["step"] == 2
    for name in ("success", "greedy"):
        low, high = line[f"heldout_{name}_low"], line[f"heldout_{name}_high"]
        assert 0.0 <= low <= line[f"heldout_{name}"] <= high <= 1.0
        assert low < high


def test_every_evaluation_is_sampled_and_greedy(notebook: Notebook) -> None:
    purposes = ("report/untrained", "report/before", "validation", "report/after")
    assert notebook.sampled == [(purpose, each) for purpose in purposes for each in (1.0, 0.0)]


def test_a_report_tells_of_each_of_its_attempts_sampled_and_greedy(notebook: Notebook) -> None:
    total = 2 * HELD_OUT
    for name in ("untrained", "before", "after"):
        assert notebook.progress[name] == [(done, total) for done in range(total + 1)]
    with EpisodeStore.open(notebook.path / "store.sqlite", read_only=True) as store:
        for name in ("untrained", "before", "after"):
            for phase in (name, f"{name}.greedy"):
                assert len(list(store.episodes(phase, 0))) == HELD_OUT


def test_speed_is_of_the_tokens_sampled_and_the_seconds_that_sampling_took(notebook: Notebook) -> None:
    lines = notebook.lines("train")
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(line["tokens.sampled"] / line["rollout_s"])
        assert line["rollout_s"] < line["step_s"] < line["run_s"]
        assert line["total_steps"] == 4
    summary = json.loads((notebook.path / "summary.json").read_text())
    assert summary["sampled_tokens"] == sum(line["tokens.sampled"] for line in lines)
    assert [each["total_steps"] for each in notebook.lines("warm_start")] == [3, 3, 3]
    assert "policies" not in summary, "of a run with one policy all numbers are that policy's"
    assert summary["skill"]


def test_what_nothing_was_reinforced_for_has_no_skill_to_show(letters: ModuleType, tmp_path: Path) -> None:
    settings = {"steps": 0, "warm_start": {"steps": 1}, "evaluation": {"num_tasks": 1}}
    summary = letters.make_trainer(tmp_path / "run", settings).train().summary
    assert (summary["skill"], summary["kinds"]) == ({}, [])
