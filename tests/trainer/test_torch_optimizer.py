"""Optimizers by name: what each moves, and that their state survives a checkpoint."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.losses import PolicyLoss
from rllm.config.loader import load_config
from rllm.config.lora import LoraConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.errors import ConfigError, MissingExtraError
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.backends.torch_optimizer import AdamW, AdamW8bit
from rllm.trainer.distribution import require_distributed
from rllm.trainer.extras import require_training_packages
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_the_one_of_torch_bit_for_bit(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    shapes = [(24, 8), (8,), (5, 3)]
    start = [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]
    ours, theirs = ([each.clone().requires_grad_() for each in start] for _ in range(2))
    mine = AdamW(ours, betas=(0.9, 0.95), weight_decay=0.1)
    peer = torch.optim.AdamW(theirs, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(4):
        gradients: list[Tensor | None] = [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]
        if step == 1:
            gradients[2] = None  # one that no row of a batch reached
        for some in (ours, theirs):
            for weight, gradient in zip(some, gradients, strict=True):
                weight.grad = gradient
        peer.param_groups[0]["lr"] = 0.01 * (step + 1)
        mine.step(0.01 * (step + 1))
        peer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert mine.state[one].keys() == peer.state[other].keys()
        for name, value in mine.state[one].items():
            assert torch.equal(value, peer.state[other][name])
            assert value.dtype is peer.state[other][name].dtype


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


def test_moments_in_8_bits_move_a_weight_as_those_of_32_bits_do_within_their_rounding() -> None:
    """The first step, whose moments are not read, is the same; what eight add up to is within 5 %."""
    draw = torch.Generator().manual_seed(3)
    start = torch.randn(80, 60, generator=draw)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    betas = (0.9, 0.95)
    in_8_bits = AdamW8bit([ours], betas=betas, weight_decay=0.1)
    in_32_bits = AdamW([theirs], betas=betas, weight_decay=0.1)
    slope = torch.randn(80, 60, generator=draw)
    for step in range(8):
        gradient = slope + 0.3 * torch.randn(80, 60, generator=draw)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        in_8_bits.step(0.01 * (step + 1))
        in_32_bits.step(0.01 * (step + 1))
        assert ours.isfinite().all()
        if step == 0:  # the moments are not read before they are there
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    mine, its = ours.detach() - start, theirs.detach() - start
    assert (mine - its).norm() < 0.05 * its.norm()
    state = in_8_bits.state[ours]
    assert sum(each.numel() * each.element_size() for each in state.values()) < 2.1 * start.numel()


def test_matrices_of_layers_have_moments_in_8_bits_and_the_rest_in_32(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    model = decoder(hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
    learner = backend(model, name="adamw8bit")
    learner.update(batch, PolicyLoss(), RATE)
    moments = {
        key.removesuffix(".exp_avg"): each.dtype
        for key, each in learner._optimizer.tensors().items()
        if key.endswith(".exp_avg")
    }
    large = {
        name
        for name, each in model.named_parameters()
        if _is_matrix_of_a_layer(name, each) and each.numel() >= 4096
    }
    assert {name for name, dtype in moments.items() if dtype == torch.uint8} == large != set()
    assert {dtype for name, dtype in moments.items() if name not in large} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "reason"), [("adafactor", "rows and columns"), ("adamw8bit", "blocks of 256")]
)
def test_what_looks_at_a_whole_matrix_is_refused_where_processes_have_parts(name: str, reason: str) -> None:
    for spread in ("distributed.strategy=shard", "distributed.tensor_parallel=2"):
        config = load_config([f"optimizer.name={name}", spread])
        with pytest.raises(ConfigError, match=reason):
            require_distributed(config, 2, is_program=False)


def test_adafactor_is_refused_where_it_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="Adafactor"):
        load_config(["optimizer.name=adafactor", "optimizer.beta1=0.5"])


def test_a_missing_package_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else object())
    require_training_packages(OptimizerConfig(), LoraConfig())
    with pytest.raises(MissingExtraError, match=re.escape("rllm[bitsandbytes]")):
        require_training_packages(OptimizerConfig(name="adamw8bit"), LoraConfig())
    with pytest.raises(MissingExtraError, match=re.escape("rllm[bitsandbytes]")):
        require_training_packages(OptimizerConfig(), LoraConfig(rank=4, base_dtype="nf4"))


@pytest.mark.parametrize("name", ["adafactor", "adamw", "adamw8bit", "muon"])
def test_a_loaded_checkpoint_goes_on_to_the_same_weights(
    decoder: Make, backend: Make, batch: list[TrainingSample], tmp_path: Path, name: str
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
    }  # some matrices have moments in 8 bits
    learner = backend(decoder(**sizes), name=name, weight_decay=0.1)
    for _ in range(3):
        learner.update(batch, PolicyLoss(), RATE)
    learner.save(tmp_path)
    other = backend(decoder(**sizes), name=name, weight_decay=0.1)
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
