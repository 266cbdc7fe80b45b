from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rllm.algorithms.losses import ActorCriticLoss, PolicyLoss, ValueLoss, token_weights
from rllm.algorithms.surrogates import ClippedRatio
from rllm.config.optimizer import OptimizerConfig
from rllm.models import packing
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


def test_a_shared_prompt_is_there_once(group: Make) -> None:
    (batch,) = _packed(group("t", 20, ["ss", "sss", "soo"]))
    # The prompt once; each row: its own tokens, but for the last that is trained: a target only.
    assert len(batch.tokens_N) == 20 + 1 + 2 + 0
    assert len(batch.kept_K) == 1 + 1 + 2
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
        states = batch.kept_K if batch.state_U is None else batch.kept_K[batch.state_U]
        predicted_by_M = batch.of_tokens(states)
        targets_M = batch.of_tokens(batch.targets_U)
        assert [samples[row].token_ids_T[place] for row, place in places] == targets_M.tolist()
        predicted_by = batch.tokens_N[predicted_by_M].tolist()
        assert predicted_by == [samples[row].token_ids_T[place - 1] for row, place in places]
        positions = batch.positions_N[predicted_by_M].tolist()
        assert positions == [place - 1 for _, place in places]
        longest = max(row.last for row in _rows(samples) if row.index in set(batch.row_M.tolist()))
        assert len(batch.tokens_N) <= max(max_tokens, longest)
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


@st.composite
def _trees(draw: st.DrawFn) -> list[TrainingSample]:
    """Attempts, turns of their own, branches and other roles of one task: each row goes on from some place of
    an earlier one, and trains any of its tokens, of those that it shares as well."""
    ids = [draw(st.lists(st.integers(0, 3), min_size=2, max_size=9))]
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from(ids))
        fork = draw(st.integers(1, len(parent)))
        ids.append([*parent[:fork], *draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))])
    samples: list[TrainingSample] = []
    for number, row in enumerate(ids):
        trained_T = np.array(draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))))

        def numbers(low: float, high: float, trained_T: Any = trained_T) -> Any:
            drawn = [draw(st.floats(low, high, width=32)) for _ in trained_T]
            return np.where(trained_T, drawn, 0.0).astype(np.float32)

        samples.append(
            TrainingSample(
                token_ids_T=np.array(row),
                policy_versions_T=np.where(trained_T, 0, NOT_SAMPLED),
                logprobs_T=numbers(-2.0, -1.0),
                advantages_T=numbers(-1.0, 1.0),
                ref_logprobs_T=numbers(-2.0, -1.0),
                values_T=numbers(-1.0, 1.0),
                returns_T=numbers(-1.0, 1.0),
                group_key=("t", draw(st.sampled_from(["solver", "judge"]))),
                order_key=("t", number, 0, 0),
                temperature=draw(st.sampled_from([1.0, 1.0, 0.5])),
            )
        )
    return samples


class _GroupRatio(ClippedRatio):
    """Has all rows of a group in one micro-batch."""

    needs_whole_groups = True


@given(_trees(), st.integers(1, 60), st.sampled_from([1 << 26, 1]), st.booleans())
@settings(max_examples=25)
def test_any_tree_has_the_gradient_of_its_rows_computed_apart(
    samples: list[TrainingSample], max_tokens: int, most_masked: int, whole_groups: bool
) -> None:
    """Of policy, KL, entropy and critic; also where masks would be too large, and where groups are whole."""
    if not any(sample.num_trainable for sample in samples):
        return
    surrogate = _GroupRatio() if whole_groups else ClippedRatio()
    policy = PolicyLoss(surrogate=surrogate, kl_coef=0.3, entropy_coef=0.2)
    loss = ActorCriticLoss(policy=policy, value=ValueLoss(clip=0.2), coef=0.5)

    def learned(**how: Any) -> tuple[list[Tensor], list[Any], list[Any]]:
        share = how.pop("share_prefixes", True)
        config = OptimizerConfig(max_grad_norm=1e12, **how)
        learner = TorchBackend(
            MODEL, publish=lambda version: None, config=config, share_prefixes=share, value_head=True
        )
        head = learner.value_head
        assert head is not None
        with torch.no_grad():
            head.weight.fill_(0.3)
        learner.update(samples, loss, 0.0)
        parameters = [*MODEL.parameters(), *head.parameters()]
        grads = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in parameters]
        return grads, learner.score(samples), learner.values(samples)

    apart = learned(share_prefixes=False, micro_batch_tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MOST_MASKED", most_masked)
        for how in ({}, {"micro_batch_tokens": max_tokens}):
            grads, scores, values = learned(**how)
            for one, other in zip(apart[0], grads, strict=True):
                assert (one - other).abs().max() <= 1e-10
            for one, other in ((apart[1], scores), (apart[2], values)):
                assert all(np.allclose(*pair, atol=1e-6) for pair in zip(one, other, strict=True))


def test_a_row_of_each_turn_costs_what_the_last_turn_costs(sample: Make) -> None:
    whole = sample("pppp" + "ssoo" * 5, seed=1)
    turns: list[TrainingSample] = []
    for turn in range(5):
        versions_T = np.where(
            np.arange(whole.num_tokens) // 4 == turn + 1, whole.policy_versions_T, NOT_SAMPLED
        )
        end = 4 * (turn + 2)
        turns.append(
            TrainingSample(
                token_ids_T=whole.token_ids_T[:end],
                policy_versions_T=versions_T[:end],
                logprobs_T=np.where(versions_T >= 0, whole.logprobs_T, 0.0)[:end],
                advantages_T=np.where(versions_T >= 0, whole.advantages_T, 0.0)[:end],
                group_key=whole.group_key,
                order_key=("t", 0, 0, turn),
            )
        )
    (alone,), (batch,) = _packed([whole]), _packed(turns)
    assert batch.tokens_N.tolist() == alone.tokens_N.tolist()
    assert batch.kept_K.tolist() == alone.kept_K.tolist()
