"""The worth of training: how near the best the result is, and how far above what needs no skill.

results, baselines            ──► score_of  ──► 100 (return - random) / (optimum - random)
results before and after, …   ──► skill_of  ──► trained minus the greatest of baselines and greedy start
                              └─► by_kind   ──► the same pairs, kind by kind

All differences are of pairs: both sides of one are of the same task. Intervals resample instances, so that a
task that repeats another adds nothing. What is said follows from the interval and never from the estimate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from rllm.environments.world import OPTIMUM, RANDOM
from rllm.eval.report import by_task
from rllm.eval.results import AGAIN, Result
from rllm.eval.statistics import equal_differences_interval, percentiles, resampled_means
from rllm.eval.task_facts import TaskFacts

_ROUNDING = 1e-9
"""Resamples that differ by less are of equal differences, added in another order."""
Values = Mapping[str, float]
"""By task id."""


class Measure(StrEnum):
    """The measure of a task."""

    SUCCESS = "success"
    """Where it pays 1 for success and 0 for all else, or pays several roles; a failure is no success."""
    RETURN = "return"
    """Where it pays anything else; attempts that the infrastructure failed say nothing."""


class SkillVerdict(StrEnum):
    """The verdict of an interval on a difference."""

    GAINED = "gained"
    NO_DIFFERENCE = "no difference seen"
    LOST = "lost"


@dataclass(kw_only=True, slots=True, frozen=True)
class Difference:
    """A mean difference over pairs."""

    value: float
    interval: tuple[float, float]
    """95 %."""

    @property
    def verdict(self) -> SkillVerdict:
        if self.interval[0] > 0.0:
            return SkillVerdict.GAINED
        return SkillVerdict.LOST if self.interval[1] < 0.0 else SkillVerdict.NO_DIFFERENCE


def measure_of(*groups: Sequence[Result]) -> Measure:
    """Success, where all that was paid is 1 for what succeeded and 0 for all else."""
    pays_success = all(
        result.worth == float(result.is_correct)
        for results in groups
        for result in results
        if _counts(result)
    )
    return Measure.SUCCESS if pays_success else Measure.RETURN


def values_of(results: Sequence[Result], measure: Measure) -> dict[str, float]:
    """Mean of each task's attempts."""
    values: dict[str, float] = {}
    for task_id, attempts in by_task(results).items():
        if measure is Measure.SUCCESS:
            values[task_id] = sum(each.is_correct for each in attempts) / len(attempts)
        elif returns := [each.worth for each in attempts if _counts(each)]:
            values[task_id] = sum(returns) / len(returns)
    return values


def score_of(results: Sequence[Result], facts: TaskFacts) -> dict[str, Any]:
    """`score` and `score_interval`: 0 is what chance comes to, 100 the optimum. Nothing where either is not
    known, or both are one."""
    values = values_of(results, Measure.RETURN)
    random, optimum = facts.baselines.get(RANDOM), facts.baselines.get(OPTIMUM)
    if not values or not random or not optimum:
        return {}
    rows_N_K = np.array([(values[each] - random[each], optimum[each] - random[each]) for each in values])
    gap = float(rows_N_K[:, 1].mean())
    if gap <= 0.0:
        return {}
    draws_R_K = resampled_means(rows_N_K, [facts.instances[each] for each in values])
    # A resample may hold only tasks where chance is already the best. There is nothing to divide by.
    draws_R_K = draws_R_K[draws_R_K[:, 1] > 0.0]
    share = _difference(
        float(rows_N_K[:, 0].mean()) / gap,
        draws_R_K[:, 0] / draws_R_K[:, 1],
        len({facts.instances[each] for each in values}),
    )
    return {"score": 100.0 * share.value, "score_interval": [100.0 * end for end in share.interval]}


