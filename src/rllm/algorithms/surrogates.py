"""Surrogates: the quantities that a policy loss minimises, token by token, in place of minus the expected
reward.

With r = exp(new - old) and A the advantage of the token:

    ppo              -min(r A, clip(r) A)                      clip_low, clip_high, dual_clip
    policy_gradient  -A new
    importance_sampling  -r A                              no bounds
    gspo             ppo, with the geometric mean of r over the row
    cispo            -sg(clip(r)) A new                        bounds the weight of a token, never drops it
    gmpo             -A · geometric mean of clipped r over the row
    sapo             -A · 4/τ · σ(τ (r - 1))                   no bounds: a gate that closes smoothly
    dppo_tv, dppo_kl -r A, until the probability has moved by more than clip_low or clip_high
    topr             -A new, times min(1, r of the whole row) where A < 0
    clip_cov         ppo, without the gradient of a few tokens that would lower entropy most
    kl_cov           -r A, and a divergence from the old policy at those tokens

Where new = old, as in the first update of a step, all of them have the gradient of `policy_gradient`, the
tokens that `clip_cov` leaves out excepted. `sg` has a value and no gradient. verl cuts log r to ±20 nats;
here nothing is cut, and what overflows is caught before the weights change.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.covariance import covariances, drawn_between, largest, with_chosen
from rllm.algorithms.tokens import TokenInputs, row_means, row_sums
from rllm.config.algorithm import OF_OWN, PAPER_BOUND, AlgorithmConfig, is_own
from rllm.config.limits import unused
from rllm.errors import ConfigError, choices_of
from rllm.types.callables import made_from, name_of, require_call, takes
from rllm.types.draws import draw_seed
from rllm.types.names import object_named
from rllm.types.sample import TrainingSample


class Surrogate(Protocol):
    """One term for each token, and whether a bound held it."""

    def terms(self, tokens: TokenInputs) -> Tensor:
        """[M] what is minimised; its gradient is 0 where the advantage is 0, unless `needs_every_row`."""
        ...

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        """[M] True where a bound has been passed."""
        ...

    @property
    def needs_every_row(self) -> bool: ...

    @property
    def needs_whole_groups(self) -> bool: ...


class _OfTokens:
    """Every token for itself, or with its row."""

    __slots__ = ()
    needs_every_row = False
    needs_whole_groups = False


@dataclass(kw_only=True, slots=True, frozen=True)
class ClippedRatio(_OfTokens):
    """-min(r A, clip(r, 1 - low, 1 + high) A).

    Schulman et al. 2017 (PPO, arXiv:1707.06347), equation 7. A higher upper bound is DAPO's clip-higher (Yu
    et al. 2025, arXiv:2503.14476, equation 10). With `dual_clip` = c above 1, a term with A < 0 is at most -c
    A: Ye et al. 2020 (arXiv:1912.09729); 0 leaves it unbounded. verl's `vanilla` always has c = 3.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0

    def terms(self, tokens: TokenInputs) -> Tensor:
        advantages_M = tokens.advantages_M
        terms_M = _clipped_terms(_ratios(tokens), advantages_M, self.clip_low, self.clip_high)
        if not self.dual_clip:
            return terms_M
        return torch.minimum(terms_M, self.dual_clip * advantages_M.abs())  # with A >= 0 they are at most 0

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return _outside(_ratios(tokens), self.clip_low, self.clip_high)


@dataclass(kw_only=True, slots=True, frozen=True)
class PolicyGradient(_OfTokens):
    """-A new.

    Williams 1992 (REINFORCE); GPG (Chu et al. 2025, arXiv:2504.02546) with the `gpg` estimator. It has no
    ratio, so a second update on the same samples is as if they had been sampled from the newer weights.
    """

    def terms(self, tokens: TokenInputs) -> Tensor:
        return -tokens.advantages_M * tokens.new_M

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return torch.zeros_like(tokens.new_M, dtype=torch.bool)


@dataclass(kw_only=True, slots=True, frozen=True)
class ImportanceRatio(_OfTokens):
    """-r A.

    Schulman et al. 2017 (PPO, arXiv:1707.06347), equation 6: what `ppo` clips, unclipped. Nothing bounds how
    far a second update on the same samples goes.
    """

    def terms(self, tokens: TokenInputs) -> Tensor:
        return -_ratios(tokens) * tokens.advantages_M

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return torch.zeros_like(tokens.new_M, dtype=torch.bool)


