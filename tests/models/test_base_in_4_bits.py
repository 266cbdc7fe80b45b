"""A base in 4 bits computes what a dense model of the same numbers computes, forward and backward."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rllm.config.lora import LoraConfig
from rllm.errors import ConfigError
from rllm.models.bitsandbytes import NF4Weight, nf4_bytes
from rllm.models.decoder import Attend, Decoder
from rllm.models.directory import LoadedModel, load_model, save_model
from rllm.models.lora import with_adapter, with_base_in_4_bits

sys.path.insert(0, str(Path(__file__).parent))
from sizes import SIZE, TOKENS

Saved = Callable[[PreTrainedConfig], tuple[Path, Any]]

MODELS = {
    "qwen2": Qwen2Config(**SIZE, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZE, num_key_value_heads=2, head_dim=12),
    "gpt_neox": GPTNeoXConfig(**SIZE),
    "gemma": GemmaConfig(**SIZE, num_key_value_heads=1, head_dim=12),
}
IDS = torch.randint(512, (60,), generator=torch.Generator().manual_seed(1))
CODES = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
    ]
)
"""Those of NormalFloat: appendix E of the paper."""


def in_4_bits(directory: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    base = load_model(directory, dtype=dtype)
    with_base_in_4_bits(base)
    return base


def with_some_adapter(base: LoadedModel) -> LoadedModel:
    """As training would: no part of it is 0."""
    loaded = with_adapter(base, LoraConfig(rank=3, alpha=5.0), seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in loaded.model.parameters():
            if each.requires_grad:
                each.copy_(torch.randn(each.shape, generator=generator) * 0.2)
    return loaded


def logits_and_gradients(loaded: LoadedModel, attend: Attend) -> list[Tensor]:
    hidden = loaded.model.hidden(IDS, torch.arange(len(IDS)), attend)
    logits = loaded.model.logits(hidden)
    logits.float().square().mean().backward()
    return [logits.detach(), *(each.grad for each in loaded.model.parameters() if each.requires_grad)]


def weights_in_4_bits(loaded: LoadedModel) -> list[NF4Weight]:
    return [each.data for each in loaded.model.parameters() if isinstance(each.data, NF4Weight)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_dense_model_of_the_same_numbers(
    name: str, dtype: torch.dtype, saved: Saved, attend: Attend, tmp_path: Path
) -> None:
    base = in_4_bits(saved(MODELS[name])[0], dtype)
    assert isinstance(base.model, Decoder) == (name in ("qwen2", "qwen3"))
    save_model(base, tmp_path / "dense")
    ours = logits_and_gradients(with_some_adapter(base), attend)
    with torch.inference_mode():
        hidden = base.model.hidden(IDS, torch.arange(len(IDS)), attend)
    dense_base = load_model(tmp_path / "dense", dtype=dtype)
    assert torch.equal(hidden, dense_base.model.hidden(IDS, torch.arange(len(IDS)), attend))
    dense = with_some_adapter(dense_base)
    assert not weights_in_4_bits(dense)
    theirs = logits_and_gradients(dense, attend)
    assert len(ours) == len(theirs) > 10
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_every_weight_is_the_nearest_code_times_the_scale_of_its_block() -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(2))
    blocks, coded = weight.view(-1, 64), NF4Weight.of(weight).dense().view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = CODES[(blocks / scales).unsqueeze(-1).sub(CODES).abs().argmin(-1)] * scales
    # The scales have 8 bits themselves.
    assert float((coded - nearest).abs().max() / scales.max()) < 0.02


def test_the_matrices_of_the_layers_take_an_eighth_of_the_memory(saved: Saved) -> None:
    base = in_4_bits(saved(MODELS["qwen3"])[0])
    matrices = weights_in_4_bits(base)
    assert len(matrices) == 4 * base.num_layers
    assert [each.num_bytes for each in matrices] == [nf4_bytes(each.numel()) for each in matrices]
    assert sum(each.num_bytes for each in matrices) < 0.55 * sum(each.numel() for each in matrices)
    assert not isinstance(base.model.output_weight.data, NF4Weight)


def test_a_backward_pass_keeps_no_dense_matrix(saved: Saved, attend: Attend) -> None:
    loaded = with_some_adapter(in_4_bits(saved(MODELS["qwen3"])[0]))
    shapes = {tuple(each.shape) for each in weights_in_4_bits(loaded)}
    dense: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, NF4Weight) and shapes & {tuple(tensor.shape), tuple(tensor.shape)[::-1]}:
            dense.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loaded.model.hidden(IDS, torch.arange(len(IDS)), attend)
    assert dense == []


def test_nothing_is_written_to_a_weight_in_4_bits() -> None:
    weight = NF4Weight.of(torch.randn(8, 64))
    before = weight.dense()
    for write in (lambda: weight.mul_(2.0), lambda: weight.copy_(before), lambda: weight.t().zero_()):
        with pytest.raises(RuntimeError, match="frozen"):
            write()
    assert torch.equal(weight.dense(), before)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **TOKENS), "Conv1D"),
        (MixtralConfig(**SIZE, num_key_value_heads=2, num_local_experts=4, sliding_window=None), "experts"),
    ],
    ids=["gpt2", "mixtral"],
)
def test_a_model_of_other_layers_is_refused(config: PreTrainedConfig, reason: str, saved: Saved) -> None:
    base = load_model(saved(config)[0])
    with pytest.raises(ConfigError, match=rf"`lora\.base_dtype`.*{reason}"):
        with_base_in_4_bits(base)
    assert not weights_in_4_bits(base)
