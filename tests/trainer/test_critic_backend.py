"""A critic on torch: values by definition, what an update learns, and one trunk for policy and critic."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.algorithms.losses import ActorCriticLoss, PolicyLoss, ValueLoss, token_weights
from rllm.config.optimizer import OptimizerConfig
from rllm.trainer.backends.critic import CriticBackend
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]


@pytest.fixture
def critic(decoder: Make) -> Make:
    def make(seed: int = 0, **changes: Any) -> CriticBackend:
        model = decoder(2, seed=seed).double()
        learner = CriticBackend(model, config=OptimizerConfig(**{"max_grad_norm": 1e12, **changes}))
        assert learner.value_head is not None
        torch.nn.init.normal_(learner.value_head.weight, generator=torch.Generator().manual_seed(5))
        return learner

    return make


@pytest.fixture
def with_returns(batch: list[TrainingSample]) -> list[TrainingSample]:
    """The batch with what a critic said and should have said."""
    rng = np.random.default_rng(0)
    return [
        replace(
            sample,
            values_T=np.where(sample.trainable_T, rng.normal(size=sample.num_tokens), 0.0).astype(np.float32),
            returns_T=np.where(sample.trainable_T, rng.normal(size=sample.num_tokens), 0.0).astype(
                np.float32
            ),
        )
        for sample in batch
    ]


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (
        q.transpose(0, 1),
        k.repeat_interleave(repeat, 1).transpose(0, 1),
        v.repeat_interleave(repeat, 1),
    )
    scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, float("-inf")).softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)


def _plain_values(learner: Any, sample: TrainingSample) -> Tensor:
    """[T] the head on the state before each token, from one pass over the row alone."""
    tokens = torch.from_numpy(sample.token_ids_T)
    states = learner.model.hidden(tokens, torch.arange(len(tokens)), _attend)
    head = learner.value_head
    own = states[:-1] @ head.weight[0].to(states.dtype) + head.bias.to(states.dtype)
    return torch.cat((own.new_zeros(1), own))


def test_a_critic_that_never_learned_expects_nothing(decoder: Make, batch: list[TrainingSample]) -> None:
    learner = CriticBackend(decoder(), config=OptimizerConfig())
    assert all(not values_T.any() for values_T in learner.values(batch))


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 16_384])
def test_a_value_is_the_head_on_the_state_before_its_token(
    critic: Make, batch: list[TrainingSample], micro_batch_tokens: int
) -> None:
    learner = critic(micro_batch_tokens=micro_batch_tokens)
    for found_T, sample in zip(learner.values(batch), batch, strict=True):
        expected_T = _plain_values(learner, sample).detach().numpy()
        assert found_T.shape == sample.token_ids_T.shape
        assert np.abs(found_T - np.where(sample.trainable_T, expected_T, 0.0)).max() <= 1e-6


def test_an_update_of_the_critic_has_the_gradient_of_rows_computed_alone(
    critic: Make, with_returns: list[TrainingSample]
) -> None:
    learner = critic(micro_batch_tokens=30)
    learner.update(with_returns, ValueLoss(clip=0.0), 0.0)
    found = {
        name: each.grad.clone() for name, each in learner._weights.by_name.items() if each.grad is not None
    }
    learner.model.zero_grad()
    learner.value_head.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    weights = token_weights(with_returns, "token_mean")
    for sample, weights_T in zip(with_returns, weights, strict=True):
        errors_T = _plain_values(learner, sample) - torch.from_numpy(sample.returns_T)
        total = total + (0.5 * errors_T.square() * torch.from_numpy(weights_T)).sum()
    total.backward()
    assert "value_head.weight" in found
    assert (
        max(float((each - learner._weights.by_name[name].grad).abs().max()) for name, each in found.items())
        <= 1e-10
    )


def test_a_critic_learns_what_it_is_told(critic: Make, with_returns: list[TrainingSample]) -> None:
    learner = critic()
    errors = [learner.update(with_returns, ValueLoss(clip=0.0), 1e-2)["value_error"] for _ in range(20)]
    assert errors[-1] < 0.5 * errors[0]
    assert learner.policy_version == 20


def test_a_saved_critic_goes_on_bit_for_bit(
    critic: Make, with_returns: list[TrainingSample], tmp_path: Path
) -> None:
    first, second = critic(), critic(seed=4)
    first.update(with_returns, ValueLoss(clip=0.2), 1e-2)
    first.save(tmp_path)
    second.load(tmp_path)
    for learner in (first, second):
        learner.update(with_returns, ValueLoss(clip=0.2), 1e-2)
    for mine_T, theirs_T in zip(first.values(with_returns), second.values(with_returns), strict=True):
        assert np.array_equal(mine_T, theirs_T)


def test_one_trunk_learns_from_policy_and_value_terms_at_once(
    decoder: Make, backend: Make, with_returns: list[TrainingSample]
) -> None:
    def gradient(loss: Any) -> dict[str, Tensor]:
        learner = backend(decoder().double(), value_head=True, max_grad_norm=1e12)
        torch.nn.init.constant_(learner.value_head.weight, 0.3)
        learner.update(with_returns, loss, 0.0)
        return {name: each.grad for name, each in learner._weights.by_name.items() if each.grad is not None}

    policy, value = PolicyLoss(), ValueLoss(clip=0.2)
    both = gradient(ActorCriticLoss(policy=policy, value=value, coef=0.5))
    of_policy, of_value = gradient(policy), gradient(value)
    assert both.keys() == of_value.keys() >= of_policy.keys()
    for name, each in both.items():
        parts = 0.5 * of_value[name] + of_policy.get(name, torch.zeros_like(each))
        assert (each - parts).abs().max() <= 1e-10


def test_a_value_head_is_saved_with_its_trunk(
    decoder: Make, backend: Make, with_returns: list[TrainingSample], tmp_path: Path
) -> None:
    first = backend(decoder(), value_head=True)
    loss = ActorCriticLoss(policy=PolicyLoss(), value=ValueLoss(clip=0.2), coef=0.5)
    first.update(with_returns, loss, 1e-2)
    first.save(tmp_path)
    second = backend(decoder(seed=3), value_head=True)
    second.load(tmp_path)
    assert any(values_T.any() for values_T in first.values(with_returns))
    for mine_T, theirs_T in zip(first.values(with_returns), second.values(with_returns), strict=True):
        assert np.array_equal(mine_T, theirs_T)
