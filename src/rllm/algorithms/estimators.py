"""Advantage estimators by name: which formula, what it compares, what it needs.

    algorithm.estimator, its own keys ──estimator_named──► Estimator.estimate: attempts ──► [K] per attempt
    file.py:function ───────────────────────────┘

The formulas are those of `rllm.algorithms.advantages`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rllm.algorithms.advantages import (
    Attempt,
    ByToken,
    FloatArray,
    dr_grpo_advantages,
    gigpo_advantages,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    pass_at_k_advantages,
    prpo_advantages,
    reinforce_advantages,
    reinforce_baseline_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from rllm.algorithms.context import AlgorithmContext
from rllm.config.algorithm import AlgorithmConfig
from rllm.errors import ConfigError, RewardError, choices_of
from rllm.types.callables import require_call, takes
from rllm.types.names import object_named

Estimate = Callable[[Sequence[Attempt]], list[FloatArray] | ByToken]
"""Attempts that are compared with each other -> [K] advantages of the turns of each, or of their tokens."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimator:
    """A rule, what it compares and what it needs."""

    estimate: Estimate
    within_groups: bool = True
    """The attempts at one task; otherwise all attempts of a step by the role."""
    compares_attempts: bool = True
    """Attempts at one task are compared with each other: equal rewards give zeros, and the group ties."""
    min_group: int = 2
    """Attempts at one task without which there is nothing to compare: fewer get zeros."""
    needs_states: bool = False
    """`states_K` (GiGPO)."""
    needs_greedy: bool = False
    """`baseline`, from one more attempt at each task, by the likeliest tokens (ReMax)."""
    needs_critic: bool = False
    token_level: bool = False
    """Advantages are made from rows, token by token (`algorithms/returns.py`); the attempts get NaN until
    then, which nobody can take for an advantage."""
    tells_turns_apart: bool = False
    """It credits turns in its own way, so that `algorithm.credit` has nothing to say."""


def _rewards(attempts: Sequence[Attempt]) -> FloatArray:
    return np.array([each.reward for each in attempts], dtype=np.float64)


def _lengths(attempts: Sequence[Attempt]) -> FloatArray:
    return np.array([each.num_tokens for each in attempts], dtype=np.float64)


def _groups(attempts: Sequence[Attempt]) -> NDArray[np.int64]:
    return np.array([each.group for each in attempts], dtype=np.int64)


def _baselines(attempts: Sequence[Attempt]) -> FloatArray:
    missing = sum(each.baseline is None for each in attempts)
    if missing:
        raise RewardError(
            f"{missing} of {len(attempts)} attempts have no greedy attempt beside them, which ReMax compares "
            'with; mend what made it fail, or choose `algorithm.estimator = "rloo"`.'
        )
    return np.array([each.baseline for each in attempts], dtype=np.float64)


def to_all_turns(formula: Callable[[Sequence[Attempt]], FloatArray]) -> Estimate:
    """One number per attempt, given to all of its turns."""

    def estimate(attempts: Sequence[Attempt]) -> list[FloatArray]:
        advantages = formula(attempts)
        return [np.full(len(each.returns_K), a) for each, a in zip(attempts, advantages, strict=True)]

    return estimate


def _of_rewards(formula: Callable[[FloatArray], FloatArray]) -> Estimate:
    return to_all_turns(lambda attempts: formula(_rewards(attempts)))


def _later(attempts: Sequence[Attempt]) -> list[FloatArray]:
    return [np.full(len(each.returns_K), np.nan) for each in attempts]


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(estimate=_of_rewards(grpo_advantages)),
    "dr_grpo": Estimator(estimate=_of_rewards(dr_grpo_advantages)),
    "rloo": Estimator(estimate=_of_rewards(rloo_advantages)),
    "opo": Estimator(estimate=to_all_turns(lambda them: opo_advantages(_rewards(them), _lengths(them)))),
    "maxrl": Estimator(estimate=_of_rewards(maxrl_advantages)),
    "pass_at_k": Estimator(estimate=_of_rewards(pass_at_k_advantages)),
    "gigpo": Estimator(estimate=gigpo_advantages, needs_states=True, tells_turns_apart=True),
    "gpg": Estimator(
        estimate=to_all_turns(lambda them: gpg_advantages(_rewards(them), _groups(them))),
        within_groups=False,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        estimate=to_all_turns(
            lambda them: reinforce_plus_plus_baseline_advantages(
                _rewards(them), _lengths(them), _groups(them)
            )
        ),
        within_groups=False,
    ),
    "reinforce_plus_plus": Estimator(
        estimate=to_all_turns(lambda them: reinforce_plus_plus_advantages(_rewards(them), _lengths(them))),
        within_groups=False,
        compares_attempts=False,
        min_group=1,
    ),
    "reinforce_baseline": Estimator(
        estimate=_of_rewards(reinforce_baseline_advantages),
        within_groups=False,
        compares_attempts=False,
        min_group=1,
    ),
    "prpo": Estimator(
        estimate=_of_rewards(prpo_advantages), within_groups=False, compares_attempts=False, min_group=1
    ),
    "reinforce": Estimator(estimate=_of_rewards(reinforce_advantages), compares_attempts=False, min_group=1),
    "remax": Estimator(
        estimate=to_all_turns(lambda them: remax_advantages(_rewards(them), _baselines(them))),
        compares_attempts=False,
        min_group=1,
        needs_greedy=True,
    ),
    "gae": Estimator(
        estimate=_later,
        compares_attempts=False,
        min_group=1,
        needs_critic=True,
        token_level=True,
        tells_turns_apart=True,
    ),
    "teacher": Estimator(
        estimate=_later,
        compares_attempts=False,
        min_group=1,
        token_level=True,
        tells_turns_apart=True,
    ),
}
"""GAE, which is made from rows, is `rllm.algorithms.returns.gae`; what a teacher makes of rows is
`rllm.trainer.teacher`."""


