"""Bad updates: what is one, whom it blames, and that it changes nothing."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.algorithms.losses import ImitationLoss, PolicyLoss, TokenInputs
from rllm.config.optimizer import OptimizerConfig
from rllm.errors import ConfigError, NumericsError
from rllm.trainer.backends.guard import MIN_UPDATES, RunningNorm
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]


@dataclass(kw_only=True, slots=True, frozen=True)
class ScaledLoss(ImitationLoss):
    """Cross-entropy, times something."""

    scale: float = 1.0

    def terms(self, tokens: TokenInputs) -> Tensor:
        return -self.scale * tokens.new_M


def _weights(learner: Any) -> list[Tensor]:
    return [each.detach().clone() for each in learner.model.parameters()]


def _unchanged(learner: Any, before: list[Tensor]) -> bool:
    return all(torch.equal(each, old) for each, old in zip(learner.model.parameters(), before, strict=True))


@pytest.fixture
def trained(decoder: Make, backend: Make, batch: list[TrainingSample]) -> Make:
    """A learner that has seen enough norms to compare with."""

    def make(**changes: Any) -> Any:
        learner = backend(decoder(), max_norm_factor=20.0, **changes)
        for _ in range(MIN_UPDATES):
            learner.update(batch, ImitationLoss(), 1e-4)
        return learner

    return make


def test_a_norm_far_above_the_running_one_stops_the_run_and_names_who_pulled_hardest(
    trained: Make, batch: list[TrainingSample]
) -> None:
    learner = trained()
    before = _weights(learner)
    heavy = batch[3]
    place = int(np.flatnonzero(heavy.trainable_T)[0])
    heavy.advantages_T[place] = 1e6
    heavy.logprobs_T[place] = learner.score([heavy])[0][place]  # a ratio of 1, which nothing clips
    with pytest.raises(NumericsError, match=r"norm .*max_norm_factor` allows 20") as caught:
        learner.update(batch, PolicyLoss(), 1e-2)
    first = str(caught.value).partition("hardest pulled ")[2].partition(";")[0]
    assert first == f"token {place} (id {heavy.token_ids_T[place]}) of {heavy.order_key}"
    assert "skip" in str(caught.value)
    assert _unchanged(learner, before)
    assert learner.policy_version == MIN_UPDATES


def test_an_exploding_update_is_skipped_and_counted_where_that_is_asked_for(
    trained: Make, batch: list[TrainingSample], caplog: pytest.LogCaptureFixture
) -> None:
    learner = trained(on_bad_update="skip")
    before = _weights(learner)
    with caplog.at_level(logging.WARNING):
        metrics = learner.update(batch, ScaledLoss(scale=1e5), 1e-2)
    assert metrics["skipped_updates"] == 1.0
    assert "left out" in caplog.text
    assert _unchanged(learner, before)
    assert learner.policy_version == MIN_UPDATES
    assert learner.update(batch, ImitationLoss(), 1e-2)["skipped_updates"] == 0.0
    assert not _unchanged(learner, before)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_with_a_term_that_is_no_number_is_skipped_with_metrics_of_the_others(
    decoder: Make, backend: Make, batch: list[TrainingSample], value: float, caplog: pytest.LogCaptureFixture
) -> None:
    learner = backend(decoder(), on_bad_update="skip", micro_batch_tokens=40)
    before = _weights(learner)
    good = learner.update(batch, PolicyLoss(), 0.0)
    batch[3].advantages_T[batch[3].trainable_T] = value
    metrics = learner.update(batch, PolicyLoss(), 1e-2)
    assert metrics["skipped_updates"] == 1.0
    assert metrics.keys() == good.keys()
    assert all(np.isfinite(each) for each in metrics.values())
    assert str(batch[3].order_key) in caplog.text
    assert _unchanged(learner, before)
    assert all(each.grad is None for each in learner.model.parameters())


def test_without_a_factor_a_large_norm_is_only_scaled_down(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    learner = backend(decoder())
    for _ in range(MIN_UPDATES):
        learner.update(batch, ImitationLoss(), 1e-4)
    assert learner.update(batch, ScaledLoss(scale=1e5), 1e-4)["skipped_updates"] == 0.0


def test_a_lasting_rise_is_followed_and_a_single_one_is_not() -> None:
    norm = RunningNorm()
    for _ in range(20):
        norm.add(1.0, 10.0)
    norm.add(1e9, 10.0)
    assert norm.mean < 2.0
    for _ in range(60):
        norm.add(100.0, 10.0)
    assert norm.limit(10.0) > 500.0


def test_nothing_is_too_large_beside_norms_of_zero() -> None:
    norm = RunningNorm()
    for _ in range(20):
        norm.add(0.0, 10.0)
    assert norm.limit(10.0) == float("inf")


def test_what_is_normal_survives_a_checkpoint(
    trained: Make, batch: list[TrainingSample], tmp_path: Path
) -> None:
    first = trained()
    first.save(tmp_path)
    second = trained()
    second.reset_optimizer()
    second.load(tmp_path)
    with pytest.raises(NumericsError, match="running norm"):
        second.update(batch, ScaledLoss(scale=1e5), 1e-2)


@pytest.mark.parametrize("factor", [-1.0, 0.5, 1.0, float("inf"), float("nan")])
def test_a_factor_that_no_norm_could_keep_to_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.max_norm_factor"):
        OptimizerConfig(max_norm_factor=factor).validate()
