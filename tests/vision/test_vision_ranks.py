"""Models that read images on several processes: the update of one process, or a refusal at start."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.trainer.distribution import require_distributed

SHORT = (
    "steps=2",
    "warm_start.steps=2",
    "evaluation.num_tasks=4",
    "evaluation.every_steps=0",
    "rollout.tasks_per_step=3",
    "rollout.group_size=4",
    "rollout.max_turns=2",
    "optimizer.weight_decay=0.0",
    "optimizer.muon_dtype=float32",
    "algorithm.entropy_coef=0.01",
)
"""Two steps of imitation and two of reinforcement, whose groups tie: entropy gives the first a gradient. In
bfloat16, which Muon takes where a machine has it, products of one process and of two are not the same."""


def _trained(run: Path, *assignments: str, num_ranks: int) -> dict[str, torch.Tensor]:
    words = [word for each in (*SHORT, *assignments) for word in ("--set", each)]
    command = ["train", "frozenlake-pixels", *words, "--nproc", str(num_ranks), "--output", str(run)]
    result = subprocess.run([sys.executable, "-m", "rllm", *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return {name: each for file in run.glob("model/*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "vision", "strategy"),
    [
        ("tiny-vl", "train", "replicate"),
        ("tiny-vl", "frozen", "replicate"),
        ("tiny-vl", "frozen", "shard"),
        ("gemma3", "train", "replicate"),
        ("gemma3", "frozen", "shard"),
    ],
)
def test_two_processes_learn_from_pictures_as_one_does(
    vision_model: Callable[[str], Any], tmp_path: Path, family: str, vision: str, strategy: str
) -> None:
    path = "builtin:tiny-vl" if family == "tiny-vl" else vision_model(family).directory
    alone_settings = (f"model.path={path}", f"model.vision={vision}")
    alone = _trained(tmp_path / "one", *alone_settings, num_ranks=1)
    spread = (*alone_settings, f"distributed.strategy={strategy}")
    together = _trained(tmp_path / "two", *spread, num_ranks=2)
    assert together.keys() == alone.keys()
    gaps = torch.cat([(together[name] - alone[name]).abs().flatten() for name in alone])
    # Where a gradient is as small as Adam's epsilon, its rounding decides on much of a step.
    assert float((gaps <= 1e-4).double().mean()) >= 0.9999
    assert float(gaps.max()) <= 1e-3


@pytest.mark.parametrize(
    ("assignments", "why"),
    [
        (["distributed.strategy=shard", "model.vision=train"], r"`model.vision` is 'train'.*frozen"),
        (["distributed.strategy=shard", "model.vision=lora", "lora.rank=2"], "`model.vision` is 'lora'"),
        (["distributed.tensor_parallel=2"], r"builtin:tiny-vl reads images"),
    ],
)
def test_what_processes_cannot_share_of_a_tower_is_refused(assignments: list[str], why: str) -> None:
    config = load_config(None, ["model.path=builtin:tiny-vl", "optimizer.name=adamw", *assignments])
    with pytest.raises(ConfigError, match=why):
        require_distributed(config, 2, is_program=False)
