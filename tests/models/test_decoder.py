from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rllm.models.decoder import Attend, Decoder, DecoderShape
from rllm.models.directory import load_model

Saved = Callable[[PreTrainedConfig], tuple[Path, Any]]

SIZE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3": Qwen3Config(**SIZE, head_dim=12),
    "qwen3 with bias and tied head": Qwen3Config(
        **SIZE, head_dim=12, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen2": Qwen2Config(**SIZE),
    "qwen2 tied": Qwen2Config(**SIZE, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZE, sliding_window=None),
    "llama": LlamaConfig(
        **SIZE, rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
    "llama with bias": LlamaConfig(**SIZE, attention_bias=True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, saved: Saved, attend: Attend) -> None:
    directory, reference = saved(FAMILIES[family])
    loaded = load_model(directory)
    ids = torch.randint(512, (100,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = loaded.model.logits(loaded.model.hidden(ids, torch.arange(100), attend))
        theirs = reference(ids.unsqueeze(0)).logits[0]
    assert isinstance(loaded.model, Decoder)
    assert theirs.std() > 0.1, "logits near zero would agree with anything"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert (loaded.num_layers, loaded.num_kv_heads) == (2, 2)
    assert loaded.num_parameters == reference.num_parameters()


def test_the_built_in_model_computes_what_transformers_computes(builtin: Path, attend: Attend) -> None:
    reference = AutoModelForCausalLM.from_pretrained(builtin)
    model = load_model(builtin).model
    for seed in range(3):
        ids = torch.randint(512, (60,), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            ours = model.logits(model.hidden(ids, torch.arange(60), attend))
            torch.testing.assert_close(ours, reference(ids.unsqueeze(0)).logits[0], atol=1e-5, rtol=0)


def test_positions_are_those_of_each_sequence_and_not_of_the_row(builtin: Path, attend: Attend) -> None:
    model = load_model(builtin).model
    ids = torch.arange(40, 60)
    with torch.no_grad():
        here = model.hidden(ids, torch.arange(20), attend)
        shifted = model.hidden(ids, torch.arange(100, 120), attend)
    torch.testing.assert_close(shifted, here, atol=1e-4, rtol=0)  # rotary positions are relative


def test_states_that_nobody_asks_for_are_left_out_and_the_others_stay_the_same(
    builtin: Path, attend: Attend
) -> None:
    model = load_model(builtin).model
    ids, keep_M = torch.arange(40, 60), torch.tensor([0, 7, 8, 19])

    def attend_last(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if len(q) == len(k):
            return attend(layer, q, k, v)
        spread = q.new_zeros(len(k), *q.shape[1:])
        spread[keep_M] = q
        return attend(layer, spread, k, v)[keep_M]

    with torch.no_grad():
        whole = model.hidden(ids, torch.arange(20), attend)
        kept = model.hidden(ids, torch.arange(20), attend_last, keep_M)
    torch.testing.assert_close(kept, whole[keep_M], atol=1e-6, rtol=0)


def test_what_the_built_in_decoder_does_not_compute_is_left_to_the_generic_one(
    subtests: pytest.Subtests,
) -> None:
    for change in [
        {"model_type": "gpt2"},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True},
    ]:
        with subtests.test(change=change):
            plain = LlamaConfig(**SIZE).to_dict()
            assert DecoderShape.from_config(plain) is not None
            assert DecoderShape.from_config({**plain, **change}) is None


def test_a_write_to_a_view_counts_as_a_write_to_the_weights(builtin: Path) -> None:
    model = load_model(builtin).model
    before = [parameter._version for parameter in model.parameters()]
    model.load_hf({name: tensor.clone() for name, tensor in model.state_dict_hf().items()})
    after = [parameter._version for parameter in model.parameters()]
    assert all(later > earlier for earlier, later in zip(before, after, strict=True))
