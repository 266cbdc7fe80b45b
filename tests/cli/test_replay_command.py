import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