@dataclass(kw_only=True, slots=True, frozen=True)
class SequenceRatio(_OfTokens):
    """-min(s A, clip(s, 1 - low, 1 + high) A), with s the geometric mean of r over the row.

    Zheng et al. 2025 (GSPO, arXiv:2507.18071), in the token form of section 4.3: the value is that of the
    row, the gradient of each token is weighted with its own advantage. With one advantage for the whole row
    it is that of equation 5. The paper's bounds are 3e-4 and 4e-4, and its aggregation is the mean over rows.
    verl cuts log s to at most 10.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def terms(self, tokens: TokenInputs) -> Tensor:
        return _clipped_terms(self._row_ratios(tokens), tokens.advantages_M, self.clip_low, self.clip_high)

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return _outside(self._row_ratios(tokens), self.clip_low, self.clip_high)

    def _row_ratios(self, tokens: TokenInputs) -> Tensor:
        return torch.exp(_row_mean_straight_through(tokens.new_M - tokens.old_M, tokens.row_M))


@dataclass(kw_only=True, slots=True, frozen=True)
class ClippedWeight(_OfTokens):
    """-sg(clip(r, 1 - low, 1 + high)) A new.

    MiniMax 2025 (CISPO, arXiv:2506.13585), equation 4: a token beyond the bounds keeps a gradient, with a
    bounded weight. The paper has no lower bound, which is low = 1 here, and tunes the upper one without
    naming it; a weight of at most 5 is what others have settled on.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def terms(self, tokens: TokenInputs) -> Tensor:
        weight_M = _ratios(tokens).detach().clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -weight_M * tokens.advantages_M * tokens.new_M

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return _outside(_ratios(tokens), self.clip_low, self.clip_high)


