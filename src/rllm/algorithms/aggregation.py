"""The weight of each token's term in the loss of an update; fixed before the update is split.

loss = Σ_tokens weight · term

    token_mean      1 / tokens of the update
    sequence_mean   1 / (rows · tokens of the row)       mean over rows of their token means
    sequence_sum    1 / rows                             mean over rows of their token sums
    FixedLength     1 / (rows · num_tokens)              the same, over a length that no answer changes
    group_mean      1 / (groups · tokens of the group)   mean over groups of their token means

Because the weights know the whole update, the sum over micro-batches, in any split and order, is the loss of
the whole; there is no mean of means. Rows and groups without a trained token are not counted. A row is a
`TrainingSample`: an agent that rewrote its history has several.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rllm.errors import ConfigError, choices_of
from rllm.types.sample import TrainingSample


@dataclass(kw_only=True, slots=True, frozen=True)
class FixedLength:
    """Token sums over a constant length, averaged over rows: `aggregation = "constant"`.

    Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783), section 3.2: dividing by the length of an answer makes long
    wrong answers cheap. verl's `seq-mean-token-sum-norm` divides by the padded width of the batch unless it
    is told a length, so its loss depends on padding.
    """

    num_tokens: float
    """As many as the longest answer may have: then the loss is at most a token's term."""

    def __post_init__(self) -> None:
        if not 0.0 < self.num_tokens < float("inf"):
            raise ConfigError(
                f"`algorithm.aggregation_constant` is {self.num_tokens}; set it to a number of tokens above "
                "0, such as the longest answer."
            )


Aggregation = str | FixedLength
"""A name of `AGGREGATIONS`, or a length."""
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "group_mean")


def aggregation_named(name: str, constant: float) -> Aggregation:
    """The aggregation that `algorithm.aggregation` and `algorithm.aggregation_constant` name."""
    return FixedLength(num_tokens=constant) if name == "constant" else name


def token_weights(samples: Sequence[TrainingSample], aggregation: Aggregation) -> list[NDArray[np.float64]]:
    """One [T] array per sample, 0 at untrained tokens.

    Those of a mean sum to 1 over the update; those of `sequence_sum` to the mean number of trained tokens of
    a row.
    """
    trainable = [sample.trainable_T for sample in samples]
    counts = [int(mask_T.sum()) for mask_T in trainable]
    shares = _shares(samples, counts, aggregation)
    return [mask_T.astype(np.float64) * share for mask_T, share in zip(trainable, shares, strict=True)]


def _shares(
    samples: Sequence[TrainingSample], counts: Sequence[int], aggregation: Aggregation
) -> list[float]:
    """The weight of each token of each row."""
    num_rows = max(1, sum(count > 0 for count in counts))
    if isinstance(aggregation, FixedLength):
        return [1.0 / num_rows / aggregation.num_tokens] * len(counts)
    if aggregation == "token_mean":
        return [1.0 / max(1, sum(counts))] * len(counts)
    if aggregation == "sequence_mean":
        return [1.0 / num_rows / max(1, count) for count in counts]
    if aggregation == "sequence_sum":
        return [1.0 / num_rows] * len(counts)
    if aggregation == "group_mean":
        sizes: Counter[tuple[str, str]] = Counter()
        for sample, count in zip(samples, counts, strict=True):
            sizes[sample.group_key] += count
        num_groups = max(1, sum(size > 0 for size in sizes.values()))
        return [1.0 / num_groups / max(1, sizes[sample.group_key]) for sample in samples]
    raise ConfigError(
        f"There is no aggregation `{aggregation}`; {choices_of(aggregation, AGGREGATIONS)}, or give a "
        "FixedLength."
    )
