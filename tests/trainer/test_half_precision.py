"""Training in bfloat16: float32 masters beside what the sampler shares."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.losses import ImitationLoss, PolicyLoss
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]


def _half(decoder: Make, **changes: Any) -> Any:
    return decoder(2, **changes).to(torch.bfloat16)


def _gradients(learner: Any) -> dict[str, Tensor]:
    return {name: each.grad for name, each in learner._weights.by_name.items()}


def test_gradients_are_those_of_float32_up_to_the_precision_of_the_weights(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    half = backend(_half(decoder), max_grad_norm=1e12)
    exact_model = decoder(2)
    exact_model.load_state_dict({name: each.float() for name, each in half.model.state_dict().items()})
    exact = backend(exact_model, max_grad_norm=1e12)
    for learner in (half, exact):
        learner.update(batch, ImitationLoss(), 0.0)
    for name, expected in _gradients(exact).items():
        found = _gradients(half)[name]
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= 0.05 * expected.norm()


def test_micro_batches_add_up_in_float32(decoder: Make, backend: Make, sample: Make) -> None:
    rows = [sample("pps", task=f"t{index}") for index in range(600)]  # all the same
    learner = backend(_half(decoder), max_grad_norm=1e12, micro_batch_tokens=2)
    learner.update(rows, ImitationLoss(aggregation="sequence_sum"), 0.0)
    many = _gradients(learner)
    one = backend(_half(decoder), max_grad_norm=1e12)
    one.update(rows[:1], ImitationLoss(aggregation="sequence_sum"), 0.0)
    for name, expected in _gradients(one).items():
        if expected is not None:
            assert (many[name] - expected).norm() <= 0.02 * expected.norm(), name


def test_steps_too_small_for_bfloat16_add_up_in_the_masters(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    learner = backend(_half(decoder))
    before = {name: each.detach().clone() for name, each in learner.model.named_parameters()}
    for _ in range(3):
        learner.update(batch, ImitationLoss(), 1e-4)
    masters = learner._weights.by_name
    moved = [(masters[name] - before[name].float()).abs().max() for name in before]
    assert min(moved) > 1e-5
    for name, each in learner.model.named_parameters():
        assert each.dtype == torch.bfloat16
        assert torch.equal(each, masters[name].to(torch.bfloat16))
        assert each.grad is None


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_learner_in_bfloat16_goes_on_bit_for_bit_from_its_masters(
    decoder: Make, backend: Make, batch: list[TrainingSample], tmp_path: Path, name: str
) -> None:
    first, second = backend(_half(decoder), name=name), backend(_half(decoder, seed=5), name=name)
    for _ in range(2):
        first.update(batch, PolicyLoss(), 1e-3)
    first.save(tmp_path)
    second.load(tmp_path)
    for _ in range(2):
        assert first.update(batch, PolicyLoss(), 1e-3) == second.update(batch, PolicyLoss(), 1e-3)
    for mine, theirs in zip(first._weights.by_name.values(), second._weights.by_name.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_new_phase_keeps_the_masters(decoder: Make, backend: Make, batch: list[TrainingSample]) -> None:
    learner = backend(_half(decoder))
    learner.update(batch, ImitationLoss(), 1e-4)
    before = {name: each.detach().clone() for name, each in learner._weights.by_name.items()}
    learner.reset_optimizer()
    assert all(torch.equal(each, learner._weights.by_name[name]) for name, each in before.items())
    learner.update(batch, ImitationLoss(), 1e-3)
    assert any(not torch.equal(each, learner._weights.by_name[name]) for name, each in before.items())


def test_log_probabilities_are_float32(decoder: Make, backend: Make, batch: list[TrainingSample]) -> None:
    learner = backend(_half(decoder), logits_mb=0.003)
    assert learner.is_half
    exact = backend(decoder(2))
    assert not exact.is_half
    for half_T, exact_T in zip(learner.score(batch), exact.score(batch), strict=True):
        assert half_T.dtype == exact_T.dtype
        assert abs(half_T - exact_T).max(initial=0.0) < 0.1
