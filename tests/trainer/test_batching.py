from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rllm.algorithms.losses import PolicyLoss, token_weights
from rllm.config.optimizer import OptimizerConfig
from rllm.models.batching import PackedBatch, micro_batches
from rllm.models.decoder import Decoder, DecoderShape
from rllm.models.packing import WeightedRow
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.sample import NOT_SAMPLED, TrainingSample

Make = Callable[..., Any]
CPU = torch.device("cpu")


def _rows(samples: list[TrainingSample]) -> list[WeightedRow]:
    weights = token_weights(samples, "token_mean")
    return [
        WeightedRow(index=index, sample=sample, weights_T=weights_T)
        for index, (sample, weights_T) in enumerate(zip(samples, weights, strict=True))
    ]


def _packed(samples: list[TrainingSample], max_tokens: int = 10_000, **how: Any) -> list[PackedBatch]:
    return list(micro_batches(_rows(samples), max_tokens, CPU, **how))


def test_a_shared_prompt_is_there_once_and_the_token_before_the_first_answer_in_every_row(
    group: Make,
) -> None:
    (batch,) = _packed(group("t", 20, ["ss", "sss", "soo"]))
    # 19 prompt tokens once; each row: the last prompt token and its own, but for the last that is trained: a
    # target only.
    assert len(batch.tokens_N) == 19 + 2 + 3 + 1
    (unshared,) = _packed(group("t", 20, ["ss", "sss", "soo"]), share_prefixes=False)
    assert len(unshared.tokens_N) == (20 + 1) + (20 + 2) + 20


def test_rows_share_only_as_far_as_they_are_equal(group: Make) -> None:
    rows = group("t", 20, ["ss", "ss"])
    rows[1].token_ids_T[7] = (rows[1].token_ids_T[7] + 1) % 40
    (batch,) = _packed(rows)
    assert len(batch.tokens_N) == 7 + 2 * (21 - 7)


def test_a_prompt_is_not_shared_between_tasks_however_equal(sample: Make) -> None:
    rows = [sample("ppps", seed=1, task=task, prefix=[1, 2, 3]) for task in ("a", "b")]
    (batch,) = _packed(rows)
    assert len(batch.tokens_N) == 6


@pytest.mark.parametrize("share_prefixes", [True, False])
@given(max_tokens=st.integers(1, 80), data=st.data())
@settings(max_examples=30)
def test_every_trained_token_is_in_exactly_one_micro_batch_of_bounded_size(
    share_prefixes: bool, max_tokens: int, data: st.DataObject
) -> None:
    samples = data.draw(batches)
    seen: list[tuple[int, int]] = []
    for batch in _packed(samples, max_tokens, share_prefixes=share_prefixes):
        places = list(zip(batch.row_M.tolist(), batch.place_M.tolist(), strict=True))
        seen += places
        assert [samples[row].token_ids_T[place] for row, place in places] == batch.targets_M.tolist()
        predicted_by = batch.tokens_N[batch.predicted_by_M].tolist()
        assert predicted_by == [samples[row].token_ids_T[place - 1] for row, place in places]
        positions = batch.positions_N[batch.predicted_by_M].tolist()
        assert positions == [place - 1 for _, place in places]
        assert len(set(batch.row_M.tolist())) == 1 or len(batch.tokens_N) <= max_tokens
    expected = [
        (row, place)
        for row, each in enumerate(samples)
        for place in np.flatnonzero(each.trainable_T).tolist()
    ]
    assert sorted(seen) == expected


@st.composite
def _batches(draw: st.DrawFn) -> list[TrainingSample]:
    """Tasks with up to four attempts, over so few tokens that beginnings agree by chance as well."""
    samples: list[TrainingSample] = []
    for task in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
        for attempt in range(draw(st.integers(1, 4))):
            rest = draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8))
            ids = [*prompt, *(token for token, _ in rest)]
            sampled_T = np.array([False] * len(prompt) + [flag for _, flag in rest])
            samples.append(
                TrainingSample(
                    token_ids_T=np.array(ids),
                    policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
                    logprobs_T=np.where(sampled_T, -1.5, 0.0).astype(np.float32),
                    advantages_T=np.where(sampled_T, draw(st.sampled_from([-1.0, 0.5])), 0.0).astype(
                        np.float32
                    ),
                    group_key=(f"t{task}", "agent"),
                    order_key=(f"t{task}", attempt, 0, 0),
                )
            )
    return samples


batches = _batches()

MODEL = Decoder(
    DecoderShape(
        vocab_size=4,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        norm_eps=1e-6,
        rope_theta=100.0,
        max_positions=32,
        tied=False,
        qkv_bias=True,
        out_bias=False,
        qk_norm=True,
    )
).double()
MODEL.initialize(torch.Generator().manual_seed(1), scale=2.0)


@given(batches, st.integers(1, 60), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_packing_order_and_sharing_change_neither_loss_nor_gradient(
    samples: list[TrainingSample], max_tokens: int, rng: Any
) -> None:
    def learned(rows: list[TrainingSample], **how: Any) -> tuple[float, list[Tensor]]:
        share = how.pop("share_prefixes", True)
        config = OptimizerConfig(max_grad_norm=1e12, **how)
        learner = TorchBackend(MODEL, publish=lambda version: None, config=config, share_prefixes=share)
        loss = learner.update(rows, PolicyLoss(), 0.0)["loss"]
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in MODEL.parameters()]
        return loss, [grad.clone() for grad in grads]

    if not any(sample.num_trainable for sample in samples):
        return
    loss, grads = learned(samples, share_prefixes=False, micro_batch_tokens=1)
    shuffled = list(samples)
    rng.shuffle(shuffled)
    for how in ({}, {"micro_batch_tokens": max_tokens}, {"share_prefixes": False}):
        other_loss, other_grads = learned(shuffled, **how)
        assert other_loss == pytest.approx(loss, abs=1e-10)
        for grad, other in zip(grads, other_grads, strict=True):
            assert (grad - other).abs().max() <= 1e-10
