"""Weights of an update: what they sum to, whom they count, and that verl's five modes are among them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.aggregation import (
    AGGREGATIONS,
    Aggregation,
    FixedLength,
    aggregation_named,
    token_weights,
)
from rllm.config import algorithm as config_algorithm
from rllm.errors import ConfigError
from rllm.types.sample import TrainingSample

Flagged = Callable[..., TrainingSample]
EVERY: list[Aggregation] = [*AGGREGATIONS, FixedLength(num_tokens=8)]
masks = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from("abc")), min_size=1, max_size=7
)


def _total(samples: list[TrainingSample], aggregation: Aggregation) -> float:
    return sum(float(weights_T.sum()) for weights_T in token_weights(samples, aggregation))


@given(rows=masks)
def test_untrained_tokens_weigh_nothing_and_means_sum_to_one(
    flagged: Flagged, rows: list[tuple[list[bool], str]]
) -> None:
    samples = [flagged(flags, task) for flags, task in rows]
    counts = [sum(flags) for flags, _ in rows if any(flags)]
    mean_length = sum(counts) / max(1, len(counts))
    sums: dict[Aggregation, float] = {"sequence_sum": mean_length, FixedLength(num_tokens=8): mean_length / 8}
    for aggregation in EVERY:
        for sample, weights_T in zip(samples, token_weights(samples, aggregation), strict=True):
            assert ((weights_T > 0) == sample.trainable_T).all()
            assert weights_T.dtype == np.float64
        expected = sums.get(aggregation, 1.0) if counts else 0.0
        assert _total(samples, aggregation) == pytest.approx(expected, abs=1e-12)


@given(rows=masks)
def test_rows_and_tokens_without_training_change_no_weight(
    flagged: Flagged, rows: list[tuple[list[bool], str]]
) -> None:
    plain = [flagged([flag for flag in flags if flag], task) for flags, task in rows]
    padded = [flagged(flags, task) for flags, task in rows] + [flagged([False, False], "d")]
    for aggregation in EVERY:
        first = [w[w > 0].tolist() for w in token_weights(plain, aggregation)]
        second = [w[w > 0].tolist() for w in token_weights(padded, aggregation)]
        assert [*first, []] == second


def test_who_is_counted_is_a_choice(flagged: Flagged) -> None:
    samples = [flagged([1, 1, 1], "a"), flagged([0, 1], "a"), flagged([0], "a"), flagged([1, 1], "b")]
    shares = {
        "token_mean": [1 / 6, 1 / 6, 1 / 6],
        "sequence_mean": [1 / 9, 1 / 3, 1 / 6],
        "sequence_sum": [1 / 3, 1 / 3, 1 / 3],
        "group_mean": [1 / 8, 1 / 8, 1 / 4],
    }
    for aggregation, (long, short, other) in shares.items():
        found = token_weights(samples, aggregation)
        assert found[0] == pytest.approx(np.array([0, long, long, long]))
        assert found[1] == pytest.approx(np.array([0, 0, short]))
        assert found[2].tolist() == [0, 0]
        assert found[3] == pytest.approx(np.array([0, other, other]))
    fixed = token_weights(samples, FixedLength(num_tokens=50))
    assert fixed[0] == pytest.approx(np.array([0, 1 / 150, 1 / 150, 1 / 150]))


def test_a_longer_answer_weighs_more_only_where_tokens_are_summed(flagged: Flagged) -> None:
    samples = [flagged([1]), flagged([1] * 9)]
    ratio = {}
    for aggregation in EVERY:
        short, long = (float(weights_T.sum()) for weights_T in token_weights(samples, aggregation))
        ratio[str(aggregation)] = long / short
    assert ratio.pop("sequence_mean") == pytest.approx(1.0)
    assert list(ratio.values()) == pytest.approx([9.0] * 4)


@pytest.mark.parametrize(
    ("theirs", "ours", "factor"),
    [
        ("token-mean", "token_mean", 1),
        ("token-sum", "token_mean", 55),
        ("seq-mean-token-sum", "sequence_sum", 1),
        ("seq-mean-token-mean", "sequence_mean", 1),
        ("seq-mean-token-sum-norm", FixedLength(num_tokens=12), 1),
    ],
)
def test_verls_modes_are_ours_also_beside_a_row_without_tokens(
    flagged: Flagged, verl_losses: dict[str, Any], theirs: str, ours: Aggregation, factor: int
) -> None:
    oracle = verl_losses["aggregation"]
    assert sum(map(sum, oracle["mask"])) == 55
    assert [0] * 12 in oracle["mask"]
    weights = token_weights([flagged(row) for row in oracle["mask"]], ours)
    loss = sum(
        float((weights_T[1:] * row).sum()) for weights_T, row in zip(weights, oracle["terms"], strict=True)
    )
    assert loss * factor == pytest.approx(oracle["loss"][theirs], rel=1e-6)


def test_what_the_configuration_offers_is_what_there_is(flagged: Flagged) -> None:
    assert {*config_algorithm.AGGREGATIONS} == {*AGGREGATIONS, "constant"}
    for name in config_algorithm.AGGREGATIONS:
        assert _total([flagged([1, 0, 1])], aggregation_named(name, 2.0)) == pytest.approx(
            2.0 if name == "sequence_sum" else 1.0
        )


def test_an_unknown_aggregation_and_an_impossible_length_are_refused(flagged: Flagged) -> None:
    with pytest.raises(ConfigError, match=r"`mean`.*token_mean, sequence_mean"):
        token_weights([flagged([True])], "mean")
    assert aggregation_named("constant", 0.5) == FixedLength(num_tokens=0.5)
    with pytest.raises(ConfigError, match=r"aggregation_constant` is 0;.*above 0"):
        aggregation_named("constant", 0)
