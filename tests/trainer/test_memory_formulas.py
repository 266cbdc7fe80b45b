"""Numbers of parameters, and passes on tensors without contents."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rllm.config.lora import LoraConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.models.decoder import Decoder, DecoderShape
from rllm.trainer.backends.torch_memory import LiveBytes, PassModel, pass_memory
from rllm.trainer.memory import (
    cache_bytes,
    layer_matrices,
    layer_parameters,
    lora_parameters,
    matrix_parameters,
    num_parameters,
    vocabulary_parameters,
)
from rllm.types.sample import NOT_SAMPLED, TrainingSample

WIDTH, INNER, KEYS = 31, 53, 2 * 7
SHAPE = DecoderShape(
    vocab_size=1009,
    hidden_size=WIDTH,
    intermediate_size=INNER,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=7 + 1,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=128,
    tied=False,
    qkv_bias=True,
    out_bias=True,
    qk_norm=True,
)
MODEL = PassModel(shape=SHAPE, optimizer=OptimizerConfig(micro_batch_tokens=256))


def rows(number: int, length: int = 64, trained: int = 16) -> list[TrainingSample]:
    """Rows that share nothing."""
    sampled_T = np.arange(length) >= length - trained
    return [
        TrainingSample(
            token_ids_T=np.full(length, row),
            policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
            logprobs_T=np.zeros(length, np.float32),
            advantages_T=np.ones(length, np.float32),
            group_key=(f"t{row}", "agent"),
            order_key=(f"t{row}", 0, 0, 0),
        )
        for row in range(number)
    ]


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": True, "qkv_bias": False}, {"out_bias": False, "qk_norm": False}, {"num_layers": 1}],
    ids=str,
)
def test_parameters_are_those_of_the_decoder(changes: dict[str, Any]) -> None:
    shape = replace(SHAPE, **changes)
    decoder = Decoder(shape)
    parameters = dict(decoder.named_parameters())
    assert num_parameters(shape) == sum(each.numel() for each in parameters.values())
    of_layer = {name: each for name, each in parameters.items() if ".0." in name}
    assert layer_parameters(shape) == sum(each.numel() for each in of_layer.values())
    matrices = [each.numel() for each in of_layer.values() if each.dim() == 2]
    assert sorted(layer_matrices(shape)) == sorted(matrices)
    assert matrix_parameters(shape) == sum(matrices)
    assert vocabulary_parameters(shape) == 1009 * WIDTH * (1 if shape.tied else 2)
    keys = shape.num_kv_heads * shape.head_dim
    assert cache_bytes(shape, 3, 33, 2, cache_tokens=0) == 2 * 3 * 64 * (2 * shape.num_layers * keys + 2)


def test_live_bytes_count_a_tensor_from_its_creation_to_its_end() -> None:
    known = torch.ones(7)
    with LiveBytes([known]) as live:
        first = torch.ones(10) + known.sum()
        view = first[:5]
        view.mul_(2.0)
        kept = live.now
        assert kept == 40
        del first
        assert live.now == kept, "a view keeps what it looks at"
        del view
        assert live.now == 0
        assert live.most >= kept


def test_the_fullest_pass_of_several_meets_all_gradients_and_the_only_one_makes_them() -> None:
    gradients = 4 * num_parameters(SHAPE)
    only, first_of_two = pass_memory(MODEL, rows(4)), pass_memory(MODEL, rows(8))
    assert (only.tokens, only.trained_tokens, only.is_only) == (4 * 63, 4 * 16, True)
    assert (first_of_two.tokens, first_of_two.is_only) == (only.tokens, False)
    assert first_of_two.most > gradients + only.num_kept
    assert only.most < first_of_two.most
    kept = pass_memory(replace(MODEL, keeps_gradients=True), rows(4))
    assert kept.most == first_of_two.most
    assert pass_memory(MODEL, rows(5)).most < first_of_two.most, "a small pass meets them behind a full one"


def test_a_pass_keeps_less_with_an_adapter_in_16_bits_or_layers_that_are_computed_again() -> None:
    plain = pass_memory(MODEL, rows(4))
    again = replace(MODEL, optimizer=replace(MODEL.optimizer, gradient_checkpointing=True))
    assert pass_memory(again, rows(4)).num_kept < plain.num_kept / 2
    assert pass_memory(replace(MODEL, number_type="bfloat16"), rows(4)).num_kept < plain.num_kept
    adapter = LoraConfig(rank=4, targets=["q_proj", "v_proj"])
    of_adapter = 4 * lora_parameters(SHAPE, 4, frozenset(adapter.targets))
    with_adapter = pass_memory(replace(MODEL, lora=adapter, keeps_gradients=True), rows(4))
    assert with_adapter.most < pass_memory(replace(MODEL, keeps_gradients=True), rows(4)).most
    assert with_adapter.most > of_adapter


def test_a_pass_without_contents_leaves_nothing_behind_for_real_ones() -> None:
    shape = replace(SHAPE, norm_eps=1.25e-6)  # which no other test has looked at
    pass_memory(replace(MODEL, shape=shape), rows(2))
    decoder = Decoder(shape)
    decoder.initialize(torch.Generator().manual_seed(0))
    states = decoder.hidden(torch.arange(3), torch.arange(3), lambda layer, q, k, v: q)
    assert type(states) is torch.Tensor
    assert states.isfinite().all()


def test_rows_of_a_group_stay_together_where_they_must() -> None:
    pair = [replace(row, group_key=("pair", "agent")) for row in rows(6)]
    apart = pass_memory(replace(MODEL, optimizer=OptimizerConfig(micro_batch_tokens=64)), pair)
    together = replace(MODEL, optimizer=OptimizerConfig(micro_batch_tokens=64), whole_groups=True)
    assert apart.tokens == 63
    assert pass_memory(together, pair).tokens == 6 * 63
