import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.advantages import ESTIMATORS, dr_grpo_advantages, estimator_named, grpo_advantages
from rllm.config.policies import ESTIMATORS as CONFIGURED
from rllm.errors import ConfigError

groups = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


def _grpo_by_hand(rewards: list[float], *, ddof: int = 0, eps: float = 1e-6) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof)
    return [(reward - mean) / (math.sqrt(variance) + eps) for reward in rewards]


@given(groups)
def test_grpo_is_the_distance_from_the_groups_mean_in_standard_deviations(rewards: list[float]) -> None:
    assert grpo_advantages(np.array(rewards)) == pytest.approx(_grpo_by_hand(rewards), abs=1e-10, rel=1e-6)


@given(st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=2, max_size=12))
def test_grpo_equals_brute_force_to_the_tenth_digit_on_rewards_of_a_grid(rewards: list[float]) -> None:
    assert np.abs(grpo_advantages(np.array(rewards)) - _grpo_by_hand(rewards)).max() <= 1e-10


@given(groups)
def test_dr_grpo_is_the_distance_from_the_mean_and_nothing_more(rewards: list[float]) -> None:
    mean = math.fsum(rewards) / len(rewards)
    assert dr_grpo_advantages(np.array(rewards)) == pytest.approx([r - mean for r in rewards], abs=1e-10)


def test_a_table_by_hand() -> None:
    advantages = grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0]), eps=0.0)
    assert advantages == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], abs=1e-12)
    assert dr_grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0])).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_the_configuration_knows_the_same_estimators_and_what_they_compare() -> None:
    assert {name: each.within_groups for name, each in ESTIMATORS.items()} == CONFIGURED


@pytest.mark.parametrize("name", sorted(name for name, each in ESTIMATORS.items() if each.has_baseline))
def test_equal_rewards_and_single_attempts_teach_nothing(name: str) -> None:
    estimate = estimator_named(name).estimate
    assert estimate(np.array([0.5, 0.5, 0.5])).tolist() == [0.0, 0.0, 0.0]
    assert estimate(np.array([2.0])).tolist() == [0.0]


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no advantage estimator `gpro`; choose one of grpo, dr_grpo"):
        estimator_named("gpro")


def _groups_of(oracle: dict[str, Any]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(oracle["groups"]):
        rows.setdefault(group, []).append(row)
    return rows


def _verl(oracle: dict[str, Any], row: int) -> float:
    """verl hands out a value per token; all unmasked ones of a row are the same."""
    values = {value for value, kept in zip(oracle["grpo"][row], oracle["mask"][row], strict=True) if kept}
    assert len(values) == 1
    return values.pop()


def test_verl_differs_from_us_by_the_sample_standard_deviation_and_in_nothing_else(
    oracle: dict[str, Any],
) -> None:
    for rows in _groups_of(oracle).values():
        if len(rows) == 1:
            continue
        rewards = [oracle["rewards"][row] for row in rows]
        theirs = [_verl(oracle, row) for row in rows]
        assert _grpo_by_hand(rewards, ddof=1) == pytest.approx(theirs, abs=2e-6)
        shrink = math.sqrt((len(rows) - 1) / len(rows))  # what ddof = 1 makes of an advantage
        assert grpo_advantages(np.array(rewards)) * shrink == pytest.approx(theirs, abs=2e-6)


def test_verl_gives_a_lonely_attempt_its_raw_reward_where_we_give_nothing(oracle: dict[str, Any]) -> None:
    ((row,),) = (rows for rows in _groups_of(oracle).values() if len(rows) == 1)
    assert oracle["rewards"][row] == 2.0
    assert _verl(oracle, row) == pytest.approx(2.0, abs=1e-5)
    assert grpo_advantages(np.array([2.0])).tolist() == [0.0]
