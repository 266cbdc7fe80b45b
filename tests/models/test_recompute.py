"""Gradient checkpointing: each layer is computed twice, and nothing else changes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GemmaConfig, GPT2Config, GPTNeoXConfig, MixtralConfig, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from rllm.errors import ConfigError
from rllm.models.decoder import Attend
from rllm.models.directory import load_model

sys.path.insert(0, str(Path(__file__).parent))
from sizes import SIZE, TOKENS

Saved = Callable[[PreTrainedConfig], tuple[Path, Any]]

SERVED = {
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, **TOKENS),  # whose dropout is 0.1
    "gpt_neox": GPTNeoXConfig(**SIZE),
    "gemma": GemmaConfig(**SIZE, num_key_value_heads=1, head_dim=12),
    "mixtral": MixtralConfig(**SIZE, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
}


def _gradients(model: Any, attend: Attend) -> dict[str, Tensor]:
    ids = torch.randint(512, (50,), generator=torch.Generator().manual_seed(1))
    model.zero_grad(set_to_none=True)
    kept = torch.tensor([3, 20, 49])
    model.logits(model.hidden(ids, torch.arange(50), attend, kept)).square().mean().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", SERVED)
def test_layers_of_transformers_are_computed_again_to_the_same_gradients(
    name: str, saved: Saved, attend: Attend
) -> None:
    model = load_model(saved(SERVED[name])[0]).model
    expected = _gradients(model, attend)
    model.recompute_layers()
    calls: list[Any] = []
    for layer in (each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)):
        layer.register_forward_hook(lambda *_: None)
        first = next(each for each in layer.children())
        first.register_forward_pre_hook(lambda *_: calls.append(1))
    found = _gradients(model, attend)
    assert len(calls) == 2 * 2
    assert found.keys() == expected.keys()
    for parameter, each in found.items():
        torch.testing.assert_close(each, expected[parameter], atol=1e-7, rtol=1e-5)


def test_the_built_in_decoder_attends_twice_to_the_same_gradients(builtin: Path, attend: Attend) -> None:
    calls: list[int] = []

    def counted(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(layer)
        return attend(layer, q, k, v)

    model = load_model(builtin).model
    keeping = _kept_last(counted)
    expected = _gradients(model, keeping)
    assert calls == [0, 1]
    model.recompute_layers()
    found = _gradients(model, keeping)
    assert calls == [0, 1, 0, 1, 1, 0]
    assert all(torch.equal(each, expected[parameter]) for parameter, each in found.items())


def _kept_last(attend: Attend) -> Attend:
    """Where fewer queries come than keys, those of places 3, 20 and 49."""

    def kept(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(q) == len(k):
            return attend(layer, q, k, v)
        every = q.new_zeros(k.shape[0], *q.shape[1:]).index_copy(0, torch.tensor([3, 20, 49]), q)
        return attend(layer, every, k, v)[[3, 20, 49]]

    return kept


def test_an_architecture_that_would_drop_out_is_refused(saved: Saved) -> None:
    model = load_model(saved(SERVED["gpt_neox"])[0]).model
    model.inner.base_model.layers[1].dropout = 0.1  # as OPT's layers have it
    with pytest.raises(
        ConfigError, match=r"gradient_checkpointing.*GPTNeoXForCausalLM has `dropout` above 0"
    ):
        model.recompute_layers()


def test_an_architecture_without_layers_to_recompute_is_refused(saved: Saved) -> None:
    model = load_model(saved(SERVED["gpt_neox"])[0]).model
    model.inner.base_model.layers = torch.nn.ModuleList()
    with pytest.raises(ConfigError, match="recomputed"):
        model.recompute_layers()