def skill_of(
    after: Values,
    references: Mapping[str, Values],
    instances: Mapping[str, str],
    *,
    comparisons: int = 1,
) -> tuple[Difference, dict[str, Difference]]:
    """(`after` minus the greatest of the references, `after` minus each of them).

    Which reference is greatest is decided anew in every resample: the choice is uncertain too. The intervals
    of several `comparisons` hold together. Raises ValueError for no references.
    """
    if not references:
        raise ValueError("skill_of needs one reference at least.")
    common_ids = [each for each in after if all(each in values for values in references.values())]
    rows_N_K = np.array(
        [[after[each] - values[each] for values in references.values()] for each in common_ids]
    )
    clusters = [instances[each] for each in common_ids]
    draws_R_K = resampled_means(rows_N_K, clusters)
    means_K, distinct = rows_N_K.mean(axis=0), len(set(clusters))
    each = {
        name: _difference(means_K[place], draws_R_K[:, place], distinct, comparisons)
        for place, name in enumerate(references)
    }
    # The least of the differences is the one to the greatest reference.
    return _difference(means_K.min(), draws_R_K.min(axis=1), distinct, comparisons), each


def by_kind(before: Values, after: Values, facts: TaskFacts) -> list[dict[str, Any]]:
    """Statistics of each kind of task: how many, the means on both sides, and the difference of the pairs,
    whose intervals hold together for all kinds.
    """
    kinds: dict[str, list[str]] = {}
    for task_id in after:
        if task_id in before:
            kinds.setdefault(facts.kinds.get(task_id, ""), []).append(task_id)
    return [
        {
            "kind": kind,
            "tasks": len(members),
            "distinct": len({facts.instances[each] for each in members}),
            "before": sum(before[each] for each in members) / len(members),
            "after": sum(after[each] for each in members) / len(members),
            **_difference_dict(
                skill_of(
                    after,
                    {"before": {each: before[each] for each in members}},
                    facts.instances,
                    comparisons=len(kinds),
                )[0]
            ),
        }
        for kind, members in sorted(kinds.items())
    ]


def learning_facts(
    *, before: Sequence[Result], greedy: Sequence[Result], after: Sequence[Result], facts: TaskFacts
) -> dict[str, Any]:
    """The facts of a run's summary about its skill: `baselines`, `skill` and `kinds`, as plain JSON.

    `before` and `after` are sampled; `greedy` is what the model could do before, at its likeliest.
    """
    measure = measure_of(before, greedy, after)
    values = {name: values_of(each, measure) for name, each in (("before", before), ("after", after))}
    references: dict[str, Values] = {
        **{policy: each for policy, each in facts.baselines.items() if policy != OPTIMUM},
        "before, greedy": values_of(greedy, measure),
    }
    summary = {"baselines": facts.means(), "kinds": by_kind(values["before"], values["after"], facts)}
    if not all(set(values["after"]) & set(each) for each in references.values()):
        return {**summary, "skill": {}}  # one side failed altogether, so there is no pair
    skill, each = skill_of(values["after"], references, facts.instances)
    means = {name: sum(some.values()) / len(some) for name, some in references.items()}
    return {
        **summary,
        "skill": {
            "measure": str(measure),
            **_difference_dict(skill),
            "reference": min(each, key=lambda name: each[name].value),
            "references": {
                name: {"value": means[name], **_difference_dict(each[name])} for name in references
            },
        },
    }


def _difference_dict(difference: Difference) -> dict[str, Any]:
    return {
        "difference": difference.value,
        "interval": list(difference.interval),
        "verdict": str(difference.verdict),
    }


def _difference(mean: float, draws_R: np.ndarray, distinct: int, comparisons: int = 1) -> Difference:
    if distinct == 1 or np.ptp(draws_R) < _ROUNDING:
        return Difference(value=float(mean), interval=equal_differences_interval(float(mean), distinct))
    interval = percentiles(draws_R, distinct, comparisons=comparisons)
    return Difference(value=float(mean), interval=interval)


def _counts(result: Result) -> bool:
    return result.outcome not in AGAIN
