"""Test-time scaling, measured: the attempts that a selector handed in, beside pass@1 and pass@N."""

from collections.abc import Mapping, Sequence
from typing import Any

from rllm.environments.swe.selection import Selection
from rllm.eval.pass_at_k import pass_at_k
from rllm.eval.report import mean_with_interval
from rllm.eval.results import Result


def selection_report(
    by: str, results: Sequence[Sequence[Result]], choices: Mapping[str, Selection]
) -> dict[str, Any]:
    """pass@1, what the selector came to, and pass@N, each with its interval, as plain JSON.

    `results`: the attempts at each task. A failed attempt counts as no success.
    """
    instances = [each[0].instance or each[0].episode.task_id for each in results]
    correct = [sum(one.is_correct for one in each) for each in results]
    chosen = [
        float(
            any(
                one.is_correct
                for one in each
                if one.episode.attempt == choices[each[0].episode.task_id].attempt
            )
        )
        for each in results
    ]
    most = max(len(each) for each in results)
    shares = {
        "pass_at_1": [pass_at_k(len(each), right, 1) for each, right in zip(results, correct, strict=True)],
        "selected": chosen,
        "pass_at_n": [float(right > 0) for right in correct],
    }
    return {
        "by": by,
        "attempts": most,
        "tasks": len(results),
        **{name: mean_with_interval(values, instances) for name, values in shares.items()},
        "unsettled": sum(not each.is_settled for each in choices.values()),
        "choices": {
            task: {"attempt": each.attempt, "reason": each.reason} for task, each in sorted(choices.items())
        },
    }
