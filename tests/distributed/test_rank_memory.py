"""What `--dry-run` says of the memory of a rank, beside every byte that torch's allocator hands out there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm.config.loader import load_config
from rllm.models.builtin import TinyModel, create_model
from rllm.trainer.memory_plan import memory_plan

SETTINGS = {
    "inference.max_context": 65,
    "rollout.max_turns": 1,
    "rollout.max_tokens_per_turn": 16,
    "rollout.tasks_per_step": 4,
    "rollout.group_size": 4,
    "algorithm.updates_per_step": 1,
    "warm_start.steps": 0,
    "threads": 1,
}
SHARD = {"distributed.strategy": "shard"}
CASES: dict[str, dict[str, Any]] = {
    "shards": SHARD,
    "shards, layers again": {**SHARD, "optimizer.gradient_checkpointing": True},
}
SLOW: dict[str, dict[str, Any]] = {
    "copies": {},
    "copies, several passes": {"optimizer.micro_batch_tokens": 128},
    "shards, several passes": {**SHARD, "optimizer.micro_batch_tokens": 128},
    "shards of an adapter": {**SHARD, "lora.rank": 8},
    "layers together, an adapter": {"distributed.tensor_parallel": 2, "lora.rank": 8},
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_rank_takes_what_was_predicted(
    ranks: Callable[..., list[dict[str, Any]]],
    require_all_well: Callable[[list[dict[str, Any]]], None],
    case: str,
    tmp_path: Path,
) -> None:
    size = TinyModel(hidden_size=128, num_layers=6, num_heads=4, intermediate_size=512)
    create_model(tmp_path / "model", size)
    settings = {**SETTINGS, "model.path": str(tmp_path / "model"), **(CASES | SLOW)[case]}
    assignments = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    require_all_well(ranks("allocated", [tmp_path / "most", json.dumps(assignments)], 2))
    plan = memory_plan(load_config(assignments), num_ranks=2, num_local_ranks=2)
    assert plan is not None
    stays = plan.parts.total - plan.parts.gradients
    measured = int((tmp_path / "most").read_text())
    predicted = max(plan.moments[moment] for moment in ("update", "optimizer step"))
    assert predicted - stays == pytest.approx(measured, rel=0.10)
