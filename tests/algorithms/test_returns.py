import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.returns import gae, returns_to_go, whiten

numbers = st.floats(-10, 10)
discounts = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
tokens = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12)
"""(reward, value) of each trained token."""


def test_gae_of_three_tokens_by_hand() -> None:
    """γ = 1/2, λ = 1/2, so each later δ counts a quarter of the one before it.

    | t | r | V | δ = r + V'/2 - V | A = δ + A'/4 | return A + V |
    |---|---|---|------------------|--------------|--------------|
    | 0 | 0 | 2 | 0 + 2 - 2 =  0   | 0 - 0.5      | 1.5          |
    | 1 | 1 | 4 | 1 + 1 - 4 = -2   | -2 + 0       | 2            |
    | 2 | 2 | 2 | 2 + 0 - 2 =  0   | 0            | 2            |
    """
    advantages_T, returns_T = gae(np.array([0.0, 1.0, 2.0]), np.array([2.0, 4.0, 2.0]), gamma=0.5, lam=0.5)
    assert advantages_T.tolist() == [-0.5, -2.0, 0.0]
    assert returns_T.tolist() == [1.5, 2.0, 2.0]


def test_returns_of_three_turns_by_hand() -> None:
    assert returns_to_go(np.array([1.0, 0.0, 4.0]), 0.5).tolist() == [2.0, 2.0, 4.0]
    assert returns_to_go(np.array([1.0, 0.0, 4.0]), 1.0).tolist() == [5.0, 4.0, 4.0]
    assert returns_to_go(np.array([1.0, 0.0, 4.0]), 0.0).tolist() == [1.0, 0.0, 4.0]


@given(st.lists(numbers, max_size=12), discounts)
def test_a_return_is_the_discounted_sum_of_what_is_paid_from_there_on(
    rewards: list[float], gamma: float
) -> None:
    found = returns_to_go(np.array(rewards), gamma)
    assert len(found) == len(rewards)
    for place, value in enumerate(found):
        later = [reward * gamma**distance for distance, reward in enumerate(rewards[place:])]
        assert abs(value - math.fsum(later)) <= 1e-10


@given(tokens, discounts, discounts)
def test_gae_is_the_sum_of_all_later_surprises(
    rows: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    """The definition: every δ behind a token, discounted by (γ λ)^distance; no recursion."""
    rewards, values = zip(*rows, strict=True)
    following = [*values[1:], 0.0]
    surprises = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    advantages_T, returns_T = gae(np.array(rewards), np.array(values), gamma=gamma, lam=lam)
    for place in range(len(rows)):
        later = [(gamma * lam) ** distance * each for distance, each in enumerate(surprises[place:])]
        assert abs(advantages_T[place] - math.fsum(later)) <= 1e-10
        assert abs(returns_T[place] - math.fsum(later) - values[place]) <= 1e-10


@given(tokens, discounts)
def test_without_trust_in_the_critic_gae_is_the_return_less_the_value(
    rows: list[tuple[float, float]], gamma: float
) -> None:
    rewards, values = np.array(rows).T
    advantages_T, returns_T = gae(rewards, values, gamma=gamma, lam=1.0)
    assert returns_T == pytest.approx(returns_to_go(rewards, gamma), abs=1e-10)
    assert advantages_T == pytest.approx(returns_to_go(rewards, gamma) - values, abs=1e-10)


def test_nothing_that_is_given_is_changed_and_float32_is_computed_in_float64() -> None:
    rewards_T, values_T = np.array([0.0, 1.0], dtype=np.float32), np.array([0.1, 0.2], dtype=np.float32)
    advantages_T, _ = gae(rewards_T, values_T, gamma=0.99, lam=0.95)
    assert advantages_T.dtype == returns_to_go(rewards_T, 0.9).dtype == np.float64
    assert (rewards_T.tolist(), values_T.dtype) == ([0.0, 1.0], np.float32)


def test_a_token_without_a_value_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"2 rewards .* 1 values"):
        gae(np.zeros(2), np.zeros(1), gamma=1.0, lam=1.0)


@given(st.lists(st.lists(st.integers(-8, 8).map(float), max_size=5), min_size=1, max_size=5))
def test_white_advantages_have_mean_0_and_variance_1_over_all_tokens_of_all_rows(
    rows: list[list[float]],
) -> None:
    found = whiten([np.array(row) for row in rows])
    assert [len(row) for row in found] == [len(row) for row in rows]
    flat = [value for row in rows for value in row]
    if not flat:
        return
    mean = math.fsum(flat) / len(flat)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in flat) / len(flat) + 1e-8)
    expected = [(value - mean) / spread for value in flat]
    assert np.abs(np.concatenate(found) - expected).max() <= 1e-10


def test_one_token_and_none_are_white_already() -> None:
    assert whiten([]) == []
    assert [row.tolist() for row in whiten([np.array([3.0]), np.zeros(0)])] == [[0.0], []]


# verl 0.9.1


@pytest.fixture(scope="module")
def verl() -> dict[str, Any]:
    """What verl 0.9.1 computes in float32, with observation tokens between those that were sampled."""
    return json.loads((Path(__file__).parent / "data" / "verl_estimators.json").read_text())


def _sampled(verl: dict[str, Any], rows: list[list[float]]) -> list[np.ndarray]:
    """The tokens that are trained on; there are observations between them."""
    return [np.array(row)[np.array(mask) == 1] for row, mask in zip(rows, verl["mask"], strict=True)]


def _sample_std(rows: list[np.ndarray]) -> float:
    """verl whitens by the sample standard deviation, over all tokens."""
    count = sum(map(len, rows))
    return math.sqrt((count - 1) / count)


def test_verl_whitens_the_same_gae_and_teaches_its_critic_the_same_returns(verl: dict[str, Any]) -> None:
    rewards, values = _sampled(verl, verl["rewards"]), _sampled(verl, verl["values"])
    found = [gae(r, v, gamma=verl["gamma"], lam=verl["lam"]) for r, v in zip(rewards, values, strict=True)]
    white = whiten([advantages_T for advantages_T, _ in found])
    expected = _sampled(verl, verl["advantages"]["gae"])
    for row, theirs in zip(white, expected, strict=True):
        assert row * _sample_std(white) == pytest.approx(theirs, abs=2e-6)
    for (_, returns_T), theirs in zip(found, _sampled(verl, verl["gae_returns"]), strict=True):
        assert returns_T == pytest.approx(theirs, abs=1e-6)


def test_verl_discounts_reinforce_plus_plus_by_tokens_as_whitened_returns_do(verl: dict[str, Any]) -> None:
    white = whiten([returns_to_go(row, verl["gamma"]) for row in _sampled(verl, verl["rewards"])])
    expected = _sampled(verl, verl["advantages"]["reinforce_plus_plus"])
    for row, theirs in zip(white, expected, strict=True):
        assert row * _sample_std(white) == pytest.approx(theirs, abs=2e-6)
