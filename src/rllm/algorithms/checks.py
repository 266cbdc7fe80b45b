"""Does an estimator keep the laws that the trainer counts on? Rewards in, verdicts out.

    rewards_G -> advantages_G      order of attempts, direction; what shifts, scales and ties do

`rllm doctor algorithm` prints the verdicts, and those of `rllm.algorithms.loss_checks`; the built-in
algorithms are held to them in the tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from rllm.algorithms.advantages import Attempt, ByToken, FloatArray
from rllm.algorithms.estimators import Estimator

Estimate = Callable[[FloatArray], FloatArray]

GROUP_SIZES = range(2, 17)
SAME = 1e-10
"""Two ways of computing one number in float64 agree within this."""


class CheckVerdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    """A law is broken: training with it would be wrong."""
    NOTED = "noted"
    """Good to know; neither right nor wrong."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Check:
    name: str
    verdict: CheckVerdict
    detail: str
    """The finding and, where a law is broken, how to mend it."""


def pass_check(name: str, detail: str) -> Check:
    return Check(name=name, verdict=CheckVerdict.PASSED, detail=detail)


def fail_check(name: str, detail: str) -> Check:
    return Check(name=name, verdict=CheckVerdict.FAILED, detail=detail)


def group_form(estimator: Estimator) -> Estimate:
    """An estimator as a function of the rewards of one task's attempts: of one turn of four tokens, seen
    from the same state, beside a greedy attempt that was paid 0.5; the mean over the tokens of each."""

    def estimate(rewards_G: FloatArray) -> FloatArray:
        attempts = [
            Attempt(
                reward=reward,
                num_tokens=4,
                turn_rewards_K=np.array([reward]),
                returns_K=np.array([reward]),
                states_K=("start",),
                baseline=0.5,
                role="agent",
                task_id="task",
                num_tokens_K=(4,),
            )
            for reward in rewards_G.tolist()
        ]
        advantages = estimator.estimate(attempts)
        values = advantages.advantages if isinstance(advantages, ByToken) else advantages
        return np.array([each.mean() for each in values])

    return estimate


def check_estimator(estimate: Estimate) -> list[Check]:
    """Verdicts on an estimator of the attempts at one task, such as a user's."""
    rng = np.random.default_rng(0)
    groups = [rng.uniform(size=size) for size in GROUP_SIZES]
    groups += [np.arange(size, dtype=np.float64) % 2 for size in GROUP_SIZES]
    failure = next(filter(None, (_estimator_contract(estimate, rewards_G) for rewards_G in groups)), "")
    if failure:
        return [Check(name="contract", verdict=CheckVerdict.FAILED, detail=failure)]
    contract = "one finite number an attempt, the same each time, for groups of 2 to 16"
    return [
        Check(name="contract", verdict=CheckVerdict.PASSED, detail=contract),
        _attempt_order(estimate, groups, rng),
        _estimator_direction(estimate, groups),
        _shift(estimate, groups),
        _scale(estimate, groups),
        _ties(estimate),
        _negative_rewards(estimate),
        _group_of_one(estimate),
    ]


def _estimator_contract(estimate: Estimate, rewards_G: FloatArray) -> str:
    """The fault of what it returns for one group; empty where there is none."""
    copy = rewards_G.copy()
    requirement = f"return one number an attempt, an array of shape [{len(rewards_G)}]"
    try:
        first: Any = estimate(copy)
        second: Any = estimate(rewards_G.copy())
    except Exception as error:  # noqa: BLE001  whatever a user's function raises is the verdict
        return f"raised {type(error).__name__} for a group of {len(rewards_G)}: {error}"
    if np.shape(first) != rewards_G.shape:
        return f"returned the shape {list(np.shape(first))} for {len(rewards_G)} rewards; {requirement}"
    if not np.isfinite(np.asarray(first, dtype=np.float64)).all():
        return f"returned numbers that are not finite for the rewards {rewards_G.tolist()}"
    if not np.array_equal(copy, rewards_G):
        return "writes into the rewards that it is given; compute with a copy"
    if not np.array_equal(first, second):
        return "returned other advantages for the same rewards; leave out random draws and state"
    return ""


