"""On a decision process small enough to sum over all its answers: whose mean gradient is the policy's own.

        ┌─ end                              answers of one or two tokens, so lengths differ;
start ──┼─ a ──┬─ end                       the reward depends on the whole answer
        └─ b ──┼─ a
               └─ b
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rllm.algorithms.aggregation import Aggregation, FixedLength, token_weights
from rllm.algorithms.losses import PolicyLoss, TokenInputs
from rllm.algorithms.surrogates import ClippedRatio, surrogate_named
from rllm.config.algorithm import LOSSES, AlgorithmConfig
from rllm.types.sample import TrainingSample

END, NUM_CHOICES = 0, 3
ANSWERS = ((END,), *((first, second) for first in (1, 2) for second in range(NUM_CHOICES)))
REWARDS = torch.tensor([0.3, 0.0, 1.0, 0.2, -0.5, 0.4, 0.9], dtype=torch.float64)
POLICY = torch.tensor([[0.4, -0.2, 0.1], [0.5, 0.0, -0.3], [-0.4, 0.6, 0.1]], dtype=torch.float64)
ELSEWHERE = POLICY + torch.tensor([[0.2, -0.1, 0.0], [0.0, 0.3, -0.2], [0.1, 0.1, -0.3]], dtype=torch.float64)

Flagged = Callable[..., TrainingSample]


def _logprobs(logits: Tensor) -> list[Tensor]:
    """Of each token of each answer."""
    tables = logits.log_softmax(1)
    return [
        torch.stack([tables[answer[0] if place else 0, token] for place, token in enumerate(answer)])
        for answer in ANSWERS
    ]


def _probabilities(logits: Tensor) -> Tensor:
    return torch.stack([each.sum() for each in _logprobs(logits)]).exp()


def _exact(logits: Tensor) -> Tensor:
    """Gradient of the expected reward."""
    leaf = logits.clone().requires_grad_()
    (_probabilities(leaf) * REWARDS).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def _mean_descent(
    loss: PolicyLoss,
    flagged: Flagged,
    *,
    at: Tensor = POLICY,
    sampled_from: Tensor = POLICY,
    baseline: float = 0.0,
) -> Tensor:
    """Minus the gradient of the loss at the policy `at`, averaged over the answers of another one.

    As many rows of each answer as it is likely, so one update sees the whole distribution.
    """
    leaf = at.clone().requires_grad_()
    new, old = _logprobs(leaf), [each.detach() for each in _logprobs(sampled_from)]
    lengths = torch.tensor([len(answer) for answer in ANSWERS])
    row_M = torch.arange(len(ANSWERS)).repeat_interleave(lengths)
    likely = _probabilities(sampled_from).detach()
    shares = [
        w[1:] for w in token_weights([flagged([1] * len(answer)) for answer in ANSWERS], loss.aggregation)
    ]
    weights = torch.cat([torch.from_numpy(share) for share in shares]) * likely[row_M] * len(ANSWERS)
    tokens = TokenInputs(
        new_M=torch.cat(new),
        old_M=torch.cat(old),
        advantages_M=(REWARDS - baseline)[row_M],
        weights_M=weights,
        row_M=row_M,
        group_R=torch.zeros(len(ANSWERS), dtype=torch.int64),
        chosen_M=torch.zeros_like(weights),
    )
    (loss.terms(tokens) * weights).sum().backward()
    assert leaf.grad is not None
    return -leaf.grad


def _policy_loss(name: str, aggregation: Aggregation = "sequence_sum") -> PolicyLoss:
    return PolicyLoss(surrogate=surrogate_named(AlgorithmConfig(loss=name)), aggregation=aggregation)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_with_sums_over_tokens_every_loss_has_the_exact_policy_gradient_in_its_first_update(
    flagged: Flagged, name: str
) -> None:
    exact = _exact(POLICY)
    assert exact.abs().max() > 0.05
    assert (_mean_descent(_policy_loss(name), flagged) - exact).abs().max() < 1e-12


def test_a_baseline_changes_nothing_on_average(flagged: Flagged) -> None:
    found = _mean_descent(_policy_loss("ppo"), flagged, baseline=0.7)
    assert (found - _exact(POLICY)).abs().max() < 1e-12


def test_a_fixed_length_is_the_same_gradient_in_another_unit_and_a_mean_over_each_answer_is_another_one(
    flagged: Flagged,
) -> None:
    """Dr. GRPO's point: dividing by the answer's own length is biased where lengths differ."""
    exact = _exact(POLICY)
    fixed = _mean_descent(_policy_loss("ppo", FixedLength(num_tokens=4)), flagged)
    assert (fixed * 4 - exact).abs().max() < 1e-12
    own = _mean_descent(_policy_loss("ppo", "sequence_mean"), flagged)
    cosine = float((own * exact).sum() / own.norm() / exact.norm())
    assert 0.5 < cosine < 0.999


def test_a_later_update_goes_up_the_surrogate_not_the_reward(flagged: Flagged) -> None:
    """Per-token ratios leave out how likely the answer was to get that far; both point the same way."""
    wide = PolicyLoss(surrogate=ClippedRatio(clip_low=0.999, clip_high=1e9), aggregation="sequence_sum")
    exact = _exact(ELSEWHERE)
    found = _mean_descent(wide, flagged, at=ELSEWHERE)
    stale = _mean_descent(_policy_loss("policy_gradient"), flagged, at=ELSEWHERE)
    assert 1e-3 < (found - exact).norm() < (stale - exact).norm()
    assert float((found * exact).sum() / found.norm() / exact.norm()) > 0.95
