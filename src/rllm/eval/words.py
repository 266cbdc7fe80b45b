"""A report's facts of its tasks in sentences; the terminal and the page say the same."""

from collections.abc import Mapping
from typing import Any

from rllm.environments.world import OPTIMUM, RANDOM
from rllm.eval.task_facts import MIN_DISTINCT

INTERVAL_METHODS = {
    "wilson": "Wilson's score interval over instances",
    "bootstrap": "bootstrap over instances, because attempts at one are not independent",
}
"""`interval_method` of a report in words."""


def instances_sentence(counts: Mapping[str, Any]) -> str:
    """The number of instances behind a score. `counts` has `distinct` and `effective_size`."""
    distinct, effective = counts["distinct"], counts["effective_size"]
    count = f"{distinct:,} distinct instances"
    if round(effective) < distinct:
        count += f", not evenly often: as good as {effective:,.0f}"
    if distinct >= MIN_DISTINCT:
        return f"{count}."
    return (
        f"{count} are few: below {MIN_DISTINCT} an interval is wider than most differences. "
        "Measure on more, or on a larger task."
    )


def compared_sentence(counts: Mapping[str, Any]) -> str:
    """A sentence on how far the tasks are known to be held out; empty where all training tasks were looked
    at.
    """
    num_train, num_compared = counts.get("train_tasks", 0), counts.get("train_tasks_compared", 0)
    if num_compared == num_train:
        return ""
    return f"Compared with the first {num_compared:,} of the {num_train:,} training tasks that a run draws."


def endings_text(endings: Mapping[str, int]) -> str:
    """The number of episodes by how they ended, such as `env_done 60, timeout 4`."""
    return ", ".join(f"{name} {count}" for name, count in endings.items())


def baselines_sentence(baselines: Mapping[str, float]) -> str:
    """The optimum first, then what needs no skill, the best of it first."""
    order = sorted(baselines, key=lambda name: (name != OPTIMUM, -baselines[name], name != RANDOM))
    return f"Returns without training: {', '.join(f'{name} {baselines[name]:.3g}' for name in order)}."
