"""Ranks of which each has the base of an adapter in 4 bits come to what one process comes to."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rllm.models.directory import load_model

WORDS = (
    *("steps=2", "warm_start.steps=2", "warm_start.episodes_per_step=8", "evaluation.num_tasks=2"),
    *("evaluation.every_steps=0", "rollout.tasks_per_step=4", "rollout.group_size=4", "optimizer.name=adamw"),
    *("lora.rank=64", "lora.base_dtype=nf4"),
)


def train(run: Path, *words: str) -> Path:
    """By the command, which ends well."""
    assignments = [each for word in (*WORDS, *words) for each in ("--set", word)]
    ranks = ["--nproc", "2"] if words else []
    command = [
        sys.executable,
        "-m",
        "rllm",
        "train",
        "frozenlake",
        "--output",
        str(run),
        *ranks,
        *assignments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return run / "model"


@pytest.mark.slow
def test_ranks_train_beside_a_base_in_4_bits_as_one_process_does(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone")
    start = tmp_path / "alone" / "initial_model"
    for strategy in ("replicate", "shard"):
        together = train(tmp_path / strategy, f"distributed.strategy={strategy}")
        mine, theirs, begin = (load_model(each).model.state_dict_hf() for each in (together, alone, start))

        def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
            return math.sqrt(sum(float((one[name] - other[name]).double().square().sum()) for name in one))

        assert distance(mine, theirs) < 1e-5 * distance(theirs, begin), strategy
