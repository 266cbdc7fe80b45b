"""Losses of an update: terms per token, whose weights were fixed before the update was split.

    PolicyLoss   correction · surrogate  -  entropy_coef · entropy  +  kl_coef · KL(policy, reference)
    ValueLoss    the critic's squared error, clipped
    ActorCriticLoss   both, where policy and critic share a trunk
    ImitationLoss     cross-entropy of demonstrated tokens

loss = Σ_tokens weight · term; see `rllm.algorithms.aggregation` for the weights.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rllm.algorithms.aggregation import Aggregation, FixedLength, aggregation_named, token_weights
from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.correction import Correction, out_of_bounds_M
from rllm.algorithms.kl import kl_terms
from rllm.algorithms.surrogates import ClippedRatio, Surrogate, surrogate_named
from rllm.algorithms.tokens import Loss, TokenInputs, has_gradient
from rllm.config.algorithm import AlgorithmConfig
from rllm.errors import ConfigError

__all__ = (
    "ActorCriticLoss",
    "FixedLength",
    "ImitationLoss",
    "Loss",
    "PolicyLoss",
    "TokenInputs",
    "ValueLoss",
    "has_gradient",
    "policy_loss",
    "token_weights",
)


@dataclass(kw_only=True, slots=True, frozen=True)
class PolicyLoss:
    """A surrogate of the policy's expected reward, and what is added to it.

    The correction weighs the surrogate alone: entropy and KL are of the policy, whoever sampled.
    """

    surrogate: Surrogate = field(default_factory=ClippedRatio)
    aggregation: Aggregation = "token_mean"
    entropy_coef: float = 0.0
    """Weight of the policy's entropy, in nats, in what is maximised (Mnih et al. 2016, arXiv:1602.01783)."""
    kl_coef: float = 0.0
    """Weight of the KL from the reference (Shao et al. 2024, arXiv:2402.03300, equation 3)."""
    kl_kind: str = "k3"
    """See `kl_terms`."""
    correction: Correction | None = None
    """For samplers that are not quite the policy."""

    @property
    def needs_every_row(self) -> bool:
        """Without entropy and KL, rows with advantage 0 have gradient 0 and need not be computed."""
        return self.entropy_coef > 0.0 or self.kl_coef > 0.0 or self.surrogate.needs_every_row

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0.0

    @property
    def needs_whole_groups(self) -> bool:
        return self.surrogate.needs_whole_groups

    def terms(self, tokens: TokenInputs) -> Tensor:
        terms_M = self.surrogate.terms(tokens)
        if self.correction is not None:
            terms_M = terms_M * self.correction.weights_M(_rollout(tokens), tokens.old_M, tokens.row_M)
        if self.entropy_coef:
            terms_M = terms_M - self.entropy_coef * _require_column(
                tokens.entropy_M, "entropy", "entropy_coef"
            )
        if self.kl_coef:
            ref_M = _require_column(tokens.ref_M, "reference log-probability", "kl_coef")
            terms_M = terms_M + self.kl_coef * kl_terms(tokens.new_M, ref_M, self.kl_kind)
        return terms_M

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        log_ratio_M = tokens.new_M - tokens.old_M
        measures = {
            "ratio_mean": log_ratio_M.exp(),
            "clipped_frac": self.surrogate.clipped_M(tokens).float(),
            # Old before new: the estimate is of tokens of its first policy, and the old one sampled these.
            "kl": kl_terms(tokens.old_M, tokens.new_M, "k3"),
        }
        entropy_M = tokens.measured_entropy_M if tokens.entropy_M is None else tokens.entropy_M
        if entropy_M is not None:
            measures["entropy"] = entropy_M
        if tokens.divergence_M is not None:
            measures["teacher_divergence"] = tokens.divergence_M
        if tokens.teacher_M is not None:
            measures["reverse_kl"] = tokens.old_M - tokens.teacher_M
        if tokens.ref_M is not None:
            measures["kl_ref"] = kl_terms(tokens.new_M, tokens.ref_M, "k3")
        if self.correction is not None:
            columns = (_rollout(tokens), tokens.old_M, tokens.row_M)
            measures["correction_mean"] = self.correction.weights_M(*columns)
            measures["corrected_frac"] = out_of_bounds_M(*columns, self.correction).float()
        return measures


