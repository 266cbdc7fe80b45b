"""The certainty of a score, and whether two of them differ.

successes of n ──► wilson_interval                           one attempt at each task
scores by task ──► resampled_means, percentiles              several, or several tasks of one instance:
                                                             instances are independent, these are not
pairs by task  ──► mcnemar, newcombe_interval                the same tasks, two models, one attempt
               └─► sign_flip_test, resampled_means           … or several
"""

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

Z_95 = 1.959963984540054
_RESAMPLES = 4_000
_NEARLY_NORMAL = 1_000
"""Degrees of freedom above which Student's distribution is the normal one in three digits."""
_BLOCK = 2**22
"""Draws at a time: resampling ten thousand tasks stays within some dozen megabytes."""


def wilson_interval(successes: float, attempts: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927); [0, 1] when nothing was attempted.

    Unlike the normal approximation it stays inside [0, 1] and has a width at 0 and at 1. `successes` may be a
    sum of shares: scores between 0 and 1 vary no more than coin tosses of that mean, so it is wide enough.
    """
    if attempts == 0:
        return (0.0, 1.0)
    share = successes / attempts
    denominator = 1.0 + z * z / attempts
    center = (share + z * z / (2 * attempts)) / denominator
    margin = z * math.sqrt(share * (1 - share) / attempts + z * z / (4 * attempts * attempts)) / denominator
    # At 0 and at 1 an end is the share itself; rounding must not push it to the wrong side.
    return (max(0.0, min(share, center - margin)), min(1.0, max(share, center + margin)))


def resampled_means(
    values_N_K: np.ndarray, instances_N: Sequence[Hashable], *, seed: int = 0, resamples: int = _RESAMPLES
) -> np.ndarray:
    """[R, K] means of K scores of each task, with whole instances drawn again: the bootstrap (Efron 1979) of
    clusters (Davison and Hinkley 1997, section 3.8). Tasks that repeat an instance are drawn together,
    because they are not independent. The same scores give the same draws.

    The K means of a row are of the same draw, so functions of several of them may be taken row by row.
    """
    number = {instance: place for place, instance in enumerate(dict.fromkeys(instances_N))}
    places_N = np.asarray([number[instance] for instance in instances_N])
    sums_C_K = np.zeros((len(number), values_N_K.shape[1]))
    np.add.at(sums_C_K, places_N, values_N_K)
    sizes_C = np.bincount(places_N, minlength=len(number)).astype(np.float64)
    rng = np.random.default_rng(seed)
    rows, even_C = max(1, _BLOCK // len(number)), np.full(len(number), 1.0 / len(number))
    means: list[np.ndarray] = []
    for start in range(0, resamples, rows):
        # How often each instance is drawn has the same distribution as
        # so many draws with replacement, and one call draws a whole row.
        counts_R_C = rng.multinomial(len(number), even_C, size=min(rows, resamples - start))
        means.append((counts_R_C @ sums_C_K) / (counts_R_C @ sizes_C)[:, None])
    return np.concatenate(means)


def have_equal_means(values_N: Sequence[float], instances_N: Sequence[Hashable]) -> bool:
    """Whether the means of all instances are one number, as that of a single one is: nothing says then how
    much they vary."""
    mean, largest = math.fsum(values_N) / max(1, len(values_N)), max(map(abs, values_N), default=0.0)
    residuals = _residuals(values_N, instances_N, mean)
    return len(residuals) < 2 or all(abs(each) <= 1e-12 * largest * len(values_N) for each in residuals)


def mean_interval(values_N: Sequence[float], instances_N: Sequence[Hashable]) -> tuple[float, float] | None:
    """95 % interval of a mean of numbers of any size, instances being independent and what is of one not:
    Student's, with the variance of Liang and Zeger (1986), C / (C - 1) Σ_c (Σ_{i in c} (x_i - mean))² / N².

    None where instances have equal means.
    """
    if have_equal_means(values_N, instances_N):
        return None
    mean = math.fsum(values_N) / len(values_N)
    residuals_C = _residuals(values_N, instances_N, mean)
    freedom = len(residuals_C) - 1
    square = math.fsum(each * each for each in residuals_C) * len(residuals_C) / freedom
    margin = student_quantile(0.05, freedom) * math.sqrt(square) / len(values_N)
    return mean - margin, mean + margin


def _residuals(values_N: Sequence[float], instances_N: Sequence[Hashable], mean: float) -> list[float]:
    """[C] sums of what the values of each instance are above `mean`."""
    sums: dict[Hashable, float] = dict.fromkeys(instances_N, 0.0)
    for value, instance in zip(values_N, instances_N, strict=True):
        sums[instance] += value - mean
    return list(sums.values())


def percentiles(draws_R: np.ndarray, distinct: int, *, comparisons: int = 1) -> tuple[float, float]:
    """95 % interval of what was resampled out of `distinct` instances, two at least.

    The expanded percentile interval (Hesterberg 2015, section 5.3): the plain one is as much too short for
    few instances as the normal distribution is beside Student's, and by the root of n / (n - 1). Of several
    `comparisons` each is so wide that all hold together in 95 of 100 cases (Bonferroni).
    """
    alpha = 0.05 / comparisons
    width = student_quantile(alpha, distinct - 1) * math.sqrt(distinct / (distinct - 1))
    tail = statistics.NormalDist().cdf(-width)
    low, high = np.quantile(draws_R, (tail, 1.0 - tail))
    return float(low), float(high)


def student_quantile(alpha: float, freedom: int) -> float:
    """The t that |T| exceeds with probability `alpha`, for a whole number of degrees of freedom of one at
    least; by bisection of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if freedom > _NEARLY_NORMAL:
        return statistics.NormalDist().inv_cdf(1.0 - alpha / 2.0)
    low, high = 0.0, 1.0
    while 1.0 - _student_within(high, freedom) > alpha:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = (low + high) / 2.0
        if 1.0 - _student_within(middle, freedom) > alpha:
            low = middle
        else:
            high = middle
    return high


