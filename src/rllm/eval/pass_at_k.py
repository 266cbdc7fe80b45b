"""The chance that one of k answers is right, and the highest reward of k, estimated from n answers."""

import math
from collections.abc import Sequence

from rllm.errors import ConfigError


def pass_at_k(num_attempts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of `k` attempts is right.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021 (arXiv:2107.03374), equation 1, as the product that does not
    overflow. Raises ConfigError for a `k` above the number of attempts: nothing estimates that.
    """
    if not 0 <= num_correct <= num_attempts:
        raise ConfigError(f"{num_correct} of {num_attempts} attempts cannot be right.")
    if not 1 <= k <= num_attempts:
        raise ConfigError(
            f"pass@{k} of {num_attempts} attempts cannot be estimated; choose k from 1 to {num_attempts}, or "
            "make more attempts."
        )
    if num_attempts - num_correct < k:
        return 1.0
    miss_probability = 1.0
    for size in range(num_attempts - num_correct + 1, num_attempts + 1):
        miss_probability *= 1.0 - k / size
    return 1.0 - miss_probability


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """Unbiased estimate of the highest reward of `k` attempts: its mean over all choices of k of these.

    The i-th lowest reward is the highest of C(i-1, k-1) of them. Of rewards of 0 and 1 it is `pass_at_k`, and
    for k = 1 the mean. Raises ConfigError as that does.
    """
    pass_at_k(len(rewards), 0, k)  # refuses a k that cannot be estimated
    ascending = sorted(rewards)
    return sum(
        reward * math.comb(place, k - 1) for place, reward in enumerate(ascending) if place >= k - 1
    ) / math.comb(len(rewards), k)