@dataclass(kw_only=True, slots=True, frozen=True)
class GeometricMean(_OfTokens):
    """-A · g, with g the geometric mean over the row of r, each bounded by e^high where A > 0 and e^-low
    elsewhere.

    Zhao et al. 2025 (GMPO, arXiv:2507.20673): the bounds are of log r, 0.4 both in the paper, and its
    aggregation is the mean over rows. Each token's gradient is weighted with its own advantage; with one
    advantage for the whole row it is the paper's.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def terms(self, tokens: TokenInputs) -> Tensor:
        bounded_M = self._clip(tokens)
        return -tokens.advantages_M * torch.exp(_row_mean_straight_through(bounded_M, tokens.row_M))

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return self._clip(tokens) != tokens.new_M - tokens.old_M

    def _clip(self, tokens: TokenInputs) -> Tensor:
        log_ratio_M = tokens.new_M - tokens.old_M
        return torch.where(
            tokens.advantages_M > 0.0,
            log_ratio_M.clamp(max=self.clip_high),
            log_ratio_M.clamp(min=-self.clip_low),
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class SoftGate(_OfTokens):
    """-A · 4/τ · σ(τ (r - 1)), with τ by the sign of A.

    Gao et al. 2025 (SAPO, arXiv:2511.20347). The gradient of a token fades by 4 σ (1 - σ) instead of ending
    at a bound. The paper's aggregation is `sequence_mean`, which verl's `sapo` always has.
    """

    positive: float
    """τ where A > 0: larger fades sooner."""
    negative: float

    def terms(self, tokens: TokenInputs) -> Tensor:
        advantages_M = tokens.advantages_M
        positive, negative = advantages_M.new_tensor((self.positive, self.negative))
        tau_M = torch.where(advantages_M > 0.0, positive, negative)
        return -advantages_M * 4.0 / tau_M * torch.sigmoid(tau_M * (_ratios(tokens) - 1.0))

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return torch.zeros_like(tokens.new_M, dtype=torch.bool)


@dataclass(kw_only=True, slots=True, frozen=True)
class DivergenceMask(_OfTokens):
    """-r A, and no gradient where the update has already moved the token's probability too far its way.

    Qi et al. 2026 (DPPO, arXiv:2602.04879): how far is a divergence between "this token" and "any other"
    before and after, the total variation |π - π_old| or, with `kl`, KL(π_old, π); too far is above
    `clip_high` where A > 0 and r > 1, and above `clip_low` where A < 0 and r < 1. The authors measure it from
    the sampler (`algorithm.old_logprobs = "sampler"`), with bounds of 0.15 and, with `kl`, 0.05. verl's value
    is -sg(min(r, c)) A new with c of the dual clip: its weight of a token stops growing there.
    """

    clip_low: float = 0.15
    clip_high: float = 0.15
    kl: bool = False

    def terms(self, tokens: TokenInputs) -> Tensor:
        ratio_M = _ratios(tokens)
        return -tokens.advantages_M * torch.where(self.clipped_M(tokens), ratio_M.detach(), ratio_M)

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        new_M, old_M = tokens.new_M.detach(), tokens.old_M
        divergence_M = _binary_kl(old_M, new_M) if self.kl else (new_M.exp() - old_M.exp()).abs()
        up_M = (tokens.advantages_M > 0.0) & (new_M > old_M) & (divergence_M > self.clip_high)
        down_M = (tokens.advantages_M < 0.0) & (new_M < old_M) & (divergence_M > self.clip_low)
        return up_M | down_M


@dataclass(kw_only=True, slots=True, frozen=True)
class Tapered(_OfTokens):
    """-A new where A >= 0, and -sg(min(1, ρ)) A new where A < 0, with ρ the product of r over the row.

    Le Roux et al. 2025 (TOPR, arXiv:2503.14286), with the paper's bounds: good answers are learned from
    whatever the policy thinks of them by now, bad ones the less the unlikelier they have become, so that
    their logits are not driven down without end. No baseline is subtracted here; the estimator's is.
    """

    def terms(self, tokens: TokenInputs) -> Tensor:
        ratio_M = row_sums(tokens.new_M - tokens.old_M, tokens.row_M)[0].exp().clamp(max=1.0)
        weight_M = torch.where(tokens.advantages_M < 0.0, ratio_M.to(tokens.new_M.dtype), 1.0)
        return -weight_M * tokens.advantages_M * tokens.new_M

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        beyond_M = row_sums(tokens.new_M - tokens.old_M, tokens.row_M)[0] > 0.0
        return (tokens.advantages_M < 0.0) & beyond_M


@dataclass(kw_only=True, slots=True, frozen=True)
class ClippedCovariance(_OfTokens):
    """As `ClippedRatio`, and 0 at a `fraction` of the tokens, drawn among those whose covariance of
    log-probability and advantage lies between `low` and `high`.

    Cui et al. 2025 (Clip-Cov, arXiv:2505.22617), section 4.2. The covariance is that of the policy before the
    step, over the whole update (`rllm.algorithms.covariance`), where the paper's is of the policy as it
    moves, and verl's of a micro-batch.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    fraction: float = 0.0002
    low: float = 1.0
    high: float = 5.0
    context: AlgorithmContext = field(default_factory=AlgorithmContext)
    """The draw belongs to its seed and step."""

    def terms(self, tokens: TokenInputs) -> Tensor:
        """Raises ConfigError where nobody has chosen."""
        terms_M = _clipped_terms(_ratios(tokens), tokens.advantages_M, self.clip_low, self.clip_high)
        return torch.where(_chosen_tokens(tokens), torch.zeros_like(terms_M), terms_M)

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return _outside(_ratios(tokens), self.clip_low, self.clip_high) | _chosen_tokens(tokens)

    def chosen(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The rows of an update with their choice."""
        # A step may have several updates; the first task tells this one from the others.
        first = samples[0].group_key[0] if samples else ""
        seed = draw_seed(self.context.seed, "clip_cov", self.context.step, first)
        places = drawn_between(covariances(samples), self.fraction, self.low, self.high, seed)
        return with_chosen(samples, places)


@dataclass(kw_only=True, slots=True, frozen=True)
class PenalisedCovariance(_OfTokens):
    """-r A, and `kl_coef` · (r - 1 - log r) more at the `fraction` of the tokens whose covariance of
    log-probability and advantage is largest.

    Cui et al. 2025 (KL-Cov, arXiv:2505.22617), section 4.3. r - 1 - log r is, over tokens of the old policy,
    unbiased for the paper's KL(π_old, π); verl has |log r|, whose gradient is 1 either way where old and new
    differ by rounding alone. The covariance is that of `ClippedCovariance`.
    """

    fraction: float = 0.0002
    kl_coef: float = 1.0

    needs_every_row = True
    """A chosen token is held whatever its advantage is."""

    def terms(self, tokens: TokenInputs) -> Tensor:
        """Raises ConfigError where nobody has chosen."""
        log_ratio_M = tokens.new_M - tokens.old_M
        ratio_M = log_ratio_M.exp()
        held_M = torch.where(_chosen_tokens(tokens), ratio_M - 1.0 - log_ratio_M, torch.zeros_like(ratio_M))
        return self.kl_coef * held_M - ratio_M * tokens.advantages_M

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return _chosen_tokens(tokens)

    def chosen(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The rows of an update with their choice."""
        return with_chosen(samples, largest(covariances(samples), self.fraction))


OF_COVARIANCE = (ClippedCovariance, PenalisedCovariance)
"""Surrogates that look at the whole update before it is split."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OwnFunction:
    """A function of the user's, from `TokenInputs` to [M] terms.

    Nothing is known of it: rows with advantage 0 are computed, and groups stay whole.
    """

    name: str
    function: Callable[..., Any]
    context: AlgorithmContext | None = None
    """Given to a function that takes it as its second argument."""

    needs_every_row = True
    needs_whole_groups = True

    def terms(self, tokens: TokenInputs) -> Tensor:
        """Raises ConfigError unless the function gives one term for each token, that a weight can be moved
        by, and leaves its inputs as they are: ratios and divergences are measured on them afterwards."""
        versions = _versions(tokens)
        terms_M = self.function(tokens) if self.context is None else self.function(tokens, self.context)
        if not isinstance(terms_M, Tensor) or terms_M.shape != tokens.new_M.shape:
            result = (
                f"a tensor {tuple(terms_M.shape)}" if isinstance(terms_M, Tensor) else f"{terms_M!r:.100}"
            )
            raise ConfigError(
                f"The loss {self.name} returned {result} for {len(tokens.new_M)} tokens; it must return one "
                "term for each, not summed and not weighted."
            )
        if changed := [name for name, version in _versions(tokens).items() if version != versions[name]]:
            raise ConfigError(
                f"The loss {self.name} changed {', '.join(changed)} in place; work on a copy "
                f"(`tokens.{changed[0]}.clone()`)."
            )
        if tokens.new_M.requires_grad and not terms_M.requires_grad:
            raise ConfigError(
                f"The loss {self.name} returned terms without a gradient; make them of `tokens.new_M` "
                "(`0.0 * tokens.new_M` where there is nothing to learn)."
            )
        return terms_M

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return torch.zeros_like(tokens.new_M, dtype=torch.bool)


@dataclass(kw_only=True, slots=True, frozen=True)
class WholeVocabulary:
    """A · divergence of the teacher's and the student's distributions (`rllm.algorithms.kl_distributions`).

    Not a name of `algorithm.loss`: it takes its place where `distill.divergence` says so. A is the role's
    `reward_weight`.
    """

    divergence: str
    beta: float

    needs_every_row = True
    needs_whole_groups = False

    def terms(self, tokens: TokenInputs) -> Tensor:
        """Raises ConfigError where no teacher was asked."""
        if tokens.divergence_M is None:
            raise ConfigError(
                "`distill.divergence` is set, but no teacher was asked; give it as a directory."
            )
        return tokens.advantages_M * tokens.divergence_M

    def clipped_M(self, tokens: TokenInputs) -> Tensor:
        return torch.zeros_like(tokens.new_M, dtype=torch.bool)


Clipped = TypeVar(
    "Clipped",
    ClippedRatio,
    SequenceRatio,
    ClippedWeight,
    GeometricMean,
    DivergenceMask,
    ClippedCovariance,
)


def _with_bounds(paper: Clipped, config: AlgorithmConfig) -> Clipped:
    """With `clip_low` and `clip_high`; where they are left to the loss, the paper's stay."""
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    return replace(paper, **{name: value for name, value in bounds.items() if value != PAPER_BOUND})


DPPO_KL = DivergenceMask(clip_low=0.05, clip_high=0.05, kl=True)
SURROGATES: dict[str, Callable[[AlgorithmConfig], Surrogate]] = {
    "ppo": lambda config: _with_bounds(ClippedRatio(dual_clip=config.dual_clip), config),
    "policy_gradient": lambda config: PolicyGradient(),
    "gspo": lambda config: _with_bounds(SequenceRatio(), config),
    "cispo": lambda config: _with_bounds(ClippedWeight(), config),
    "gmpo": lambda config: _with_bounds(GeometricMean(), config),
    "sapo": lambda config: SoftGate(positive=config.sapo_positive, negative=config.sapo_negative),
    "dppo_tv": lambda config: _with_bounds(DivergenceMask(), config),
    "dppo_kl": lambda config: _with_bounds(DPPO_KL, config),
    "topr": lambda config: Tapered(),
    "clip_cov": lambda config: _with_bounds(
        ClippedCovariance(fraction=config.cov_fraction, low=config.cov_low, high=config.cov_high), config
    ),
    "kl_cov": lambda config: PenalisedCovariance(fraction=config.cov_fraction, kl_coef=config.cov_kl_coef),
    "importance_sampling": lambda config: ImportanceRatio(),
}
"""By the name of `algorithm.loss`."""


def surrogate_named(config: AlgorithmConfig, context: AlgorithmContext | None = None) -> Surrogate:
    """The surrogate that `algorithm.loss` names, with its keys; `file.py:function` or
    `package.module:function` is the user's, which may look at the context.

    Raises ConfigError where there is none.
    """
    if is_own(config.loss):
        return own_function(config.loss, context or AlgorithmContext(config=config))
    if config.loss not in SURROGATES:
        raise ConfigError(f"There is no loss `{config.loss}`; {choices_of(config.loss, SURROGATES)}.")
    surrogate = SURROGATES[config.loss](config)
    if context is not None and isinstance(surrogate, ClippedCovariance):
        return replace(surrogate, context=context)
    return surrogate


def own_function(name: str, context: AlgorithmContext) -> OwnFunction:
    """The loss that a user wrote, by dotted path: a function, or an object (or its class) with `terms`.

    Raises ConfigError where it cannot be called, and for bounds that are set but that it cannot see.
    """
    loss = object_named(name, group="rllm.losses", what="loss")
    loss = made_from(loss) if inspect.isclass(loss) else loss
    function = getattr(loss, "terms", loss)
    mend = "write `def loss(tokens: TokenInputs) -> Tensor`, with `context` as a second argument if it wants"
    if takes(function, 2):
        require_call(function, name, ("tokens", "context"), "loss", mend)
        return OwnFunction(name=name, function=function, context=context)
    require_call(function, name, ("tokens",), "loss", mend)
    for key in OF_OWN:
        why = f"{name} takes no context to read it from; write `def {name_of(function)}(tokens, context)`"
        unused("algorithm", context.config, key, why)
    return OwnFunction(name=name, function=function)


def _chosen_tokens(tokens: TokenInputs) -> Tensor:
    if tokens.chosen_M is None:
        raise ConfigError("This loss treats some tokens of an update apart, and none has been chosen.")
    return tokens.chosen_M > 0.0


def _versions(tokens: TokenInputs) -> dict[str, int]:
    """Writes to each tensor so far, as torch counts them."""
    values = {each.name: getattr(tokens, each.name) for each in fields(tokens)}
    return {name: each._version for name, each in values.items() if each is not None}


def _ratios(tokens: TokenInputs) -> Tensor:
    return torch.exp(tokens.new_M - tokens.old_M)


def _outside(ratio_M: Tensor, low: float, high: float) -> Tensor:
    return (ratio_M < 1.0 - low) | (ratio_M > 1.0 + high)


def _clipped_terms(ratio_M: Tensor, advantages_M: Tensor, low: float, high: float) -> Tensor:
    clipped_M = ratio_M.clamp(1.0 - low, 1.0 + high)
    return -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)


def _row_mean_straight_through(values_M: Tensor, row_M: Tensor) -> Tensor:
    """[M] the mean over the row as a value; the gradient goes to the token itself, undivided."""
    return row_means(values_M, row_M) + (values_M - values_M.detach())


def _binary_kl(old_M: Tensor, new_M: Tensor) -> Tensor:
    """[M] KL between "this token" and "any other" under the old and the new log-probabilities."""
    # 1 - exp would lose its digits where a token is nearly certain. `tiny` keeps the logarithm finite where
    # it is certain.
    tiny = torch.finfo(new_M.dtype).tiny
    other_old_M, other_new_M = -torch.expm1(old_M), (-torch.expm1(new_M)).clamp(min=tiny)
    of_other_M = torch.xlogy(other_old_M, other_old_M) - torch.xlogy(other_old_M, other_new_M)
    return old_M.exp() * (old_M - new_M) + of_other_M
