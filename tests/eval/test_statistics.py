import statistics
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.eval.pass_at_k import best_of_k, pass_at_k
from rllm.eval.report import interval_of
from rllm.eval.statistics import (
    mcnemar,
    mean_interval,
    newcombe_interval,
    percentiles,
    resampled_means,
    sign_flip_test,
    student_quantile,
    wilson_interval,
)
from rllm.eval.votes import same_answers


@pytest.mark.parametrize("num_attempts", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num_attempts: int) -> None:
    for num_correct in range(num_attempts + 1):
        right = [True] * num_correct + [False] * (num_attempts - num_correct)
        for k in range(1, num_attempts + 1):
            subsets = list(combinations(right, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_attempts, num_correct, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("num_attempts", "num_correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_estimated_is_refused(num_attempts: int, num_correct: int, k: int) -> None:
    with pytest.raises(ConfigError):
        pass_at_k(num_attempts, num_correct, k)


def test_large_numbers_neither_overflow_nor_lose_their_digits() -> None:
    assert pass_at_k(10_000, 5_000, 1) == pytest.approx(0.5, abs=1e-12)
    assert 0.0 < pass_at_k(10_000, 1, 100) == pytest.approx(0.01, rel=1e-9)


@pytest.mark.parametrize("num_tasks", [5, 12, 80])
def test_the_bootstrap_interval_covers_the_mean_about_as_often_as_it_says(num_tasks: int) -> None:
    rng = np.random.default_rng(0)
    hits, trials = 0, 400
    for trial in range(trials):
        scores_N_1 = rng.beta(2, 3, size=(num_tasks, 1))
        draws = resampled_means(scores_N_1, range(num_tasks), seed=trial, resamples=800)[:, 0]
        low, high = percentiles(draws, num_tasks)
        hits += low <= 0.4 <= high
    assert 0.92 <= hits / trials <= 0.985


def test_intervals_of_several_comparisons_hold_together() -> None:
    rng = np.random.default_rng(1)
    hits, trials = 0, 300
    for trial in range(trials):
        draws = resampled_means(rng.normal(size=(40, 6)), range(40), seed=trial, resamples=1_000)
        ends = [percentiles(draws[:, place], 40, comparisons=6) for place in range(6)]
        hits += all(low <= 0.0 <= high for low, high in ends)
    assert 0.92 <= hits / trials <= 0.985


def test_students_quantiles_are_those_of_the_tables() -> None:
    for freedom, tabled in ((1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (30, 2.04227)):
        assert student_quantile(0.05, freedom) == pytest.approx(tabled, abs=5e-5)
    assert student_quantile(0.01, 7) == pytest.approx(3.49948, abs=5e-5)
    assert student_quantile(0.05, 5_000) == pytest.approx(1.9604, abs=1e-3)


def test_the_interval_of_a_mean_is_students_and_counts_repeated_instances_once() -> None:
    values = [3.0, 5.0, 4.0, 9.0]
    margin = 3.182446305 * statistics.stdev(values) / 2.0  # of 3 degrees of freedom, in any table
    assert mean_interval(values, "abcd") == (pytest.approx(5.25 - margin), pytest.approx(5.25 + margin))
    twice = mean_interval([*values, *values], "abcdabcd")
    assert twice == (pytest.approx(5.25 - margin), pytest.approx(5.25 + margin)), "no more certain"
    assert mean_interval([1.0, 2.0], "aa") is None
    assert mean_interval([2.0, 2.0], "ab") is None
    assert mean_interval([1.0, 2.0, 2.0, 1.0], "aabb") is None
    assert mean_interval([], "") is None


def test_one_instance_and_equal_scores_claim_no_certainty() -> None:
    for scores, tasks in (
        ([1.0, 0.0], ["a", "a"]),
        ([1.0, 0.0, 0.0, 1.0], list("aabb")),
        ([-1.0] * 4, list("abcd")),
        ([2.0], ["a"]),
    ):
        low, high = interval_of(scores, tasks)[0]
        assert high - low > 0.5


def test_the_bootstrap_of_single_attempts_is_close_to_wilsons_and_repeats_itself() -> None:
    scores, tasks = [1.0] * 60 + [0.0] * 40, [str(place) for place in range(100)]
    assert interval_of(scores, tasks) == interval_of(scores, tasks)
    assert interval_of(scores, tasks)[0] == pytest.approx(wilson_interval(60, 100), abs=0.02)


@given(st.integers(0, 9), st.integers(0, 9))
def test_mcnemar_is_the_coin_toss_over_the_tasks_that_differ(first: int, second: int) -> None:
    total = first + second
    as_extreme = sum(
        abs(sum(tosses) - total / 2) >= abs(first - total / 2) for tosses in product((0, 1), repeat=total)
    )
    assert mcnemar(first, second) == pytest.approx(as_extreme / 2**total if first != second else 1.0)
    assert mcnemar(first, second) == mcnemar(second, first)


def test_the_sign_flip_test_agrees_with_all_flips_of_a_small_sample() -> None:
    differences = [0.5, 0.25, 0.25, -0.25, 0.75, 0.0, 0.5]
    moved = [each for each in differences if each]
    sums = [abs(float(np.dot(signs, moved))) for signs in product((-1, 1), repeat=len(moved))]
    exact = sum(each >= abs(sum(moved)) - 1e-12 for each in sums) / len(sums)
    assert sign_flip_test(differences, resamples=40_000) == pytest.approx(exact, abs=0.01)
    assert sign_flip_test([0.0, 0.0]) == 1.0


def test_the_interval_of_pairs_is_newcombes() -> None:
    """The example of Newcombe 1998, table II: 36, 12, 2 and 0 of 50 pairs, method 10."""
    assert newcombe_interval(36, 2, 12, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)


@given(st.tuples(*[st.integers(0, 60)] * 4))
def test_the_interval_of_pairs_holds_the_difference_and_turns_with_the_two(
    counts: tuple[int, int, int, int],
) -> None:
    both, only_first, only_second, neither = counts
    low, high = newcombe_interval(*counts)
    pairs = sum(counts)
    assert -1.0 <= low < high <= 1.0
    if pairs:
        assert low <= (only_second - only_first) / pairs + 1e-12
        assert high >= (only_second - only_first) / pairs - 1e-12
    turned = newcombe_interval(both, only_second, only_first, neither)
    assert turned == pytest.approx((-high, -low), abs=1e-12)


def test_three_tasks_that_agree_do_not_prove_that_two_models_are_the_same() -> None:
    low, high = newcombe_interval(0, 0, 0, 3)
    assert low < -0.4
    assert high > 0.4


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_equal_scores_are_not_taken_for_certainty(share: float) -> None:
    (low, high), method = interval_of([share] * 5, list("abcde"))
    assert method == "wilson"
    assert low <= share <= high
    assert high - low > 0.3


def test_the_exact_test_of_thousands_of_pairs_is_done_at_once() -> None:
    assert mcnemar(2400, 2600) == pytest.approx(0.0049, abs=2e-4)
    assert mcnemar(1, 9000) == 0.0


def test_answers_are_voted_on_by_what_they_say() -> None:
    said = ["0.5", r"\frac{1}{2}", "3", " 1/2 ", "Paris", "paris.", "x+1", "3.0", "(", "("]
    assert same_answers(said) == [0, 0, 2, 0, 4, 4, 6, 2, 8, 8]
    assert same_answers([]) == []


@given(st.lists(st.text(max_size=20), max_size=6))
def test_whatever_is_voted_on_every_answer_is_in_one_group_with_itself(texts: list[str]) -> None:
    groups = same_answers(texts)
    assert len(groups) == len(texts)
    assert all(groups[group] == group <= place for place, group in enumerate(groups))
    assert all(groups[place] == groups[texts.index(text)] for place, text in enumerate(texts))


@given(rewards=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7))
def test_best_of_k_is_the_mean_of_the_best_over_all_choices_of_k(rewards: list[float]) -> None:
    for k in range(1, len(rewards) + 1):
        choices = [max(choice) for choice in combinations(rewards, k)]
        assert best_of_k(rewards, k) == pytest.approx(sum(choices) / len(choices))


@given(right=st.lists(st.booleans(), min_size=1, max_size=9))
def test_best_of_k_of_right_and_wrong_answers_is_pass_at_k(right: list[bool]) -> None:
    for k in range(1, len(right) + 1):
        expected = pass_at_k(len(right), sum(right), k)
        assert best_of_k([float(each) for each in right], k) == pytest.approx(expected)
