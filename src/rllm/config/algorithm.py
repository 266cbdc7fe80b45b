"""`[algorithm]`: from rewards to the loss of an update.

    rewards ──estimator, credit──► advantages ──loss, aggregation──► loss
       └── kl_in = "reward"            correction ──┘    └── kl_in = "loss", entropy_coef

A key that the chosen estimator or loss does not look at is refused unless it is at its default.
"""

from dataclasses import dataclass

from rllm.config.limits import at_least, finite, one_of, positive, share, unused
from rllm.config.policies import ESTIMATORS
from rllm.errors import ConfigError

LOSSES: dict[str, tuple[str, ...]] = {
    "ppo": ("clip_low", "clip_high", "dual_clip"),
    "policy_gradient": (),
    "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "sapo": ("sapo_positive", "sapo_negative"),
    "dppo_tv": ("clip_low", "clip_high"),
    "dppo_kl": ("clip_low", "clip_high"),
    "topr": (),
    "clip_cov": ("clip_low", "clip_high", "cov_fraction", "cov_low", "cov_high"),
    "kl_cov": ("cov_fraction", "cov_kl_coef"),
    "importance_sampling": (),
}
"""Name -> the keys of `[algorithm]` that only some losses look at, and this one does."""
OF_OWN = ("clip_low", "clip_high")
"""Those that a loss of the user's may read; whether it does is known once it is loaded."""
PAPER_BOUND = -1.0
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "group_mean", "constant")
KL_KINDS = ("k1", "k2", "k3", "abs", "mse", "k1+", "k3+", "abs+")
CREDITS = ("trajectory", "turn", "discounted")
TIES = ("count", "drop")


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    estimator: str = "grpo"
    """Advantage estimator; see docs/algorithms.md. `gae` needs a critic, `remax` samples one greedy attempt
    more at each task. `file.py:function` names one of your own, from the rewards of a group to advantages."""
    credit: str = "trajectory"
    """The share of each turn in its trajectory's advantage: `trajectory` gives all turns the same,
    `discounted` gives earlier ones less (times `gamma` for each turn to the end), `turn` compares each turn
    by the rewards from there on."""
    ties: str = "count"
    """The treatment of a group whose attempts all have advantage 0: it counts in the means of the loss
    (`count`, as in GRPO's paper), or is left out as if it had not been sampled (`drop`, as DAPO's dynamic
    sampling does)."""
    gamma: float = 1.0
    """Discount of what is paid later: by turn in a step's return and in `credit`, by token in `gae`."""
    gae_lambda: float = 0.95
    """λ of `gae`: 1 waits for what is really paid, 0 believes the critic at the next token."""
    pass_k: int = 0
    """k of `pass_at_k`: attempts of which the best counts; 0 takes half of the group, 2 at least."""
    gigpo_omega: float = 1.0
    """ω of `gigpo`: what the comparison of turns in the same state counts beside that of whole attempts."""
    gigpo_norm: str = "std"
    """The divisor of `gigpo`: `std`, the standard deviation of the compared returns, or `none`."""
    loss: str = "ppo"
    """Policy loss; see docs/algorithms.md. `file.py:function` names one of your own, from `TokenInputs` to
    [M] terms."""
    clip_low: float = -1.0
    clip_high: float = -1.0
    """Bounds of the loss: `ppo` clips the importance ratio to [1 - clip_low, 1 + clip_high]. -1 takes that
    of its paper: 0.2 and 0.2 of `ppo`, 0.0003 and 0.0004 of `gspo`. A loss of one's own may read them."""
    dual_clip: float = 0.0
    """For negative advantages the `ppo` loss stops at this multiple of the advantage; 0 lets it grow."""
    sapo_positive: float = 1.0
    """Temperature of `sapo` where the advantage is positive."""
    sapo_negative: float = 1.05
    """Temperature of `sapo` where it is negative."""
    cov_fraction: float = 0.0002
    """Fraction of an update's tokens, one at least, that `clip_cov` and `kl_cov` treat apart."""
    cov_low: float = 1.0
    cov_high: float = 5.0
    """Bounds of the covariance among which `clip_cov` draws them."""
    cov_kl_coef: float = 1.0
    """The coefficient that `kl_cov` gives to their divergence from the policy before the step."""
    aggregation: str = "token_mean"
    """`token_mean` over all trained tokens of an update, `sequence_mean` of each sequence's token mean,
    `sequence_sum` of each sequence's token sum, `group_mean` of each group's token mean, or `constant`: token
    sums over `aggregation_constant`."""
    aggregation_constant: int = 0
    """Tokens that a sequence counts as having under `constant`, such as the longest there can be."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus at the first step; it falls linearly to 0 at the last one."""
    kl_coef: float = 0.0
    """Weight of the divergence from the reference, the policy as it is when reinforcement begins: after the
    warm start, where there is one. 0 has no reference."""
    kl_kind: str = "k3"
    """The estimator of the divergence from the sampled tokens (`k1`, `k2`, `k3`, `abs`, `mse`); with `+`, in
    the loss, the gradient is that of `k2`."""
    kl_in: str = "loss"
    """`loss` adds it to the loss, `reward` subtracts it from what each token is paid."""
    kl_target: float = 0.0
    """`kl_coef` is adapted after each step so that the divergence, in nats per token, comes to this; 0 keeps
    it as it is."""
    kl_horizon: int = 10
    """Steps in which an adaptive `kl_coef` moves by a fifth, at most."""
    correction: str = "none"
    """The correction where sampler and trainer disagree about the sampled tokens: `truncate` multiplies each
    token by its importance ratio, within bounds; `mask` leaves out tokens beyond the bounds."""
    correction_level: str = "token"
    """Whose ratio counts: of each `token`, of the `sequence` (product), or its `geometric` mean."""
    correction_low: float = 0.0
    correction_high: float = 2.0
    """Bounds of the ratio of probabilities, trainer by sampler."""
    updates_per_step: int = 2
    """Optimizer updates on each rollout batch; each sees its own share of the groups."""
    old_logprobs: str = "sampler"
    """The source of the old log-probabilities: `sampler`, at the time of sampling, or `trainer`, in one more
    forward pass before the first update. The two agree within rounding; where batches depend on timing, as
    without lockstep, only the trainer's are the same to the last bit whenever the same tokens are."""

    def validate(self) -> None:
        self._validate_estimator()
        self._validate_loss()
        self._validate_kl()
        self._validate_correction()
        at_least("algorithm.entropy_coef", self.entropy_coef, 0.0)
        at_least("algorithm.updates_per_step", self.updates_per_step, 1)
        one_of("algorithm.old_logprobs", self.old_logprobs, ("sampler", "trainer"))

    def _validate_estimator(self) -> None:
        if not is_own(self.estimator):
            one_of("algorithm.estimator", self.estimator, tuple(ESTIMATORS))
        one_of("algorithm.credit", self.credit, CREDITS)
        one_of("algorithm.ties", self.ties, TIES)
        share("algorithm.gamma", self.gamma)
        share("algorithm.gae_lambda", self.gae_lambda)
        if self.pass_k == 1 or self.pass_k < 0:
            raise ConfigError(
                f"`algorithm.pass_k` is {self.pass_k}; the best of several counts, so set it to 2 or more, "
                "or to 0 for half of the group."
            )
        finite("algorithm.gigpo_omega", self.gigpo_omega)
        one_of("algorithm.gigpo_norm", self.gigpo_norm, ("std", "none"))

    def _validate_loss(self) -> None:
        if not is_own(self.loss):
            one_of("algorithm.loss", self.loss, tuple(LOSSES))
        for name in ("clip_low", "clip_high"):
            highest = 1.0 if name == "clip_low" else float("inf")
            value = getattr(self, name)
            if value != PAPER_BOUND and not (0.0 <= value <= highest and value < float("inf")):
                upto = "between 0 and 1" if name == "clip_low" else "0 or more"
                raise ConfigError(
                    f"`algorithm.{name}` is {value}; it must be {upto}, or -1 for that of the loss's paper."
                )
        for name in ("sapo_positive", "sapo_negative"):
            positive(f"algorithm.{name}", getattr(self, name))
        if not 0.0 < self.cov_fraction <= 1.0:
            raise ConfigError(
                f"`algorithm.cov_fraction` is {self.cov_fraction}; set it above 0, to 1 at most."
            )
        if not self.cov_low < self.cov_high:
            raise ConfigError(
                f"`algorithm.cov_low` is {self.cov_low} and `algorithm.cov_high` {self.cov_high}; the first "
                "must be below the second."
            )
        finite("algorithm.cov_kl_coef", self.cov_kl_coef)
        if self.dual_clip != 0.0 and not 1.0 < self.dual_clip < float("inf"):
            raise ConfigError(
                f"`algorithm.dual_clip` is {self.dual_clip}; it must be above 1, such as 3, or 0 for none."
            )
        for name in {key for keys in LOSSES.values() for key in keys} - set(LOSSES.get(self.loss, OF_OWN)):
            losses = " or ".join(loss for loss, keys in LOSSES.items() if name in keys)
            unused("algorithm", self, name, f"the loss is `{self.loss}`; choose {losses}")
        one_of("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        at_least("algorithm.aggregation_constant", self.aggregation_constant, 0)
        if self.aggregation != "constant":
            why = f"the aggregation is `{self.aggregation}`; choose `constant`"
            unused("algorithm", self, "aggregation_constant", why)
        elif not self.aggregation_constant:
            raise ConfigError(
                "`algorithm.aggregation_constant` is 0; `constant` divides by it, so set it to a number of "
                "tokens, such as the longest sequence there can be."
            )

    def _validate_kl(self) -> None:
        for name in ("kl_coef", "kl_target"):
            finite(f"algorithm.{name}", getattr(self, name))
        one_of("algorithm.kl_kind", self.kl_kind, KL_KINDS)
        one_of("algorithm.kl_in", self.kl_in, ("loss", "reward"))
        if not self.kl_coef:
            for name in ("kl_kind", "kl_in", "kl_target"):
                unused(
                    "algorithm", self, name, "nothing is compared with a reference; set `algorithm.kl_coef`"
                )
        at_least("algorithm.kl_horizon", self.kl_horizon, 1)
        if not self.kl_target:
            unused("algorithm", self, "kl_horizon", "`kl_coef` is constant; set `algorithm.kl_target`")
        if self.kl_in == "reward" and self.kl_kind.endswith("+"):
            raise ConfigError(
                f"`algorithm.kl_kind` is {self.kl_kind!r}, which differs from {self.kl_kind[:-1]!r} in its "
                f'gradient, and a reward has none; set it to {self.kl_kind[:-1]!r}, or `kl_in` to "loss".'
            )

    def _validate_correction(self) -> None:
        one_of("algorithm.correction", self.correction, ("none", "truncate", "mask"))
        one_of("algorithm.correction_level", self.correction_level, ("token", "sequence", "geometric"))
        finite("algorithm.correction_low", self.correction_low)
        positive("algorithm.correction_high", self.correction_high)
        if self.correction == "none":
            for name in ("correction_level", "correction_low", "correction_high"):
                unused("algorithm", self, name, "nothing is corrected; set `algorithm.correction`")
        elif self.old_logprobs == "sampler":
            raise ConfigError(
                f"`algorithm.correction` is {self.correction!r}, but `algorithm.old_logprobs` is 'sampler': "
                "the update begins from what the sampler said, so there is nothing to correct. Set "
                '`algorithm.old_logprobs` to "trainer", or the correction to "none".'
            )
        elif not self.correction_low < 1.0 <= self.correction_high:
            raise ConfigError(
                f"`algorithm.correction_low` is {self.correction_low} and `correction_high` is "
                f"{self.correction_high}; the ratio of two that agree is 1: set low below it, and high not."
            )


def is_own(name: str) -> bool:
    """Whether it is a function of the user's, `file.py:function` or `package.module:function`."""
    return ":" in name