def _student_within(t: float, freedom: int) -> float:
    """Probability of |T| <= t."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    return 2.0 / math.pi * (angle + sine * total) if odd else sine * total


def effective_size(instances_N: Sequence[Hashable]) -> float:
    """The number of distinct instances that say as much: (Σ n)² / Σ n² over the numbers of tasks that each
    has (Kish 1965).
    """
    counts = Counter(instances_N).values()
    return sum(counts) ** 2 / sum(count * count for count in counts) if counts else 0.0


def equal_differences_interval(difference: float, pairs: int) -> tuple[float, float]:
    """95 % interval of a difference that all pairs have alike: resampling them would claim certainty.

    From -1 to 1 such a difference is a share of pairs like any other; a larger one sets its own scale.
    """
    scale = max(1.0, abs(difference))
    low, high = wilson_interval((difference / scale + 1.0) / 2.0 * pairs, pairs)
    return scale * (2.0 * low - 1.0), scale * (2.0 * high - 1.0)


def newcombe_interval(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """95 % interval of the second's share minus the first's, of pairs (Newcombe 1998, method 10).

    It is made of the Wilson intervals of the two, so it has a width where no pair differs. [-1, 1] for no
    pairs.
    """
    pairs = both + only_first + only_second + neither
    if pairs == 0:
        return (-1.0, 1.0)
    first, second = (both + only_first) / pairs, (both + only_second) / pairs
    low_1, high_1 = wilson_interval(both + only_first, pairs)
    low_2, high_2 = wilson_interval(both + only_second, pairs)
    together = _correlation(both, only_first, only_second, neither)
    below = _combine(second - low_2, high_1 - first, together)
    above = _combine(high_2 - second, first - low_1, together)
    difference = second - first
    return max(-1.0, difference - below), min(1.0, difference + above)


def _combine(one: float, other: float, correlation: float) -> float:
    """Length of the sum of two errors that go together so far."""
    return math.sqrt(max(0.0, one * one - 2.0 * correlation * one * other + other * other))


def _correlation(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Correlation of the pairs' two verdicts, corrected for continuity."""
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if margins == 0:
        return 0.0
    excess = float(both * neither - only_first * only_second)
    if excess > 0:
        excess = max(0.0, excess - (both + only_first + only_second + neither) / 2)
    return excess / math.sqrt(margins)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value that two models differ (McNemar 1947): of the tasks that just one of them
    solved, either should have half."""
    total = only_first + only_second
    if total == 0:
        return 1.0
    term = tail = 1  # the number of ways to choose 0, 1, 2, … of them
    for count in range(1, min(only_first, only_second) + 1):
        term = term * (total - count + 1) // count
        tail += term
    # Whole numbers until this division: 2**total of more than a
    # thousand tasks is beyond any float, while the quotient is not.
    return min(1.0, 2.0 * (tail / 2**total))


def sign_flip_test(differences_N: Sequence[float], *, seed: int = 0, resamples: int = _RESAMPLES) -> float:
    """Two-sided p-value that paired scores differ in mean: the sign of each difference is a coin toss, if
    they do not (Fisher 1935). At least 1 / (resamples + 1)."""
    values_N = np.asarray([each for each in differences_N if each != 0.0], dtype=np.float64)
    if values_N.size == 0:
        return 1.0
    rng = np.random.default_rng(seed)
    observed_sum, extreme = abs(values_N.sum()), 0
    rows = max(1, _BLOCK // values_N.size)
    for start in range(0, resamples, rows):
        signs = rng.integers(2, size=(min(rows, resamples - start), values_N.size)) * 2 - 1
        # Sums of the same numbers in another order may differ in the last bit.
        extreme += int((np.abs(signs @ values_N) >= observed_sum * (1 - 1e-12)).sum())
    return (extreme + 1) / (resamples + 1)
