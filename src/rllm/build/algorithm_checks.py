"""A loss or an estimator by name in, verdicts on it out.

NAME ──► a loss, or an estimator ──► rllm.algorithms.checks, rllm.trainer.update_checks ──► verdicts
"""

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rllm.algorithms.checks import Check, CheckVerdict, check_estimator, group_form
from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.estimators import ESTIMATORS, Estimator, estimator_named, sees_attempts
from rllm.algorithms.loss_checks import check_loss, columns_read
from rllm.algorithms.losses import policy_loss
from rllm.algorithms.surrogates import own_function
from rllm.config.algorithm import LOSSES, PAPER_BOUND, AlgorithmConfig
from rllm.errors import ConfigError
from rllm.trainer.update_checks import check_update
from rllm.types.callables import made_from, name_of, takes
from rllm.types.names import object_named

ENTRY_POINTS = "rllm.algorithms"
_WANTED = (
    "write a loss as `def my_loss(tokens: TokenInputs) -> Tensor` and an estimator as "
    "`def my_advantages(rewards_G)` or `def my_advantages(attempts, context)`"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class AlgorithmReport:
    """All checks of one algorithm."""

    name: str
    kind: str
    """`loss` or `estimator`."""
    checks: Sequence[Check]

    @property
    def failures(self) -> list[Check]:
        return [each for each in self.checks if each.verdict is CheckVerdict.FAILED]

    @property
    def training_assignments(self) -> list[str]:
        """The settings of a benchmark's run that trains with it."""
        # The benchmark sets a bound for PPO's ratio; it is refused by a loss that would not look at it.
        unbound = self.kind == "loss" and self.name != "ppo"
        assignments = [f"algorithm.{self.kind}={self.name}"]
        return [*assignments, *([f"algorithm.clip_high={PAPER_BOUND:g}"] if unbound else [])]


def check_algorithm(name: str, kind: str | None = None) -> AlgorithmReport:
    """Alone, and where that holds also as the trainer applies it. `kind`: where the signature does not tell.

    Raises ConfigError for a name that leads to no algorithm, and for one that cannot be checked.
    """
    algorithm, columns = _algorithm_named(name), list[str]()
    kind = kind or _kind_of(algorithm, name)
    if kind == "loss":
        terms = own_function(name, AlgorithmContext()).terms if ":" in name else algorithm.terms
        checks = check_loss(
            terms,
            needs_every_row=getattr(algorithm, "needs_every_row", True),
            needs_whole_groups=getattr(algorithm, "needs_whole_groups", True),
        )
        columns = columns_read(terms)
    else:
        if isinstance(algorithm, Estimator) or takes(algorithm, 2) or sees_attempts(algorithm):
            algorithm = group_form(estimator_named(name))
        checks = check_estimator(algorithm)
    if not any(each.verdict is CheckVerdict.FAILED for each in checks):
        # A loss is applied with unbiased advantages, so that what is measured is the loss's own doing.
        settings = {"estimator": "rloo"} | {kind: name}
        checks += check_update([f"algorithm.{key}={value}" for key, value in settings.items()], columns)
    return AlgorithmReport(name=name, kind=kind, checks=checks)


def _algorithm_named(name: str) -> Any:
    """The function or object; of a class an instance of it."""
    if ":" in name or name.endswith(".py"):
        algorithm = object_named(name, group=ENTRY_POINTS, what="algorithm")
        return made_from(algorithm) if inspect.isclass(algorithm) else algorithm
    return _built_in(name)


def _built_in(name: str) -> Any:
    if name in LOSSES:
        return policy_loss(AlgorithmConfig(loss=name))
    if name not in ESTIMATORS:
        names = (*ESTIMATORS, *LOSSES)
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are {', '.join(names)}."
        raise ConfigError(
            f"There is no algorithm `{name}`; {hint} One of your own is named file.py:function."
        )
    if ESTIMATORS[name].token_level:
        raise ConfigError(
            f"`{name}` makes its advantages token by token, from more than the rewards of a group; "
            "there is nothing of it to check here."
        )
    return ESTIMATORS[name]


def _kind_of(algorithm: Any, name: str) -> str:
    if callable(getattr(algorithm, "terms", None)):
        return "loss"
    if isinstance(algorithm, Estimator):
        return "estimator"
    if not callable(algorithm):
        raise ConfigError(
            f"`{name}` is {algorithm!r:.80} (a {type(algorithm).__name__}), no algorithm; {_WANTED}."
        )
    parameters = list(inspect.signature(algorithm).parameters.values())
    first = parameters[0] if parameters else None
    if first is not None:
        annotation = getattr(first.annotation, "__name__", str(first.annotation))
        if "TokenInputs" in annotation or first.name == "tokens":
            return "loss"
        if first.name.startswith(("reward", "attempt")) or "Attempt" in annotation:
            return "estimator"
    raise ConfigError(
        f"`{name}` does not tell whether {name_of(algorithm)} is a loss or an estimator; say it with --kind, "
        f"or {_WANTED}."
    )