@dataclass(kw_only=True, slots=True, frozen=True)
class ValueLoss:
    """½ max((v - R)², (clip(v, v_old - clip, v_old + clip) - R)²).

    Schulman et al. 2016 (arXiv:1506.02438), section 5, clipped as in the code of PPO; `clip` = 0 is the plain
    squared error.
    """

    clip: float
    aggregation: Aggregation = "token_mean"

    needs_every_row = True
    needs_entropy = False
    needs_whole_groups = False

    def terms(self, tokens: TokenInputs) -> Tensor:
        """[M] error of each token's value; raises ConfigError where there is no critic."""
        new_M, old_M, returns_M = _values(tokens)
        terms_M = 0.5 * (new_M - returns_M).square()
        if not self.clip:
            return terms_M
        held_M = old_M + (new_M - old_M).clamp(-self.clip, self.clip)
        return torch.maximum(terms_M, 0.5 * (held_M - returns_M).square())

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        new_M, old_M, returns_M = _values(tokens)
        measures = {
            "value_mean": new_M,
            "return_mean": returns_M,
            "value_error": (new_M - returns_M).square(),
        }
        if self.clip:
            measures["value_clipped_frac"] = ((new_M - old_M).abs() > self.clip).float()
        return measures


@dataclass(kw_only=True, slots=True, frozen=True)
class ActorCriticLoss:
    """Policy terms + `coef` · value terms, for a policy and a critic on one trunk.

    Schulman et al. 2017 (arXiv:1707.06347), equation 9.
    """

    policy: PolicyLoss
    value: ValueLoss
    coef: float

    needs_every_row = True

    def __post_init__(self) -> None:
        if self.policy.aggregation != self.value.aggregation:
            raise ConfigError(
                f"The policy loss is aggregated by `{self.policy.aggregation}` and the value loss by "
                f"`{self.value.aggregation}`; one update has one aggregation."
            )

    @property
    def aggregation(self) -> Aggregation:
        return self.policy.aggregation

    @property
    def needs_entropy(self) -> bool:
        return self.policy.needs_entropy

    @property
    def needs_whole_groups(self) -> bool:
        return self.policy.needs_whole_groups

    def terms(self, tokens: TokenInputs) -> Tensor:
        return self.policy.terms(tokens) + self.coef * self.value.terms(tokens)

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        return self.policy.measures(tokens) | self.value.measures(tokens)


@dataclass(kw_only=True, slots=True, frozen=True)
class ImitationLoss:
    """Cross-entropy of the demonstrated tokens: -log π(token)."""

    aggregation: Aggregation = "token_mean"

    needs_every_row = True
    needs_entropy = False
    needs_whole_groups = False

    def terms(self, tokens: TokenInputs) -> Tensor:
        """[M] negative log-likelihood of each demonstrated token; nothing else plays a part."""
        return -tokens.new_M

    def measures(self, tokens: TokenInputs) -> dict[str, Tensor]:
        return {}


def policy_loss(config: AlgorithmConfig, context: AlgorithmContext | None = None) -> PolicyLoss:
    """The loss that `[algorithm]` describes, which may look at the context.

    Raises ConfigError for a loss that does not exist.
    """
    return PolicyLoss(
        surrogate=surrogate_named(config, context),
        aggregation=aggregation_named(config.aggregation, config.aggregation_constant),
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
        kl_kind=config.kl_kind,
        correction=None if config.correction == "none" else _correction(config),
    )


def _correction(config: AlgorithmConfig) -> Correction:
    return Correction(
        mode=config.correction,
        level=config.correction_level,
        low=config.correction_low,
        high=config.correction_high,
    )


def _rollout(tokens: TokenInputs) -> Tensor:
    if tokens.rollout_M is None:
        raise ConfigError(
            "A correction compares what the trainer said of the sampled tokens with what the sampler said, "
            'and there is only one of the two; set `algorithm.old_logprobs` to "trainer".'
        )
    return tokens.rollout_M


def _require_column(column_M: Tensor | None, what: str, key: str) -> Tensor:
    if column_M is None:
        raise ConfigError(f"`algorithm.{key}` is set, but the samples have no {what}; set it to 0.")
    return column_M


def _values(tokens: TokenInputs) -> tuple[Tensor, Tensor, Tensor]:
    columns = (tokens.new_values_M, tokens.values_M, tokens.returns_M)
    if columns[0] is None or columns[1] is None or columns[2] is None:
        raise ConfigError("A value loss needs a critic's values and the returns; choose the estimator `gae`.")
    return columns[0], columns[1], columns[2]
