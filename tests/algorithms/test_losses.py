from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rllm.algorithms.losses import ImitationLoss, PolicyLoss, TokenInputs, token_weights
from rllm.errors import ConfigError
from rllm.types.sample import NOT_SAMPLED, TrainingSample

AGGREGATIONS = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}
"""Ours, and what verl calls it."""


def _sample(trainable: list[bool]) -> TrainingSample:
    """A row with a prompt token in front, so that every flag may be set."""
    size = len(trainable) + 1
    return TrainingSample(
        token_ids_T=np.zeros(size, dtype=np.int64),
        policy_versions_T=np.array([NOT_SAMPLED, *[0 if flag else NOT_SAMPLED for flag in trainable]]),
        logprobs_T=np.zeros(size, dtype=np.float32),
        advantages_T=np.zeros(size, dtype=np.float32),
        group_key=("t", "agent"),
        order_key=("t", 0, 0, 0),
    )


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=7)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@given(flags=masks)
def test_the_weights_of_an_update_sum_to_one_and_leave_untrained_tokens_out(
    aggregation: str, flags: list[list[bool]]
) -> None:
    samples = [_sample(row) for row in flags]
    weights = token_weights(samples, aggregation)
    for sample, weights_T in zip(samples, weights, strict=True):
        assert ((weights_T > 0) == sample.trainable_T).all()
    total = sum(weights_T.sum() for weights_T in weights)
    assert total == pytest.approx(1.0 if any(map(any, flags)) else 0.0, abs=1e-12)


def test_a_token_mean_counts_tokens_and_a_sequence_mean_counts_sequences() -> None:
    samples = [_sample([True, True, True]), _sample([False, True]), _sample([False])]
    assert [row.tolist() for row in token_weights(samples, "token_mean")] == [
        [0.0, 0.25, 0.25, 0.25],
        [0.0, 0.0, 0.25],
        [0.0, 0.0],
    ]
    assert [row.tolist() for row in token_weights(samples, "sequence_mean")] == [
        [0.0, *[pytest.approx(1 / 6)] * 3],
        [0.0, 0.0, 0.5],
        [0.0, 0.0],
    ]


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ConfigError, match="no aggregation `mean`; choose token_mean or sequence_mean"):
        token_weights([_sample([True])], "mean")


def _inputs(new: Tensor, old: Tensor, advantages: Tensor) -> TokenInputs:
    """One row of equally weighted tokens."""
    row = torch.zeros(len(new), dtype=torch.int64)
    return TokenInputs(
        new_M=new,
        old_M=old,
        advantages_M=advantages,
        weights_M=torch.ones_like(new),
        row_M=row,
        group_R=row[:1],
    )


def _columns(oracle: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = torch.tensor(oracle["mask"], dtype=torch.bool)
    new, old, advantages = (
        torch.tensor(oracle[name], dtype=torch.float64) for name in ("new", "old", "grpo")
    )
    return mask, new, old, advantages


def _dual_clipped(oracle: dict[str, Any]) -> Tensor:
    """Where verl also bounds the loss of a bad token by 3 |A|; we have the clip of the ratio alone."""
    mask, new, old, advantages = _columns(oracle)
    return mask & (advantages < 0) & ((new - old).exp() > oracle["dual_clip"])


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_loss_and_gradient_are_verls_but_for_the_token_that_verl_clips_a_second_time(
    oracle: dict[str, Any], aggregation: str
) -> None:
    mask, new, old, advantages = _columns(oracle)
    second = _dual_clipped(oracle)
    assert int(second.sum()) == 1
    new.requires_grad_()
    loss = PolicyLoss(clip_low=oracle["clip_low"], clip_high=oracle["clip_high"], aggregation=aggregation)
    weights = torch.tensor(
        np.stack([w[1:] for w in token_weights([_sample(row) for row in mask.tolist()], aggregation)])
    )
    terms = loss.terms(_inputs(new[mask], old[mask], advantages[mask]))
    (terms * weights[mask]).sum().backward()

    theirs = oracle["loss"][AGGREGATIONS[aggregation]]
    their_grad = torch.tensor(theirs["grad"], dtype=torch.float64)
    assert (new.grad - their_grad)[mask & ~second].abs().max() < 1e-7
    assert new.grad[~mask].abs().max() == 0.0

    ratio = (new.detach() - old).exp()[second]
    ours, bounded = -ratio * advantages[second], -oracle["dual_clip"] * advantages[second]
    difference = float((weights[second] * (bounded - ours)).sum())
    assert difference < 0.0
    assert float((terms * weights[mask]).sum().detach()) + difference == pytest.approx(
        theirs["loss"], abs=2e-7
    )
    assert their_grad[second].item() == 0.0
    assert new.grad[second].item() == pytest.approx(float((weights[second] * ours).sum()), abs=1e-12)


@given(st.lists(st.tuples(st.floats(-1.5, 1.5), st.floats(-3, 0), st.floats(-2, 2)), min_size=1, max_size=8))
def test_the_gradient_is_the_slope_of_the_loss(rows: list[tuple[float, float, float]]) -> None:
    moved, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    loss = PolicyLoss(clip_low=0.2, clip_high=0.28)
    new = (old + moved).requires_grad_()
    loss.terms(_inputs(new, old, advantages)).sum().backward()
    h = 1e-6
    with torch.no_grad():
        above, below = (loss.terms(_inputs(new + sign * h, old, advantages)) for sign in (1, -1))
    ratio = (new.detach() - old).exp()
    smooth = ((ratio - 0.8).abs() > 1e-4) & ((ratio - 1.28).abs() > 1e-4)  # at a bound there are two slopes
    slopes = (above - below) / (2 * h)
    assert torch.allclose(slopes[smooth], new.grad[smooth], atol=1e-7)


def test_a_token_past_the_clip_in_the_direction_of_its_advantage_has_no_gradient() -> None:
    old = torch.zeros(4, dtype=torch.float64)
    new = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    PolicyLoss().terms(_inputs(new, old, torch.tensor([1.0, -1.0, -1.0, 1.0]))).sum().backward()
    assert (new.grad == 0.0).tolist() == [True, True, False, False]


def test_imitation_is_cross_entropy_whatever_was_sampled_and_paid() -> None:
    new = torch.tensor([-0.5, -2.0])
    terms = ImitationLoss().terms(_inputs(new, torch.tensor([9.0, 9.0]), torch.tensor([-1.0, 7.0])))
    assert terms.tolist() == [0.5, 2.0]
