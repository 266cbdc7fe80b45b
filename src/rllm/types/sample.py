"""Training data: token rows.

Whether a token is trained on is derived, never set: a token has a `policy_versions_T` entry of 0 or more
exactly when a policy sampled it (or, in a demonstration, when the policy would have to sample it), and -1
otherwise.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOT_SAMPLED = -1
"""Version of a token that no policy wrote: templates, observations, tool output, forced end tokens."""

_ALWAYS = ("token_ids_T", "policy_versions_T", "logprobs_T", "advantages_T")
_SOMETIMES = ("rewards_T", "rollout_logprobs_T", "ref_logprobs_T", "values_T", "returns_T", "chosen_T")


@dataclass(kw_only=True, slots=True)
class TrainingSample:
    """One token row."""

    token_ids_T: NDArray[np.int64]
    policy_versions_T: NDArray[np.int64]
    """Optimizer updates the sampling weights had seen; NOT_SAMPLED where no policy wrote the token."""
    logprobs_T: NDArray[np.float32]
    """Log-probability at sampling time, in nats; 0 where not sampled."""
    advantages_T: NDArray[np.float32]
    """0 where not sampled."""
    rewards_T: NDArray[np.float32] | None = None
    """The reward of each turn, at the last token sampled in it; 0 elsewhere."""
    rollout_logprobs_T: NDArray[np.float32] | None = None
    """The sampler's log-probabilities, where `logprobs_T` now holds the trainer's before the first update."""
    ref_logprobs_T: NDArray[np.float32] | None = None
    """Log-probability under the reference policy, or under the teacher; 0 where not sampled."""
    values_T: NDArray[np.float32] | None = None
    """The critic's expectation, before the token, of what was paid from there on; 0 where not sampled."""
    returns_T: NDArray[np.float32] | None = None
    """The targets of the critic; 0 where not sampled."""
    chosen_T: NDArray[np.float32] | None = None
    """1 at tokens that the loss treats apart, such as those of `clip_cov`; 0 elsewhere."""
    group_key: tuple[str, str]
    """(task_id, role). What rows of one task begin with is computed once."""
    order_key: tuple[str, int, int, int]
    """(task_id, attempt, trajectory, segment): sorting by it makes a batch independent of arrival order."""
    temperature: float = 1.0
    """The divisor of the logits when the tokens were sampled."""
    turns: tuple[tuple[int, int, int], ...] = ()
    """(step of the trajectory, place of its first sampled token, number of them) of each turn in the row."""

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in (*_ALWAYS, *_SOMETIMES)}
        lengths = {name: len(values_T) for name, values_T in columns.items() if values_T is not None}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"TrainingSample: all rows must be equally long, got {lengths}.")

    @property
    def trainable_T(self) -> NDArray[np.bool_]:
        """True exactly where a policy sampled the token.

        The first token of a row has no prediction, so never.
        """
        trainable_T = self.policy_versions_T != NOT_SAMPLED
        if len(trainable_T):
            trainable_T[0] = False
        return trainable_T

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_trainable(self) -> int:
        return int(self.trainable_T.sum())


@dataclass(kw_only=True, slots=True)
class TrainingBatch:
    """The samples of one rollout batch, with the count of every sampled token: trained, masked or dropped."""

    samples: list[TrainingSample]
    token_counts: dict[str, int]
    """`sampled`, `trained`, `masked.REASON` and `dropped.REASON`: sampled is the sum of the others."""
