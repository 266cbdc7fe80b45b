"""The memory of models that transformers computes, planned by the built-in decoder with the same matrices."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rllm.config.loader import load_config
from rllm.config.optimizer import OptimizerConfig
from rllm.models.batching import micro_batches
from rllm.models.builtin import create_model
from rllm.models.directory import load_model
from rllm.models.packing import ALL, WeightedRow, packed_trees
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.backends.torch_memory import LiveBytes, PassModel, _losses, pass_memory
from rllm.trainer.memory import num_parameters
from rllm.trainer.memory_plan import activation_factor, like_rows, memory_plan, plan_shape, shape_of

GEMMA: dict[str, Any] = {
    "hidden_size": 80,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "sliding_window": 256,
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Gemma 3 with random weights, and the tokenizer of a built-in model."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("models") / "gemma"
    create_model(directory, "tiny", 0)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=vocab_size, **GEMMA)).save_pretrained(directory)
    return directory


def test_its_parameters_are_those_of_the_similar_decoder(gemma: Path) -> None:
    assert shape_of(str(gemma)) is None, "the built-in decoder does not compute it"
    shape = plan_shape(str(gemma))
    assert shape is not None
    real = sum(parameter.numel() for parameter in load_model(gemma).model.parameters())
    assert num_parameters(shape) == pytest.approx(real, rel=0.01)


def test_a_pass_takes_what_is_planned(gemma: Path) -> None:
    shape, optimizer = plan_shape(str(gemma)), OptimizerConfig()
    assert shape is not None
    rows = like_rows(4, 1, 256, 64, is_shared=False)
    planned = pass_memory(
        PassModel(shape=shape, optimizer=optimizer, activations=activation_factor(str(gemma))), rows
    )
    backend: Any = TorchBackend(load_model(gemma).model, publish=lambda *_: None, config=optimizer)
    weighted_rows = [
        WeightedRow(index=index, sample=row, weights_T=row.trainable_T.astype(np.float64))
        for index, row in enumerate(rows)
    ]
    (trees,) = packed_trees(weighted_rows, 16_384)
    (batch,) = micro_batches([row for tree in trees for row in tree.rows], ALL, torch.device("cpu"))
    there = [*backend.model.parameters(), *backend.model.buffers(), *backend._weights.by_name.values()]
    with LiveBytes(there) as live:
        total = (_losses(backend, batch, with_entropy=False) * batch.weights_M).sum()
        kept = live.now
        total.backward()
    assert kept == pytest.approx(planned.num_kept, rel=0.15)
    assert live.most == pytest.approx(planned.most, rel=0.15)


def test_a_run_has_a_plan_and_one_of_an_unknown_architecture_has_none(gemma: Path, tmp_path: Path) -> None:
    settings = [f'model.path="{gemma}"', "warm_start.steps=0", "inference.num_slots=4"]
    settings += ["inference.max_context=128", "rollout.max_tokens_per_turn=16"]
    plan = memory_plan(load_config(settings), num_ranks=1, num_local_ranks=1)
    assert plan is not None
    assert plan.parts.gradients == pytest.approx(plan.parts.weights, rel=0.1)
    config = json.loads((gemma / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert plan_shape(str(tmp_path)) is None
