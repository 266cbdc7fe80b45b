"""One adapter on both sides: updates of the service against updates of our own backend on torch.

    the service's new adapter ──► read from its checkpoint ──► the same adapter here
    the same rows ──► three updates there, three here ──► norms of the gradients, log-probabilities afterwards

Both have A of the service's start and B = 0, scaled by 32 / rank, and AdamW with the same settings; gradients
are clipped nowhere, which the local server cannot do.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from protobuf_front import protobuf_front

from rllm.algorithms.losses import ImitationLoss, Loss, PolicyLoss
from rllm.algorithms.surrogates import ClippedRatio, ClippedWeight, ImportanceRatio, PolicyGradient
from rllm.config.loader import load_config
from rllm.config.optimizer import OptimizerConfig
from rllm.integrations.tinker.backend import TINKER, TinkerBackend, merge
from rllm.models.directory import describe_model, load_model
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.sample import NOT_SAMPLED, TrainingSample

# The client leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
LOSSES: dict[str, Loss] = {
    "ppo": PolicyLoss(surrogate=ClippedRatio(clip_low=0.1, clip_high=0.2), aggregation="sequence_mean"),
    "cispo": PolicyLoss(surrogate=ClippedWeight(), aggregation="group_mean"),
    "importance_sampling": PolicyLoss(surrogate=ImportanceRatio()),
    "policy_gradient": PolicyLoss(surrogate=PolicyGradient(), aggregation="sequence_sum"),
    "imitation": ImitationLoss(),
}
OPTIMIZER = OptimizerConfig(max_grad_norm=1e9, weight_decay=0.1)
RATE = 3e-3


def rows(seed: int) -> list[TrainingSample]:
    """Of unequal length, with tokens between that nobody sampled; one says the same whatever it is paid."""
    draws = np.random.default_rng(seed)
    samples: list[TrainingSample] = []
    for number, length in enumerate((9, 21, 14, 30)):
        sampled_T = draws.random(length) < 0.6
        sampled_T[0], sampled_T[-1] = False, True
        paid_T = np.where(sampled_T, draws.normal(size=length) if number < 3 else 0.0, 0.0)
        samples.append(
            TrainingSample(
                token_ids_T=draws.integers(4, 600, length),
                policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
                logprobs_T=np.where(sampled_T, -6.4 + draws.normal(size=length) / 5, 0.0).astype(np.float32),
                advantages_T=paid_T.astype(np.float32),
                group_key=("a" if number < 3 else "b", "agent"),
                order_key=("a", number, 0, 0),
            )
        )
    return samples


def backend_of(model: Path) -> TinkerBackend:
    config = load_config((f"model.path={model}", "backend=tinker", "lora.rank=4"))
    config.optimizer = OPTIMIZER
    return TINKER.policy(config, TINKER.load(config), publish=lambda version: None)


def same_adapter_here(theirs: TinkerBackend, model: Path, directory: Path) -> TorchBackend:
    for name, content in theirs.service.adapter_files(theirs.service.keep_sampler("start")).items():
        (directory / name).write_bytes(content)
    return TorchBackend(merge(model, directory).model, publish=lambda version: None, config=OPTIMIZER)


def trained(samples: list[TrainingSample], scores: Any) -> np.ndarray:
    return np.concatenate([each[row.trainable_T] for each, row in zip(scores, samples, strict=True)])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("connected")
def test_three_updates_of_the_service_are_three_updates_of_ours(
    name: str, model: Path, tmp_path: Path
) -> None:
    require_same_updates(name, model, tmp_path)


def test_a_service_that_asks_for_protobuf_makes_the_same_updates(
    service: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates and forward passes go there as protobuf, log-probabilities come back as such."""
    with protobuf_front(service.base_url) as front:
        for name, value in (service.environment | {"TINKER_BASE_URL": front.base_url}).items():
            monkeypatch.setenv(name, value)
        require_same_updates("ppo", model, tmp_path)
    assert front.num_passes == front.num_answers == 5, "three updates, and two passes that score"


def require_same_updates(name: str, model: Path, tmp_path: Path) -> None:
    theirs = backend_of(model)
    ours = same_adapter_here(theirs, model, tmp_path)
    held_out = rows(100)
    before = trained(held_out, ours.score(held_out))
    np.testing.assert_allclose(trained(held_out, theirs.score(held_out)), before, atol=2e-5)
    for step in range(3):
        mine, other = (each.update(rows(step), LOSSES[name], RATE) for each in (ours, theirs))
        for measure in {*mine, *other} - {"skipped_updates"}:
            assert other[measure] == pytest.approx(mine[measure], rel=2e-3, abs=2e-5), (step, measure)
    after = trained(held_out, ours.score(held_out))
    gap = np.abs(trained(held_out, theirs.score(held_out)) - after).max()
    moved = np.abs(after - before).max()
    print(f"{name}: moved by {moved:.3g} nats, apart by {gap:.2g}")
    assert gap < 0.01 * moved
    assert theirs.policy_version == ours.policy_version == 3


@pytest.mark.usefixtures("connected")
def test_what_was_learned_is_kept_forgotten_and_brought_back(model: Path, tmp_path: Path) -> None:
    """save, load; an optimizer without moments; the merged model of a finished run."""
    theirs, loss, held_out = backend_of(model), LOSSES["imitation"], rows(100)
    theirs.update(rows(0), loss, RATE)
    theirs.save(tmp_path)
    kept = trained(held_out, theirs.score(held_out))
    theirs.update(rows(1), loss, RATE)
    learned = trained(held_out, theirs.score(held_out))
    assert np.abs(learned - kept).max() > 1e-3

    other = backend_of(model)
    other.load(tmp_path)
    assert other.policy_version == 1
    np.testing.assert_allclose(trained(held_out, other.score(held_out)), kept, atol=1e-5)
    other.update(rows(1), loss, RATE)  # with the moments of the first update
    np.testing.assert_allclose(trained(held_out, other.score(held_out)), learned, atol=1e-5)

    TINKER.save(describe_model(model, model=other.service), tmp_path / "model", tmp_path / "adapter")
    here = TorchBackend(load_model(tmp_path / "model").model, publish=lambda version: None)
    np.testing.assert_allclose(trained(held_out, here.score(held_out)), learned, atol=2e-5)

    unpaid = [replace(each, advantages_T=np.zeros_like(each.advantages_T)) for each in rows(2)]
    still = replace(OPTIMIZER, weight_decay=0.0)
    other.config = still
    other.reset_optimizer()
    before = trained(held_out, other.score(held_out))
    other.update(unpaid, LOSSES["ppo"], RATE)  # a gradient of 0: whatever moves is a moment that was left
    np.testing.assert_allclose(trained(held_out, other.score(held_out)), before, atol=1e-6)
