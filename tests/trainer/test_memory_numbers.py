"""The numbers that a plan has for configurations of every kind, as they were when real updates were measured
beside them (`test_memory_plan.py` holds the formulas to within 5 %, which lets a small term go unnoticed).

    python tests/trainer/test_memory_numbers.py     writes them anew, to be looked at before they are kept
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rllm.config.loader import load_config
from rllm.trainer.memory_plan import memory_plan

NUMBERS = Path(__file__).with_name("memory_numbers.json")
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": False},
    "wide": {
        "model_type": "llama",
        "vocab_size": 50_000,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    },
}
SIZES = {
    "vocab_size": 604,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SMALL: dict[str, Any] = {
    "steps": 1,
    "inference.max_context": 65,
    "inference.num_slots": 4,
    "rollout.max_turns": 1,
    "rollout.max_tokens_per_turn": 16,
    "rollout.tasks_per_step": 8,
    "rollout.group_size": 4,
    "algorithm.updates_per_step": 1,
    "warm_start.steps": 0,
    "threads": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"model.path": "qwen2"},
    "biases": {"model.path": "llama", "optimizer.name": "muon"},
    "wide": {"model.path": "wide", "algorithm.entropy_coef": 0.01},
    "wide in chunks": {"model.path": "wide", "optimizer.logits_mb": 2.0},
    "adafactor": {"optimizer.name": "adafactor"},
    "16 bits": {"model.dtype": "bfloat16"},
    "16 bits in chunks": {"model.dtype": "bfloat16", "optimizer.logits_mb": 0.1},
    "16 bits, adapter": {"model.dtype": "bfloat16", "lora.rank": 8},
    "adapter": {"lora.rank": 4, "lora.targets": ["q_proj", "down_proj"]},
    "adapter, reference after a warm start": {
        "lora.rank": 4,
        "algorithm.kl_coef": 0.1,
        "warm_start.steps": 2,
        "warm_start.episodes_per_step": 5,
    },
    "several passes": {"optimizer.micro_batch_tokens": 200},
    "layers again": {"optimizer.gradient_checkpointing": True, "optimizer.micro_batch_tokens": 300},
    "a row longer than a pass": {"optimizer.micro_batch_tokens": 32},
    "several turns": {"rollout.max_turns": 3, "rollout.max_tokens_per_turn": 10},
    "no limit of a turn": {"rollout.max_tokens_per_turn": 0},
    "short prompts": {"rollout.max_tokens_per_turn": 44},
    "critic": {"critic.trunk": "separate", "algorithm.estimator": "gae", "checkpoint.background": True},
    "reference": {"algorithm.kl_coef": 0.1, "checkpoint.background": True, "model.dtype": "bfloat16"},
    "ahead": {"schedule.kind": "async", "inference.lockstep": False},
    "two ranks": {"ranks": 2},
    "sharded": {"ranks": 4, "distributed.strategy": "shard", "distributed.shard_size": 2},
    "sharded in 16 bits": {
        "ranks": 2,
        "distributed.strategy": "shard",
        "model.dtype": "bfloat16",
        "checkpoint.background": True,
    },
    "sharded adapter": {"ranks": 2, "distributed.strategy": "shard", "lora.rank": 8},
    "split": {"ranks": 2, "distributed.tensor_parallel": 2},
    "split adapter": {"ranks": 4, "distributed.tensor_parallel": 2, "lora.rank": 8},
    "cluster": {"cluster.kind": "ray", "inference.max_context": 512, "rollout.max_tokens_per_turn": 400},
    "places of a cache": {"inference.cache_tokens": 96, "inference.max_prefill_tokens": 16},
    "updates of parts": {"algorithm.updates_per_step": 3, "rollout.group_size": 2},
}


def numbers_of(case: str, directory: Path) -> dict[str, Any]:
    keys = {**SMALL, "model.path": "qwen3", **CASES[case]}
    ranks = keys.pop("ranks", 1)
    model = directory / keys["model.path"]
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps({**SIZES, **MODELS[model.name]}))
    config = load_config(
        [f"{key}={json.dumps(value)}" for key, value in (keys | {"model.path": str(model)}).items()]
    )
    plan = memory_plan(config, num_ranks=ranks, num_local_ranks=ranks)
    assert plan is not None
    facts = plan.facts()
    return {name: value for name, value in facts.items() if name not in ("machine", "warning")}


def test_every_number_of_a_plan_is_the_one_that_was_measured_beside_an_update(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    kept = json.loads(NUMBERS.read_text())
    assert kept.keys() == CASES.keys()
    for case in CASES:
        with subtests.test(case=case):
            assert numbers_of(case, tmp_path) == kept[case]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        text = json.dumps({case: numbers_of(case, Path(made)) for case in CASES}, indent=1)
    NUMBERS.write_text(text + "\n")
