"""Architectures with more than attention between plain layers: exact, as far as they are, or refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    GraniteConfig,
    LlamaConfig,
    Phi3Config,
)

from rllm.errors import ConfigError
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import TinyModel, create_model
from rllm.models.directory import load_model
from rllm.types import SamplingParams
from rllm.types.messages import ModelOutput

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
Make = Callable[[Any], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(config: Any) -> Path:
        tokenizer, directory = tmp_path / "tokenizer", tmp_path / "model"
        create_model(tokenizer, TinyModel(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64))
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
        model.save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / name, directory / name)
        return directory

    return make


def logprobs_by_transformers(directory: Path, output: ModelOutput) -> list[float]:
    """Of the answer, by one forward pass of the whole row."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([output.prompt_ids + output.completion_ids]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits.double(), dim=-1)[len(output.prompt_ids) - 1 :]
    return [float(logprobs[place, token]) for place, token in enumerate(output.completion_ids)]


@pytest.mark.parametrize(
    "config",
    [
        Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=LONG),
        LlamaConfig(
            **{**SIZES, "max_position_embeddings": 64},
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        ),
    ],
    ids=["longrope", "dynamic"],
)
async def test_rotations_that_change_with_the_length_are_exact_as_far_as_they_do_not(
    make: Make, config: Any
) -> None:
    directory = make(config)
    loaded = load_model(directory)
    assert loaded.max_positions == 64
    with pytest.raises(ConfigError, match=r"`inference.max_context` is 65 .* 64"):
        LocalClient(loaded, max_context=65)
    client = LocalClient(loaded, max_context=64, num_slots=2)
    output = await client.generate_ids(list(range(10, 30)), SamplingParams(max_tokens=60, seed=1))
    await client.close()
    assert len(output.completion_ids) == 44
    assert output.logprobs == pytest.approx(logprobs_by_transformers(directory, output), abs=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**SIZES, logit_scale=0.25),
        Cohere2Config(**SIZES, logit_scale=0.25, sliding_window=8),
        GraniteConfig(**SIZES, logits_scaling=3.0, embedding_multiplier=2.0),
    ],
    ids=["cohere", "cohere2", "granite"],
)
async def test_logits_that_are_scaled_are_scaled(make: Make, config: Any) -> None:
    directory = make(config)
    client = LocalClient(load_model(directory), max_context=96, num_slots=2)
    output = await client.generate_ids(list(range(10, 30)), SamplingParams(max_tokens=40, seed=1))
    await client.close()
    assert output.logprobs == pytest.approx(logprobs_by_transformers(directory, output), abs=1e-5)
