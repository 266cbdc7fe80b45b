"""The result of an evaluation, with nothing left out.

Results ──► report_of ──► counts, success with failures as zero and without them, intervals
       └──► details_of ──► pass@k, majority, best of k, categories, tokens, seconds, cost
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rllm.errors import ConfigError
from rllm.eval.pass_at_k import best_of_k, pass_at_k
from rllm.eval.results import Result
from rllm.eval.statistics import (
    effective_size,
    equal_differences_interval,
    have_equal_means,
    mean_interval,
    percentiles,
    resampled_means,
    wilson_interval,
)
from rllm.eval.votes import same_answers
from rllm.types.episode import Outcome


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationReport:
    """attempted = scored + truncated + failed.

    `success` counts failures as zero, `success_without_failed` leaves them out.
    """

    attempted: int
    scored: int
    truncated: int
    failed: int
    successes: int
    success: float
    success_interval: tuple[float, float]
    """95 % interval of `success`."""
    interval_method: str
    """The method of the interval: `wilson` where each instance was attempted once, else `bootstrap` over
    instances."""
    success_without_failed: float | None
    """None when everything failed."""
    success_without_failed_interval: tuple[float, float] | None
    """95 % interval of it, made as that of `success`."""
    mean_reward: float | None
    """Over the episodes that did not fail."""
    mean_turns: float
    mean_turns_interval: tuple[float, float] | None
    """95 % interval of `mean_turns`; None where it does not vary."""
    distinct: int
    """Instances among the tasks: those that ask the same are one."""
    effective_size: float
    """The number of distinct instances that would say as much, by Kish: (Σ n)² / Σ n² over attempts at
    each."""

    endings: dict[str, int] = field(default_factory=dict[str, int])
    """The number of episodes by how they ended, the most frequent first."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(kw_only=True, slots=True, frozen=True)
class Prices:
    """Prices of a million tokens, in any one currency."""

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt), ("completion", self.completion)):
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"The price of a million {name} tokens is {value}; it must be 0 or more.")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """None where no price was told."""
        if not (self.prompt or self.completion):
            return None
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


NO_PRICES = Prices()
_REASON_CHARS = 160
"""The length of a reason that failures are counted by."""


def report_of(results: Sequence[Result]) -> EvaluationReport:
    """Counts and scores of finished attempts."""
    num_scored = sum(result.outcome is Outcome.SCORED for result in results)
    num_truncated = sum(result.outcome is Outcome.TRUNCATED for result in results)
    successes = sum(result.is_correct for result in results)
    num_attempted, valid = len(results), num_scored + num_truncated
    without_failed = [result for result in results if not result.has_failed]
    rewards = [result.reward for result in without_failed]
    interval, method = _success_interval(results)
    return EvaluationReport(
        attempted=num_attempted,
        scored=num_scored,
        truncated=num_truncated,
        failed=num_attempted - valid,
        successes=successes,
        success=successes / num_attempted if num_attempted else 0.0,
        success_interval=interval,
        interval_method=method,
        success_without_failed=successes / valid if valid else None,
        success_without_failed_interval=(
            interval if len(without_failed) == num_attempted else _success_interval(without_failed)[0]
        )
        if valid
        else None,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        mean_turns=sum(result.turns for result in results) / num_attempted if num_attempted else 0.0,
        mean_turns_interval=mean_interval(
            [float(result.turns) for result in results], [_instance(result) for result in results]
        ),
        distinct=len({_instance(result) for result in results}),
        effective_size=effective_size([_instance(result) for result in results]),
        endings=dict(Counter(result.ending for result in results if result.ending).most_common()),
    )


def details_of(
    results: Sequence[Result], *, ks: Sequence[int] = (), prices: Prices = NO_PRICES
) -> dict[str, Any]:
    """The details of a report beside its scores, as plain JSON.

    `ks`: for which k to estimate pass@k, majority@k and best-of-k. Raises ConfigError for a k above the
    number of attempts at a task.
    """
    prompt = sum(result.prompt_tokens for result in results)
    completion = sum(result.completion_tokens for result in results)
    seconds = sorted(result.model_s for result in results if not result.has_failed)
    details: dict[str, Any] = {
        "tasks": len({result.episode.task_id for result in results}),
        "cut_off": sum(result.is_cut_off for result in results),
        "thoughts_cut": sum(result.has_cut_thought for result in results),
        "failures": dict(Counter(_failure(result) for result in results if result.has_failed)),
        "tokens": {"prompt": prompt, "completion": completion},
        "latency_s": {"p50": _quantile(seconds, 0.5), "p95": _quantile(seconds, 0.95)},
        "cost": prices.cost(prompt, completion),
    }
    if any(result.readings for result in results):
        names = dict.fromkeys(name for result in results for name in result.readings)
        details["readings"] = {name: _read(results, name) for name in names}
    if ks:
        details |= _by_k(results, ks)
    categories = {result.category for result in results if result.category}
    if categories:
        details["categories"] = {name: _category(results, name) for name in sorted(categories)}
    return details