def _attempt_order(estimate: Estimate, groups: Sequence[FloatArray], rng: np.random.Generator) -> Check:
    worst = 0.0
    for rewards_G in groups:
        order = rng.permutation(len(rewards_G))
        worst = max(worst, float(np.abs(estimate(rewards_G)[order] - estimate(rewards_G[order])).max()))
    if not worst <= SAME:
        return fail_check(
            "order of attempts",
            f"advantages change by {worst:.1e} when attempts change places; attempts have no order",
        )
    return pass_check("order of attempts", f"changes nothing (within {worst:.0e})")


def _estimator_direction(estimate: Estimate, groups: Sequence[FloatArray]) -> Check:
    agreement = [float((estimate(each) * (each - each.mean())).sum()) for each in groups]
    if all(value < 0.0 for value in agreement):
        return fail_check("direction", "attempts with higher rewards get lower advantages")
    if all(value >= -SAME for value in agreement):
        return pass_check("direction", "attempts with higher rewards get higher advantages")
    return Check(
        name="direction", verdict=CheckVerdict.NOTED, detail="a higher reward does not always mean more"
    )


def _shift(estimate: Estimate, groups: Sequence[FloatArray]) -> Check:
    gap = max(float(np.abs(estimate(each + 3.0) - estimate(each)).max()) for each in groups)
    effect = "changes nothing" if gap <= 1e-8 else f"changes advantages by up to {gap:.2g}"
    return Check(name="shift", verdict=CheckVerdict.NOTED, detail=f"adding 3 to every reward {effect}")


def _scale(estimate: Estimate, groups: Sequence[FloatArray]) -> Check:
    pairs = [(estimate(5.0 * each), estimate(each)) for each in groups]
    same = max(float(np.abs(scaled - plain).max()) for scaled, plain in pairs)
    linear = max(float(np.abs(scaled - 5.0 * plain).max()) for scaled, plain in pairs)
    effect = (
        "changes (almost) nothing"
        if same <= 1e-4
        else "gives advantages 5 times as large"
        if linear <= 1e-8
        else "changes advantages, but not in proportion"
    )
    return Check(name="scale", verdict=CheckVerdict.NOTED, detail=f"rewards 5 times as large: {effect}")


def _ties(estimate: Estimate) -> Check:
    """Also of rewards whose mean is rounded, so that they seem to deviate from it."""
    largest: dict[float, float] = {}
    with np.errstate(all="ignore"):
        for reward in (0.0, 1.0, 0.1):
            largest_values = [np.abs(estimate(np.full(size, reward))).max() for size in GROUP_SIZES]
            largest[reward] = float(max(largest_values, key=lambda value: (not np.isfinite(value), value)))
    bad = [reward for reward, value in largest.items() if not np.isfinite(value)]
    if bad:
        return fail_check("ties", f"advantages of equal rewards of {bad[0]:g} are not finite; add an epsilon")
    detail = (
        "equal rewards give zeros: nothing to compare, so nothing to learn"
        if max(largest.values()) <= 1e-8
        else f"equal rewards teach something: rewards of 1 give {largest[1.0]:.2g}, of 0 {largest[0.0]:.2g}, "
        f"of 0.1 {largest[0.1]:.2g}"
    )
    return Check(name="ties", verdict=CheckVerdict.NOTED, detail=detail)


def _negative_rewards(estimate: Estimate) -> Check:
    try:
        advantages_G = np.asarray(estimate(np.array([-2.0, -1.0, 0.0, 1.0])), dtype=np.float64)
    except Exception as error:  # noqa: BLE001  a user's function may want rewards of 0 and 1
        detail = f"raise {type(error).__name__}: {error}"
    else:
        finite = np.isfinite(advantages_G).all()
        detail = "are taken" if finite else f"give {advantages_G.tolist()}: pay 0 or more"
    return Check(name="negative rewards", verdict=CheckVerdict.NOTED, detail=detail)


def _group_of_one(estimate: Estimate) -> Check:
    try:
        with np.errstate(all="ignore"):
            alone = np.asarray(estimate(np.ones(1)), dtype=np.float64)
    except Exception as error:  # noqa: BLE001  a user's function may want groups
        detail = f"raises {type(error).__name__}"
    else:
        detail = f"gives {alone.tolist()} for the reward 1"
    return Check(name="group of one", verdict=CheckVerdict.NOTED, detail=detail)
