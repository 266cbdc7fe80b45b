"""The tokens that `clip_cov` and `kl_cov` treat apart: against tables by hand, and through the trainer."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.covariance import covariances, drawn_between, largest
from rllm.algorithms.losses import TokenInputs, policy_loss
from rllm.algorithms.surrogates import ClippedCovariance, PenalisedCovariance, Tapered
from rllm.config.algorithm import AlgorithmConfig
from rllm.errors import ConfigError
from rllm.trainer.update_checks import TASKS, UpdateProbe
from rllm.types.sample import NOT_SAMPLED, TrainingSample


def _row(logprobs: Sequence[float | None], advantage: float, task: str = "t") -> TrainingSample:
    """A row behind one prompt token; None is a token that nobody sampled."""
    sampled_T = np.array([False, *(each is not None for each in logprobs)])
    return TrainingSample(
        token_ids_T=np.arange(len(sampled_T)),
        policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
        logprobs_T=np.array([0.0, *(each or 0.0 for each in logprobs)], dtype=np.float32),
        advantages_T=np.where(sampled_T, advantage, 0.0).astype(np.float32),
        group_key=(task, "agent"),
        order_key=(task, 0, 0, 0),
    )


ROWS = [_row([-1.0, None, -3.0], 2.0), _row([-2.0, -6.0], -1.0)]
BY_HAND = [3.0, 0.0, -1.5, 4.5]
"""Log-probabilities are 2, 0, 1 and -3 above their mean of -3, advantages 1.5, 1.5, -1.5, -1.5 above 0.5."""


def _chosen(rows: Sequence[TrainingSample]) -> list[list[float]]:
    columns: list[NDArray[np.float32]] = [each.chosen_T for each in rows if each.chosen_T is not None]
    return [column.tolist() for column in columns]


def test_covariances_are_over_all_trained_tokens_of_the_update() -> None:
    assert covariances(ROWS) == pytest.approx(BY_HAND, abs=1e-6)
    alone = np.concatenate([covariances([row]) for row in ROWS])
    assert np.abs(alone).max() < 1e-6  # within a row all advantages are the same
    assert len(covariances([])) == 0


def test_kl_cov_chooses_the_largest_one_at_least() -> None:
    surrogate = PenalisedCovariance()
    assert _chosen(surrogate.chosen(ROWS)) == [[0, 0, 0, 0], [0, 0, 1]]
    assert _chosen(replace(surrogate, fraction=0.5).chosen(ROWS)) == [[0, 1, 0, 0], [0, 0, 1]]
    assert surrogate.chosen([]) == []
    assert largest(np.array([1.0, 1.0, 0.0]), 0.4).tolist() == [0]  # the first of equals


def test_clip_cov_draws_between_its_bounds_by_seed_and_step() -> None:
    surrogate = ClippedCovariance(fraction=0.25, low=1.0, high=5.0)  # one of the two within
    picks = set()
    for seed in range(16):
        context = AlgorithmContext(seed=seed)
        (first, second) = (_chosen(replace(surrogate, context=context).chosen(ROWS)) for _ in range(2))
        assert first == second
        picks.add(tuple(map(tuple, first)))
    assert surrogate.chosen([]) == []
    assert _chosen(surrogate.chosen(ROWS[:1])) == [[0, 0, 0, 0]]
    assert picks == {((0, 1, 0, 0), (0, 0, 0)), ((0, 0, 0, 0), (0, 0, 1))}
    other = replace(surrogate, low=4.0)
    assert _chosen(other.chosen(ROWS)) == [[0, 0, 0, 0], [0, 0, 1]]
    assert not np.any(_chosen(replace(surrogate, low=7.0, high=9.0).chosen(ROWS))[0])
    assert drawn_between(np.ones(1000), 0.01, 0.0, 2.0, 3).tolist() != list(range(10))
    assert len(drawn_between(np.ones(1000), 0.01, 0.0, 2.0, 3)) == 10


def test_updates_of_one_step_that_begin_with_other_tasks_have_draws_of_their_own() -> None:
    differ = False
    for seed in range(16):
        surrogate = ClippedCovariance(fraction=0.25, low=1.0, high=5.0, context=AlgorithmContext(seed=seed))
        of_other_task = [replace(row, group_key=("u", "agent")) for row in ROWS]
        differ = differ or _chosen(surrogate.chosen(ROWS)) != _chosen(surrogate.chosen(of_other_task))
    assert differ


def _tokens(**changes: torch.Tensor) -> TokenInputs:
    new_M = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    given = TokenInputs(
        new_M=new_M,
        old_M=torch.tensor([-1.5, -1.0, -1.5], dtype=torch.float64),
        advantages_M=torch.tensor([2.0, -1.0, 1.0], dtype=torch.float64),
        weights_M=torch.ones(3, dtype=torch.float64),
        row_M=torch.tensor([0, 0, 1]),
        group_R=torch.tensor([0, 0]),
        chosen_M=torch.tensor([0.0, 1.0, 1.0]),
    )
    return replace(given, **changes)


def test_terms_by_hand() -> None:
    half, whole = np.exp(0.5), np.exp(1.0)
    clipped = ClippedCovariance().terms(_tokens())
    assert clipped.tolist() == pytest.approx([-1.2 * 2.0, 0.0, 0.0])
    held = PenalisedCovariance(kl_coef=0.5).terms(_tokens())
    assert held.tolist() == pytest.approx(
        [-half * 2.0, 1.0 / whole + 0.5 * (1.0 / whole), -whole + 0.5 * (whole - 2.0)]
    )
    with pytest.raises(ConfigError, match="chosen"):
        PenalisedCovariance().terms(_tokens(chosen_M=None))  # type: ignore[arg-type]


def test_clip_cov_counts_as_clipped_what_is_beyond_its_bounds_and_what_was_drawn() -> None:
    tokens = _tokens(
        old_M=torch.tensor([-1.0, -2.0, -1.5], dtype=torch.float64), chosen_M=torch.tensor([0.0, 1.0, 0.0])
    )
    assert ClippedCovariance().clipped_M(tokens).tolist() == [False, True, True]


def test_topr_tapers_what_became_unlikely_and_was_bad() -> None:
    """Row 0 is exp(0.5 - 1) as likely as it was, row 1 exp(1) times; by hand."""
    terms = policy_loss(AlgorithmConfig(loss="topr")).terms(_tokens())
    assert terms.tolist() == pytest.approx([2.0, np.exp(-0.5) * -2.0, 0.5])
    worse = policy_loss(AlgorithmConfig(loss="topr")).terms(_tokens(advantages_M=-_tokens().advantages_M))
    assert worse.tolist() == pytest.approx([np.exp(-0.5) * -2.0, 2.0, -0.5])


def test_topr_counts_as_clipped_what_was_bad_in_a_row_that_became_likelier() -> None:
    """Row 0 became exp(-0.5) times as likely, row 1 exp(1) times."""
    surrogate = Tapered()
    assert surrogate.clipped_M(_tokens()).tolist() == [False, False, False]
    worse = _tokens(advantages_M=-_tokens().advantages_M)
    assert surrogate.clipped_M(worse).tolist() == [False, False, True]
    assert not surrogate.clipped_M(_tokens(advantages_M=torch.zeros(3, dtype=torch.float64))).any()


def test_a_covariance_on_a_bound_is_not_drawn() -> None:
    assert drawn_between(np.array([1.0, 2.0, 3.0]), 1.0, 1.0, 3.0, 0).tolist() == [1]


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_the_applied_update_has_the_choice_of_the_whole_update_whatever_the_micro_batches(loss: str) -> None:
    """In the first update of a step: as PPO, without the tokens that `clip_cov` left out."""
    bounds = ("algorithm.cov_low=-9", "algorithm.cov_high=9") if loss == "clip_cov" else ()
    more = ("algorithm.estimator=rloo", "algorithm.cov_fraction=0.4", *bounds)
    picks = ((0, 1, 2), (0, 1))
    found = [
        UpdateProbe((f"algorithm.loss={loss}", *more, f"optimizer.micro_batch_tokens={size}")).gradient(picks)
        for size in (1, 16_384)
    ]
    assert (found[0] - found[1]).abs().max() < 1e-9
    plain = UpdateProbe(("algorithm.estimator=rloo",))
    difference = (plain.gradient(picks) - found[1]).abs().max() / plain.slopes(TASKS[0]).abs().max()
    assert (difference > 1e-3) == (loss == "clip_cov")