def by_task(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Attempts of each task, in their order; tasks in the order in which they appear."""
    tasks: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        tasks[result.episode.task_id].append(result)
    for attempts in tasks.values():
        attempts.sort(key=lambda each: each.episode.attempt)
    return dict(tasks)


def require_ks(ks: Sequence[int], attempts: int) -> None:
    """Raises ConfigError for a k that so many attempts cannot tell about."""
    for k in ks:
        pass_at_k(attempts, 0, k)


def _instance(result: Result) -> str:
    return result.instance or result.episode.task_id


def _success_interval(results: Sequence[Result]) -> tuple[tuple[float, float], str]:
    """Confidence interval of the share of attempts that succeeded."""
    instances = [_instance(result) for result in results]
    if len(set(instances)) == len(results):
        return wilson_interval(sum(result.is_correct for result in results), len(results)), "wilson"
    return interval_of([float(result.is_correct) for result in results], instances)


def _by_k(results: Sequence[Result], ks: Sequence[int]) -> dict[str, Any]:
    tasks = list(by_task(results).values())
    instances = [_instance(attempts[0]) for attempts in tasks]
    by_k: dict[str, Any] = {"pass_at_k": {}, "best_of_k": {}, "majority_at_k": {}}
    for k in ks:
        shares = [pass_at_k(len(each), sum(one.is_correct for one in each), k) for each in tasks]
        by_k["pass_at_k"][str(k)] = mean_with_interval(shares, instances)
        by_k["best_of_k"][str(k)] = mean_with_interval(
            [best_of_k([0.0 if one.has_failed else one.reward for one in each], k) for each in tasks],
            instances,
        )
        votes = [_majority(each[:k]) for each in tasks]
        if all(vote is not None for vote in votes):
            by_k["majority_at_k"][str(k)] = mean_with_interval(
                [float(bool(vote)) for vote in votes], instances
            )
    if not by_k["majority_at_k"]:
        del by_k["majority_at_k"]  # nobody extracts answers here, so there is nothing to vote on
    return by_k


def _majority(attempts: Sequence[Result]) -> bool | None:
    """Whether the answer that was given most often is right; of a tie, the one given first.

    None where no attempt has an extracted answer and still one of them is right: its grader extracts none.
    """
    answers = [(each, each.extracted) for each in attempts if each.extracted is not None]
    if not answers:
        return None if any(each.is_correct for each in attempts) else False
    votes = Counter(same_answers([answer for _, answer in answers]))
    winner, _ = answers[max(votes, key=lambda place: (votes[place], -place))]
    return winner.is_correct


def mean_with_interval(values: Sequence[float], instances: Sequence[str]) -> dict[str, Any]:
    if not values:
        return {"value": 0.0, "interval": (0.0, 1.0), "interval_method": "none"}
    interval, method = interval_of(values, instances)
    return {"value": sum(values) / len(values), "interval": interval, "interval_method": method}


def interval_of(values: Sequence[float], instances: Sequence[str]) -> tuple[tuple[float, float], str]:
    """95 % interval of the mean of one score per task, and how it was made.

    Resampling one instance, or several with equal means, would claim certainty, so of those it is Wilson's.
    """
    distinct, mean = len(set(instances)), sum(values) / len(values)
    if have_equal_means(values, instances):
        if 0.0 <= mean <= 1.0:
            return wilson_interval(mean * distinct, distinct), "wilson"
        return equal_differences_interval(mean, distinct), "wilson"
    draws_R = resampled_means(np.asarray(values)[:, None], instances)[:, 0]
    return percentiles(draws_R, distinct), "bootstrap"


def _read(results: Sequence[Result], reading: str) -> dict[str, Any]:
    """The success under one reading, failures as zero."""
    report = report_of([replace(each, is_correct=each.readings.get(reading, False)) for each in results])
    return {name: getattr(report, name) for name in ("success", "success_interval", "interval_method")}


def _category(results: Sequence[Result], name: str) -> dict[str, Any]:
    report = report_of([result for result in results if result.category == name])
    return {
        "attempted": report.attempted,
        "failed": report.failed,
        "success": report.success,
        "success_interval": report.success_interval,
        "interval_method": report.interval_method,
    }


def _failure(result: Result) -> str:
    """The key that failures are counted by: their kind and the beginning of what was said."""
    return f"{result.outcome}: {result.reason[:_REASON_CHARS]}" if result.reason else str(result.outcome)


def _quantile(values_sorted: Sequence[float], share: float) -> float | None:
    """By the nearest rank; None of nothing."""
    if not values_sorted:
        return None
    return values_sorted[max(0, math.ceil(share * len(values_sorted)) - 1)]
