import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.tracking.jsonl import read_metrics

Rllm = Callable[..., Result]


def test_a_finished_run_replays_to_the_same_numbers_and_parameters(finished_run: Any, rllm: Rllm) -> None:
    result = rllm("runs", "replay", finished_run.path, "--json")
    assert result.exit_code == 0, result.stdout
    replayed = json.loads(result.stdout)
    assert replayed["identical"] is True
    assert replayed["differences"] == []
    assert replayed["recorded_sha256"] == replayed["replayed_sha256"]
    assert (replayed["num_warm_steps"], replayed["num_train_steps"]) == (2, 1)
    assert replayed["num_compared"] > 0


@pytest.mark.slow
def test_a_run_that_sampled_ahead_replays_to_the_same_parameters(
    tiny_settings: list[str], rllm: Rllm
) -> None:
    """The bonus for entropy is a gradient of every row."""
    settings = ("schedule.kind=async", "schedule.max_staleness=2", "inference.lockstep=false", "steps=6")
    changes = [word for each in (*settings, "algorithm.entropy_coef=0.05") for word in ("--set", each)]
    trained = rllm("train", "frozenlake", *tiny_settings, *changes, "--output", "run", "--json")
    assert trained.exit_code == 0, trained.stderr
    lines = [each for each in read_metrics(Path("run/metrics.jsonl")) if each["phase"] == "train"]
    assert max(line["staleness_max"] for line in lines) in (1, 2)
    assert all(line["grad_norm"] > 0.0 for line in lines[:-1]), "at the last step the bonus has come to 0"
    replayed = json.loads(rllm("runs", "replay", "run", "--json").stdout)
    assert replayed["identical"] is True
    assert replayed["recorded_sha256"] == replayed["replayed_sha256"]
    assert replayed["num_train_steps"] == 6


def test_a_number_that_was_recorded_otherwise_is_shown_and_ends_with_1(
    finished_run: Any, rllm: Rllm, tmp_path: Path
) -> None:
    shutil.copytree(finished_run.path, tmp_path / "lake")
    lines = read_metrics(tmp_path / "lake" / "metrics.jsonl")
    for line in lines:
        if line["phase"] == "train":
            line["learning_rate"] = 0.125
    (tmp_path / "lake" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = rllm("runs", "replay", "lake")
    assert result.exit_code == 1
    for words in ("3: 2 warm start, 1 training", "1 differ", "identical, sha256", "learning_rate", "0.125"):
        assert words in result.stdout
    assert "rllm runs show lake --phase train --step 0" in result.stdout


def test_a_run_without_a_result_is_not_replayed(stopped_run: Path, rllm: Rllm) -> None:
    result = rllm("runs", "replay", stopped_run)
    assert result.exit_code == 2
    assert "has not finished" in result.stderr
    assert result.stdout == ""
