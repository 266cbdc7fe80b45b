"""Rows of software-engineering tasks through `rllm train`: paid by the sealed grader in real sandboxes."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.cli.main import rllm
from rllm.environments.swe.scaffolds import SCAFFOLDS, call_text, read_calls
from rllm.environments.swe.swe import demonstration
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.types.episode import Episode, Outcome

sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
from swe_projects import PATCH, repository, row, usable_backend

SETTINGS = (
    *("steps=2", "threads=1", "inference.max_context=1024", "checkpoint.every_steps=100"),
    *("rollout.tasks_per_step=2", "rollout.group_size=4", "rollout.max_turns=2", "rollout.retry_limit=1"),
    *("rollout.max_tokens_per_turn=256", "task.environment_args.max_steps=2"),
    *("task.agent_args.scaffold=bash", "task.environment_args.scaffold=bash"),
)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A task that can be solved, and one whose hidden tests never run to their end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    source, commit = repository(tmp_path)
    good = row(source, base_commit=commit)
    ends = {"tests/test_add.py": "import os\n\nos._exit(0)\n"}
    return [good, {**good, "instance_id": "broken", "test_files": ends}]


def saved(rows: list[dict[str, Any]], place: Path) -> str:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(place)


def train(name: str, run: str, *settings: str) -> Any:
    backend = f"task.environment_args.backend={usable_backend()}"
    words = [word for each in (*SETTINGS, backend, *settings) for word in ("--set", each)]
    return CliRunner().invoke(rllm, ["train", name, "--output", run, "--json", *words])


def episodes_of(run: str, step: int) -> list[Episode]:
    with EpisodeStore.open(Path(run) / "store.sqlite", read_only=True) as store:
        return list(store.episodes("train", step))


@pytest.mark.slow
def test_two_steps_are_paid_by_the_hidden_tests_and_every_token_is_counted(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    name = saved(rows, tmp_path / "rows.jsonl")
    imitation = ("warm_start.steps=60", "warm_start.learning_rate=1e-2", "warm_start.episodes_per_step=4")
    ended = train(name, "run", *imitation, "rollout.max_failed_fraction=0.9", "evaluation.num_tasks=1")
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["after"]["greedy_report"]["success"] == 1.0
    rewards: set[float | None] = set()
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        if line["phase"] != "train":
            continue
        episodes = episodes_of("run", line["step"])
        assert len(episodes) == line["episodes"] == 8
        by_task = {
            each: [one for one in episodes if one.task_id == each] for each in ("calc__calc-1", "broken")
        }
        for episode in episodes:
            (trajectory,) = episode.trajectories
            rewards.add(trajectory.reward)
            if episode.outcome is Outcome.INFRASTRUCTURE_FAILURE:
                assert trajectory.reward is None, "a failure is no reward of zero"
                assert "own solution" in trajectory.info["error"]["message"]
            elif trajectory.reward == 1.0:
                assert trajectory.steps[-1].info["resolution"] == "full"
        assert line["failed"] == sum(each.outcome is Outcome.INFRASTRUCTURE_FAILURE for each in episodes)
        assert all(each.outcome is not Outcome.INFRASTRUCTURE_FAILURE for each in by_task["calc__calc-1"])
        assert not any(each.is_correct for each in by_task["broken"])
        sampled = [step for each in episodes for step in each.trajectories[0].steps]
        assert sum(len(step.response_ids) for step in sampled) == line["tokens.sampled"]
        left_out = sum(
            value for key, value in line.items() if key.startswith(("tokens.dropped", "tokens.masked"))
        )
        assert line["tokens.trained"] + left_out == line["tokens.sampled"]
    assert {1.0, None} <= rewards


def test_a_file_is_trained_on_whole_and_a_folder_of_splits_is_measured_on_its_own(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    name = saved(rows[:1], tmp_path / "rows.jsonl")
    assert list(benchmark_named(name).splits) == ["train", "test"]
    splits = {"train": rows[:1], "test": rows[1:]}
    for split, each in splits.items():
        saved(each, tmp_path / "tasks" / split / "rows.jsonl")
    assert list(benchmark_named("tasks").splits) == ["train", "test"]
    run = build_run(training_config("tasks"), tmp_path / "run")
    assert [task["task_id"] for task in run.tasks.train] == ["calc__calc-1"]
    assert [task["task_id"] for task in run.tasks.heldout] == ["broken"]
    assert not run.tasks.facts().trained_on
    alone = build_run(training_config(name), tmp_path / "run")
    assert alone.tasks.facts().trained_on == ["calc__calc-1"]
    saved(rows[:1], tmp_path / "untrained" / "test" / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"`train`.* test"):
        build_run(training_config("untrained"), tmp_path / "run")


@pytest.mark.parametrize("scaffold", SCAFFOLDS)
def test_the_expert_applies_the_solution_of_a_row_and_submits(
    scaffold: str, rows: list[dict[str, Any]]
) -> None:
    task = {"entry": rows[0], "scaffold": scaffold, "max_steps": 2}
    turns = demonstration(task, noise=0.0, rng=np.random.default_rng(0))
    (applied,), (submitted,) = (read_calls(call_text(str(answer), scaffold)[2]) for _, answer in turns)
    assert (applied.name, submitted.name) == ("execute_bash", "finish" if scaffold == "r2egym" else "submit")
    assert PATCH in applied.arguments["command"]
    assert turns[1][0] == "[exit code 0]\nThis is the last step: submit now."
    reversed_patch = {**rows[0], "patch": "", "bug_patch": PATCH}
    ((_, first), _) = demonstration(task | {"entry": reversed_patch}, noise=0.0, rng=np.random.default_rng(0))
    assert "git apply -R" in str(first)
    for other, noise, message in (
        ({"entry": {**rows[0], "patch": ""}}, 0.0, "no `patch`"),
        (task, 0.5, "strays"),
    ):
        with pytest.raises(ConfigError, match=message):
            demonstration(other, noise=noise, rng=np.random.default_rng(0))


def test_a_context_that_does_not_hold_the_issue_is_refused_before_anything_is_trained(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    name = saved(rows[:1], tmp_path / "rows.jsonl")
    ended = train(name, "run", "inference.max_context=300")
    assert ended.exit_code == 2
    assert "first prompt" in ended.output
    ended = train(name, "run", "inference.max_context=32768")
    assert ended.exit_code == 2
    assert "2048 positions" in ended.output


def test_the_recipe_of_deepswe_resolves_without_a_download() -> None:
    example = Path(__file__).parents[2] / "examples" / "deepswe"
    words = ["train", str(example / "rows.jsonl"), "--config", str(example / "deepswe.toml")]
    ended = CliRunner().invoke(
        rllm, [*words, "--model", str(example / "qwen3-32b"), "--dry-run", "--force", "--json"]
    )
    assert ended.exit_code == 0, ended.output
    plan = json.loads(ended.stdout)
    assert plan["derived"]["episodes_per_step"] == 512
    assert plan["derived"]["optimizer_updates"] == 1600
    assert set(plan["config"]["rollout"]["truncation"].values()) == {"mask", 1.0}
    weights = plan["memory"]["weights"]
    assert 65e9 < (weights if isinstance(weights, int | float) else weights["bytes"]) < 66e9