def _with_k(config: AlgorithmConfig) -> Estimator:
    """A group that has lost so many attempts that there are no k of them left gives zeros."""
    if not config.pass_k:
        return ESTIMATORS["pass_at_k"]
    formula = partial(pass_at_k_advantages, k=config.pass_k)
    return replace(ESTIMATORS["pass_at_k"], estimate=_of_rewards(formula), min_group=config.pass_k)


def _with_omega(config: AlgorithmConfig) -> Estimator:
    compare = grpo_advantages if config.gigpo_norm == "std" else dr_grpo_advantages
    formula = partial(gigpo_advantages, omega=config.gigpo_omega, compare=compare)
    return replace(ESTIMATORS["gigpo"], estimate=formula)


CHOICES: dict[str, Callable[[AlgorithmConfig], Estimator]] = {"pass_at_k": _with_k, "gigpo": _with_omega}
"""Estimators that look at keys of their own; without them they are as in ESTIMATORS."""


def estimator_named(name: str, context: AlgorithmContext | None = None) -> Estimator:
    """One of ESTIMATORS, with the keys of the context; or what `file.py:name` or `package.module:name` leads
    to.

    That is an `Estimator`, or a function of the user's; see `own_estimator`. Raises ConfigError for a name
    that leads nowhere.
    """
    if name in CHOICES and context is not None:
        return CHOICES[name](context.config)
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" not in name:
        raise ConfigError(
            f"There is no advantage estimator `{name}`; {choices_of(name, ESTIMATORS)}, or write "
            "file.py:function for one of your own."
        )
    estimator = object_named(name, group="rllm.estimators", what="advantage estimator")
    if isinstance(estimator, Estimator):
        return estimator
    if not callable(estimator):
        raise ConfigError(
            f"`{name}` is a {type(estimator).__name__}; an advantage estimator is a function of the "
            "rewards of a group, or of its attempts, or an rllm.algorithms.estimators.Estimator."
        )
    return own_estimator(name, estimator, context or AlgorithmContext())


def own_estimator(name: str, function: Callable[..., Any], context: AlgorithmContext) -> Estimator:
    """A function of the user's, of the attempts at one task:

    - `(rewards_G)` or `(attempts)`, by the name of its first argument; with a second one also the context;
    - what it returns is [G], a number for each attempt; or for each attempt [K], a number for each of its
      turns; or `ByToken`, a number for each of its trained tokens.
    """
    with_context = takes(function, 2)
    of_attempts = sees_attempts(function)
    what = ("attempts" if of_attempts else "rewards_G", *(("context",) if with_context else ()))
    mend = "write `def estimator(rewards_G)`, or `def estimator(attempts, context)`"
    require_call(function, name, what, "advantage estimator", mend)

    def estimate(attempts: Sequence[Attempt]) -> list[FloatArray] | ByToken:
        first = list(attempts) if of_attempts else _rewards(attempts)
        return _require_advantages(
            name, function(first, context) if with_context else function(first), attempts
        )

    return Estimator(estimate=estimate, min_group=1)


def sees_attempts(function: Callable[..., Any]) -> bool:
    """Whether a function of the user's is one of attempts, by its first argument, instead of rewards."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except ValueError:  # a builtin without a signature
        return False
    return first is not None and (first.name.startswith("attempt") or "Attempt" in str(first.annotation))


def _real_numbers(values: Any) -> FloatArray:
    """As float64; NaN for what is no number, such as text, or none on the real line."""
    array = np.asarray(values)
    return array.astype(np.float64) if array.dtype.kind in "biuf" else np.full(array.shape, np.nan)


def _require_advantages(name: str, result: Any, attempts: Sequence[Attempt]) -> list[FloatArray] | ByToken:
    """The result of a user's function, in one of its three forms. Raises ConfigError for any other."""
    by_token = isinstance(result, ByToken)
    sizes = [each.num_tokens if by_token else each.num_turns for each in attempts]
    advantages: Any = result.advantages if isinstance(result, ByToken) else result
    values: list[FloatArray] = []
    if isinstance(advantages, Sequence | np.ndarray):
        values = [_real_numbers(each) for each in cast("Sequence[Any]", advantages)]
    if len(values) == len(attempts):
        one_each = not by_token and all(each.ndim == 0 for each in values)
        values = [np.full(n, each) for n, each in zip(sizes, values, strict=True)] if one_each else values
    is_sound = [each.shape for each in values] == [(size,) for size in sizes]
    if not is_sound or not all(np.isfinite(each).all() for each in values):
        raise ConfigError(
            f"The estimator {name} made {result!r:.300} of the rewards {_rewards(attempts).tolist()}; it "
            "must return one finite number for each attempt, for each turn of each, or, as ByToken, for each "
            f"trained token of each: {sizes} here."
        )
    return ByToken(values) if by_token else values
