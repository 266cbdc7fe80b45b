"""`[algorithm]`: from rewards to the loss of an update."""

from dataclasses import dataclass

from rllm.config.limits import at_least, one_of, positive
from rllm.config.policies import ESTIMATORS
from rllm.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    estimator: str = "grpo"
    """Advantage estimator: `grpo`, `dr_grpo` (no division by the standard deviation),
    `reinforce_plus_plus` (compared with all attempts of a step instead of those at one task), or `reinforce`
    (the reward itself, compared with nothing)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The importance ratio is clipped to [1 - clip_low, 1 + clip_high] (PPO)."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus at the first step; it falls linearly to 0 at the last one."""
    aggregation: str = "token_mean"
    """`token_mean` over all trained tokens of an update, or `sequence_mean` of each sequence's token mean."""
    updates_per_step: int = 2
    """Optimizer updates on each rollout batch; each sees its own share of the groups."""
    gamma: float = 1.0
    """Discount of later rewards in a step's return."""
    old_logprobs: str = "sampler"
    """Who says how likely the sampled tokens were: `sampler`, when it sampled them, or `trainer`, in one more
    forward pass before the first update. The two agree within rounding; where batches depend on timing, as
    without lockstep, only the trainer's are the same to the last bit whenever the same tokens are."""

    def validate(self) -> None:
        if not 0.0 < self.clip_low < 1.0:
            raise ConfigError(f"`algorithm.clip_low` is {self.clip_low}; it must lie between 0 and 1.")
        positive("algorithm.clip_high", self.clip_high)
        at_least("algorithm.entropy_coef", self.entropy_coef, 0.0)
        at_least("algorithm.updates_per_step", self.updates_per_step, 1)
        one_of("algorithm.estimator", self.estimator, tuple(ESTIMATORS))
        one_of("algorithm.old_logprobs", self.old_logprobs, ("sampler", "trainer"))
        one_of("algorithm.aggregation", self.aggregation, ("token_mean", "sequence_mean"))
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"`algorithm.gamma` is {self.gamma}; it must lie between 0 and 1.")
