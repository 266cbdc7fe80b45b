"""Optimizers by name: what each moves, and that their state survives a checkpoint."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.losses import PolicyLoss
from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.distribution import require_distributed
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]
RATE = 1e-3


def _weights(learner: TorchBackend) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in learner.model.named_parameters()}


def _is_matrix_of_a_layer(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and name.startswith("blocks.")


@pytest.mark.parametrize("tied", [True, False])
def test_muon_moves_matrices_of_layers_and_adamw_the_rest(
    decoder: Make, backend: Make, batch: list[TrainingSample], tied: bool
) -> None:
    model = decoder(tied=tied)
    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    learner = backend(model, name="muon")
    learner.update(batch, PolicyLoss(), RATE)
    with_muon = _weights(learner)
    model.load_state_dict(start, strict=False)
    other = backend(model, name="adamw")
    other.update(batch, PolicyLoss(), RATE)
    with_adamw = _weights(other)
    matrices = [name for name, each in start.items() if _is_matrix_of_a_layer(name, each)]
    assert len(matrices) == 4 * len(model.blocks)
    for name, before in start.items():
        if name not in matrices:
            assert torch.equal(with_muon[name], with_adamw[name]), name
            continue
        # Orthogonal up to what five Newton-Schulz iterations leave over, and as long as a step of AdamW.
        moved = (with_muon[name] - before).double() / (RATE * 0.2 * math.sqrt(max(before.shape)))
        strengths = torch.linalg.svdvals(moved)
        assert 0.6 < strengths.median() < 1.3, name
        assert strengths.max() < 1.4, name


def test_adafactor_moves_each_matrix_by_the_means_of_its_rows_and_columns(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    """Against the first step of algorithm 4 of the paper, where the means are those of one gradient."""
    model = decoder(tied=False)
    before = {name: each.detach().clone().double() for name, each in model.named_parameters()}
    learner = backend(model, name="adafactor", max_grad_norm=1e9)
    gradients: dict[str, Tensor] = {}
    optimizer = learner._optimizer
    step = optimizer.step

    def watched(rate: float) -> None:
        gradients.update({name: each.grad.double() for name, each in optimizer._weights.items()})
        step(rate)

    optimizer.step = watched
    learner.update(batch, PolicyLoss(), RATE)
    for name, after in _weights(learner).items():
        gradient, weight = gradients[name], before[name]
        square = gradient.square()
        if weight.ndim == 2:
            rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
            square = rows * columns / rows.mean()
        move = gradient / square.clamp(min=1e-20).sqrt()
        move /= max(1.0, float(move.square().mean().sqrt()))
        rate = RATE * max(1e-3, float(weight.square().mean().sqrt()))
        torch.testing.assert_close(after.double(), weight - rate * move, rtol=0, atol=3e-7, msg=name)
        if weight.ndim == 2:
            state = [each for key, each in optimizer.tensors().items() if key.startswith(name + ".")]
            assert sum(each.numel() for each in state) == sum(weight.shape) + 1


def test_adafactor_is_refused_where_it_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="Adafactor has no such mean"):
        load_config(["optimizer.name=adafactor", "optimizer.beta1=0.5"])
    for spread in ("distributed.strategy=shard", "distributed.tensor_parallel=2"):
        config = load_config(["optimizer.name=adafactor", spread])
        with pytest.raises(ConfigError, match="whole rows and columns"):
            require_distributed(config, 2, is_program=False)


@pytest.mark.parametrize("name", ["adafactor", "adamw", "muon"])
def test_a_loaded_checkpoint_goes_on_to_the_same_weights(
    decoder: Make, backend: Make, batch: list[TrainingSample], tmp_path: Path, name: str
) -> None:
    learner = backend(decoder(), name=name, weight_decay=0.1)
    for _ in range(3):
        learner.update(batch, PolicyLoss(), RATE)
    learner.save(tmp_path)
    other = backend(decoder(), name=name, weight_decay=0.1)
    other.load(tmp_path)
    for each in (learner, other):
        each.update(batch, PolicyLoss(), RATE)
    assert other.policy_version == learner.policy_version == 4
    mine, theirs = _weights(learner), _weights(other)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_new_phase_forgets_the_moments(decoder: Make, backend: Make, batch: list[TrainingSample]) -> None:
    learner = backend(decoder(), name="muon")
    start = _weights(learner)
    learner.update(batch, PolicyLoss(), RATE)
    first = _weights(learner)
    learner.reset_optimizer()
    learner.model.load_state_dict(start, strict=False)
    learner.update(batch, PolicyLoss(), RATE)
    assert all(torch.equal(first[key], each) for key, each in _weights(learner).items())
