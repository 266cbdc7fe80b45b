"""Log-probabilities of trainer and reference beside a row's own, by numbers worked out by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rllm.config.supervised import EpochsConfig
from rllm.errors import ConfigError
from rllm.trainer.epochs import Epochs
from rllm.trainer.row_scores import mean_kl, with_kl_paid, with_old_logprobs, with_reference
from rllm.types.sample import NOT_SAMPLED, TrainingSample


def _row(logprobs: list[float | None], **more: Any) -> TrainingSample:
    """None where nobody sampled."""
    sampled = [each is not None for each in logprobs]
    return TrainingSample(
        token_ids_T=np.arange(len(logprobs)),
        policy_versions_T=np.where(sampled, 0, NOT_SAMPLED),
        logprobs_T=np.array([each or 0.0 for each in logprobs], dtype=np.float32),
        advantages_T=np.zeros(len(logprobs), dtype=np.float32),
        group_key=("t", "agent"),
        order_key=("t", 0, 0, 0),
        **more,
    )


def _scorer(*scores: list[float]) -> Any:
    arrays = [np.array(each, dtype=np.float32) for each in scores]
    return SimpleNamespace(score=lambda samples: arrays)


def test_the_trainers_numbers_take_the_place_of_the_samplers_and_the_widest_gap_is_told() -> None:
    rows = [_row([None, -1.0, -2.0]), _row([None, -0.5])]
    (one, other), facts = with_old_logprobs(rows, _scorer([9.0, -1.25, -1.5], [0.0, -0.75]))
    assert one.logprobs_T.tolist() == [9.0, -1.25, -1.5]
    assert one.rollout_logprobs_T is rows[0].logprobs_T
    assert other.logprobs_T.tolist() == [0.0, -0.75]
    assert facts["logprob_gap_sampler"] == 0.5, "of tokens that were sampled"
    nothing = {"logprob_gap_sampler": 0.0, "sampler_kl": 0.0}
    assert with_old_logprobs([], _scorer()) == ([], nothing)
    assert with_old_logprobs([_row([None])], _scorer([3.0]))[1] == nothing


@pytest.mark.parametrize("scores", [(np.nan, -0.75), (-0.75, np.nan)])
def test_the_widest_gap_is_no_number_where_one_of_them_is_none(scores: tuple[float, float]) -> None:
    rows = [_row([None, -1.0]), _row([None, -1.0])]
    facts = with_old_logprobs(rows, _scorer(*([0.0, score] for score in scores)))[1]
    assert np.isnan(facts["logprob_gap_sampler"])


def test_a_divergence_is_a_mean_over_trained_tokens_and_paid_for_token_by_token() -> None:
    rows = with_reference(
        [_row([None, -1.0, -2.0]), _row([None, -0.5])], _scorer([5.0, -1.5, -1.0], [5.0, -2.5])
    )
    assert mean_kl(rows, "k1") == pytest.approx((0.5 - 1.0 + 2.0) / 3)
    assert mean_kl(rows, "k1+") == mean_kl(rows, "k1")
    assert mean_kl([], "k1") == 0.0
    (alone,) = with_reference([_row([None, -1.0])], _scorer([0.0, -4.0]))
    assert mean_kl([alone], "k1") == 3.0
    alone.rewards_T = np.array([0.25, 1.0], dtype=np.float32)
    assert with_kl_paid(alone, 0.5, "k1").rewards_T == pytest.approx([0.25, 1.0 - 0.5 * 3.0])


def test_an_epoch_has_a_step_for_each_batch_begun() -> None:
    for num_examples, batch_size, steps in ((1, 1, 1), (4, 2, 2), (5, 2, 3), (3, 8, 1)):
        epochs = Epochs(num_examples, EpochsConfig(epochs=2, batch_size=batch_size))
        assert epochs.steps_per_epoch == steps
        assert epochs.num_steps == -(-2 * num_examples // batch_size)
    with pytest.raises(ConfigError):
        Epochs(0, EpochsConfig())
