"""Two evaluations of the same tasks, task by task: is one better, by how much, and where.

results A, results B ──pairs by task──► difference with its interval, p-value, the tasks that changed

A task that only one of them attempted says nothing about the difference; it is counted and left out.
"""

import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rllm.errors import ConfigError
from rllm.eval.report import by_task
from rllm.eval.results import Result
from rllm.eval.statistics import (
    equal_differences_interval,
    have_equal_means,
    mcnemar,
    newcombe_interval,
    percentiles,
    resampled_means,
    sign_flip_test,
)
from rllm.types.html import html_table, percent


@dataclass(kw_only=True, slots=True, frozen=True)
class Change:
    """A task that one evaluation did better than the other."""

    task_id: str
    before: float
    """Share of the first one's attempts that succeeded."""
    after: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparison:
    """`difference` is the second's success minus the first's, over the tasks of both."""

    tasks: int
    only_in_first: int
    only_in_second: int
    first_failed: int
    """Attempts at the tasks of both that failed, and count as no success."""
    second_failed: int
    first: float
    second: float
    difference: float
    difference_interval: tuple[float, float]
    """95 %."""
    interval_method: str
    """`newcombe` of pairs where each instance was attempted once; else `bootstrap` over instances, or
    `wilson` where all differ alike."""
    p_value: float
    """Two-sided: how likely so large a difference were, if both were as good."""
    test: str
    """`mcnemar` (exact) where each instance was attempted once, else `sign_flip` over instances."""
    better: list[Change]
    worse: list[Change]

    @property
    def is_significant(self) -> bool:
        """At 5 %."""
        return self.p_value < 0.05

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_significant": self.is_significant}

    def _repr_html_(self) -> str:
        """In a notebook: both rates, their difference, and how many tasks changed."""
        low, high = self.difference_interval
        difference = f"{100 * self.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] points"
        columns = ("tasks", "first", "second", "difference, 95 %", "p", "better", "worse")
        counts = (len(self.better), len(self.worse))
        rates = (percent(self.first), percent(self.second))
        row = (self.tasks, *rates, difference, f"{self.p_value:.3g}", *counts)
        return html_table(columns, [row])


def compare(first: Sequence[Result], second: Sequence[Result]) -> Comparison:
    """Raises ConfigError where the two have no task in common."""
    one, other = _shares(first), _shares(second)
    common_ids = [task_id for task_id in one if task_id in other]
    if not common_ids:
        raise ConfigError(
            "The two evaluations have no task in common, so they cannot be compared; evaluate both on the "
            "same benchmark and split."
        )
    _require_same_questions(first, second)
    differences = [other[task_id] - one[task_id] for task_id in common_ids]
    instances = _instances(first, common_ids)
    single = len(set(instances)) == len(common_ids) and all(
        one[each] in (0.0, 1.0) and other[each] in (0.0, 1.0) for each in common_ids
    )
    better = sum(each > 0 for each in differences)
    worse = sum(each < 0 for each in differences)
    if single:
        both = sum(one[each] == other[each] == 1.0 for each in common_ids)
        interval = newcombe_interval(both, worse, better, len(common_ids) - both - worse - better)
        method = "newcombe"
    else:
        interval, method = _difference_interval(differences, instances)
    changes = [
        Change(task_id=task_id, before=one[task_id], after=other[task_id])
        for task_id in common_ids
        if one[task_id] != other[task_id]
    ]
    return Comparison(
        tasks=len(common_ids),
        only_in_first=len(one) - len(common_ids),
        only_in_second=len(other) - len(common_ids),
        first_failed=_num_failed(first, common_ids),
        second_failed=_num_failed(second, common_ids),
        first=sum(one[each] for each in common_ids) / len(common_ids),
        second=sum(other[each] for each in common_ids) / len(common_ids),
        difference=sum(differences) / len(common_ids),
        difference_interval=interval,
        interval_method=method,
        p_value=mcnemar(worse, better) if single else sign_flip_test(_sums(differences, instances)),
        test="mcnemar" if single else "sign_flip",
        better=[each for each in changes if each.after > each.before],
        worse=[each for each in changes if each.after < each.before],
    )


def _shares(results: Sequence[Result]) -> dict[str, float]:
    """Success by task; a failed attempt counts as none."""
    return {
        task_id: sum(each.is_correct for each in attempts) / len(attempts)
        for task_id, attempts in by_task(results).items()
    }


def _num_failed(results: Sequence[Result], task_ids: Collection[str]) -> int:
    ids = set(task_ids)
    return sum(each.has_failed and each.episode.task_id in ids for each in results)


def _difference_interval(
    differences: Sequence[float], instances: Sequence[str]
) -> tuple[tuple[float, float], str]:
    distinct = len(set(instances))
    if not have_equal_means(differences, instances):
        draws_R = resampled_means(np.asarray(differences)[:, None], instances)[:, 0]
        return percentiles(draws_R, distinct), "bootstrap"
    return equal_differences_interval(statistics.fmean(differences), distinct), "wilson"


def _instances(results: Sequence[Result], task_ids: Sequence[str]) -> list[str]:
    """The instance of each task."""
    by_id = {result.episode.task_id: result.instance for result in results}
    return [by_id[task_id] or task_id for task_id in task_ids]


def _sums(differences: Sequence[float], instances: Sequence[str]) -> list[float]:
    """The differences of tasks that are one instance together: they have one sign."""
    sums: dict[str, float] = dict.fromkeys(instances, 0.0)
    for difference, instance in zip(differences, instances, strict=True):
        sums[instance] += difference
    return list(sums.values())


def _require_same_questions(first: Sequence[Result], second: Sequence[Result]) -> None:
    """Raises ConfigError where tasks of one name are not the same tasks."""
    first_questions = {result.episode.task_id: result.asked for result in first if result.asked}
    others = {result.episode.task_id: result.asked for result in second if result.asked}
    differing = [
        task_id
        for task_id in first_questions
        if others.get(task_id, first_questions[task_id]) != first_questions[task_id]
    ]
    if differing:
        raise ConfigError(
            f"{len(differing)} tasks, such as {differing[0]!r}, are other ones in the two evaluations under "
            "the same name, so they cannot be compared; evaluate both with the same settings."
        )
