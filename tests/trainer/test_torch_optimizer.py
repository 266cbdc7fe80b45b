"""Optimizers by name: what each moves, and that their state survives a checkpoint."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.losses import PolicyLoss
from rllm.trainer.backends.torch import TorchBackend
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


@pytest.mark.parametrize("name", ["adamw", "muon"])
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
