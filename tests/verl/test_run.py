"""`rllm train frozenlake --set backend=verl`, through the front door."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

SHORT = (
    *("backend=verl", "optimizer.name=adamw", "threads=1", "steps=3", "warm_start.steps=2"),
    *("warm_start.episodes_per_step=8", "rollout.tasks_per_step=2", "rollout.group_size=4"),
    *("evaluation.num_tasks=2", "evaluation.every_steps=0", "evaluation.split=validation"),
    *("task.num_train_tasks=16", "checkpoint.every_steps=1", "checkpoint.keep=9", "algorithm.kl_coef=0.01"),
)


def train(output: Path, *assignments: str) -> subprocess.CompletedProcess[str]:
    options = [part for each in (*SHORT, *assignments) for part in ("--set", each)]
    return subprocess.run(
        [sys.executable, "-m", "rllm", "train", "frozenlake", "--output", str(output), *options],
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run") / "whole"
    done = train(output)
    assert done.returncode == 0, done.stderr[-4000:]
    return output


def test_a_run_samples_from_what_verl_has_learned(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "train"]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert steps[-1]["policy_version"] >= 3
    assert all(line["canary_gap"] < 1e-4 for line in steps)
    first, last = (load_file(whole / name / "model.safetensors") for name in ("initial_model", "model"))
    assert any(not first[name].equal(last[name]) for name in first)


def test_a_run_goes_on_from_a_checkpoint_and_ends_with_the_same_weights(whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    for name in ("summary.json", "curve.png", "lock"):
        (again / name).unlink(missing_ok=True)
    shutil.rmtree(again / "model")
    for checkpoint in sorted((again / "checkpoints").glob("step-*"))[-2:]:
        shutil.rmtree(checkpoint)
    done = train(again)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (load_file(run / "model" / "model.safetensors") for run in (whole, again))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) == 0.0


def test_a_checkpoint_of_another_backend_is_refused(whole: Path, tmp_path: Path) -> None:
    done = train(whole, "backend=local")
    assert done.returncode != 0
    assert "backend" in done.stderr
