"""What a task that is said to learn has to show, and which of it was missed.

figures of a task's runs ──► floors: name ──► value, limit, met
"""

from collections.abc import Mapping, Sequence
from typing import Any

MIN_TASKS, MIN_CATEGORIES, MAX_MEAN_WALL_S, MAX_HOURS = 12, 6, 240.0, 3.0
LIMITS: dict[str, tuple[str, float, str]] = {
    "score": (">=", 90.0, "score of every seed"),
    "score_low": (">=", 85.0, "lower end of the score's interval, all seeds together"),
    "start": ("<=", 35.0, "sampled success before reinforcement, %"),
    "skill": (">=", 20.0, "points of skill of every seed"),
    "skill_low": (">", 0.0, "lower end of the skill's interval, all seeds together"),
    "baseline": ("<=", 70.0, "score of the best policy without skill"),
    "distinct": (">=", 200.0, "distinct test tasks"),
    "wall_s": ("<=", 600.0, "seconds of the longest run"),
    "parameters": ("<=", 5e6, "parameters"),
}
"""Floor -> how it is compared, with what, and what it is."""


def seconds_of(run: Mapping[str, Any]) -> float:
    """By the clock, or CPU seconds where these are fewer: then other work on the machine held the run up."""
    return min(run["wall_s"], run.get("cpu_s", run["wall_s"]))


def floors_of(task: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Of one task's entry; a figure that nobody could make is missed."""
    runs = [each for each in task["runs"] if "failed" not in each]
    if len(runs) < len(seeds):
        return {"runs": {"value": len(runs), "limit": len(seeds), "met": False}}
    score, skill = task["score"], task["skill"]
    values: dict[str, float | None] = {
        "score": None if score is None else min(each["score"]["value"] for each in runs if each["score"]),
        "score_low": None if score is None else score["interval"][0],
        "start": max(each["start"]["value"] for each in runs),
        "skill": min(each["skill"]["value"] for each in runs),
        "skill_low": skill["interval"][0],
        "baseline": task["best_baseline_score"],
        "distinct": task["distinct"],
        "wall_s": max(seconds_of(each) for each in runs),
        "parameters": task["parameters"],
    }
    return {name: _floor(name, value) for name, value in values.items()}


def _floor(name: str, value: float | None) -> dict[str, Any]:
    how, limit, _ = LIMITS[name]
    met = value is not None and {">=": value >= limit, ">": value > limit, "<=": value <= limit}[how]
    return {"value": value, "limit": limit, "met": met}


def missed(task: Mapping[str, Any]) -> list[str]:
    """Sentences."""
    lines: list[str] = []
    for name, floor in task["floors"].items():
        if floor["met"]:
            continue
        if name == "runs":
            lines.append(f"{floor['value']} of {floor['limit']} runs finished")
            continue
        value = "unknown" if floor["value"] is None else f"{floor['value']:g}"
        lines.append(f"{LIMITS[name][2]}: {value}, not {LIMITS[name][0]} {floor['limit']:g}")
    return lines


def missed_together(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the whole table misses."""
    good = {name: each for name, each in tasks.items() if not missed(each)}
    seconds = [seconds_of(run) for each in good.values() for run in each["runs"]]
    categories = {each["category"] for each in good.values()}
    lines: list[str] = []
    if len(good) < MIN_TASKS:
        lines.append(f"{len(good)} of at least {MIN_TASKS} tasks reach every floor")
    if len(categories) < MIN_CATEGORIES:
        lines.append(f"they are of {len(categories)} of at least {MIN_CATEGORIES} kinds")
    if seconds and sum(seconds) / len(seconds) > MAX_MEAN_WALL_S:
        lines.append(
            f"a run takes {sum(seconds) / len(seconds):.0f} s on average, not <= {MAX_MEAN_WALL_S:g}"
        )
    hours = (
        sum(seconds_of(run) for each in tasks.values() for run in each["runs"] if "failed" not in run) / 3600
    )
    if hours > MAX_HOURS:
        lines.append(f"all runs take {hours:.1f} h, not <= {MAX_HOURS:g}")
    return lines
