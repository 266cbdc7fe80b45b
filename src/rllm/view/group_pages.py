"""Episodes in tables: lists with filters, the groups of a step, and the attempts at one task side by side.

store.sqlite ──► episodes_page   rows, filtered, sorted, a page at a time
             ──► groups_page     tasks of a step with their attempts, most surprising first
             ──► attempts_page   what the attempts at a task wrote, and where best and worst part
"""

from collections.abc import Sequence
from math import isnan
from statistics import fmean, pstdev
from typing import Any

from rllm.errors import ConfigError
from rllm.store.browsing import ORDERS, EpisodeBrowser, EpisodeFilter, EpisodeSummary
from rllm.store.episodes import EpisodeStore, natural
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode
from rllm.view.messages import shown_message
from rllm.view.query import Query
from rllm.view.run_pages import rounded
from rllm.view.sources import Sources
from rllm.view.text_index import search

MAX_ROWS = 500
MAX_ATTEMPTS = 16
"""Attempts that are shown side by side."""
MAX_TURNS = 40
"""Turns of each of them."""


def episodes_page(sources: Sources, query: Query) -> dict[str, Any]:
    """A page of episodes; `q` is searched for in all their text."""
    run = sources.run(query.text("run"))
    limit, offset = query.number("limit", 100, low=1, high=MAX_ROWS), query.number("offset", 0)
    order, words = query.choice("order", ORDERS), query.text("q").strip()
    hits, progress = search(run, words) if words else ({}, None)
    which = EpisodeFilter(
        phase=query.optional_text("phase"),
        step=query.optional_number("step"),
        task_id=query.optional_text("task"),
        outcome=query.optional_text("outcome"),
        is_correct=query.flag("correct"),
        ids=list(hits) if words else None,
    )
    if not run.store_path.is_file():
        return {"phases": [], "episodes": [], "total": 0}
    with EpisodeBrowser.open(run.store_path) as browser:
        phases = [phase._asdict() for phase in browser.phases()]
        descending, total = query.flag("descending") is True, browser.count(which)
        if order or which.step is None:
            rows = browser.page(which, order=order, descending=descending, limit=limit, offset=offset)
        else:  # a whole step fits into memory, and SQLite puts test-10 before test-2
            rows = browser.page(which)
            rows.sort(key=lambda each: (natural(each.task_id), each.attempt), reverse=descending)
            rows = rows[offset : offset + limit]
    episodes = [{**each._asdict(), "hit": hits.get(each.id)} for each in rows]
    return {"phases": phases, "episodes": episodes, "total": total, "offset": offset, "progress": progress}


def groups_page(sources: Sources, query: Query) -> dict[str, Any]:
    """The tasks of a step, each with its attempts; the most surprising attempts first.

    Surprise is how far an attempt's reward is from the mean of its group, in the group's standard deviations.
    """
    run, phase = sources.run(query.text("run")), query.text("phase", "train")
    store = _store_path(run)
    with EpisodeBrowser.open(store) as browser:
        steps = browser.steps(phase)
        if not steps:
            raise ConfigError(f"{run.path} has no episodes in phase {phase[:80]!r}.")
        step = query.number("step", steps[-1])
        rows = browser.step_summaries(phase, step)
    by_task: dict[str, list[EpisodeSummary]] = {}
    for row in rows:
        by_task.setdefault(row.task_id, []).append(row)
    groups = [_group(task_id, members) for task_id, members in by_task.items()]
    by_surprise = query.text("order") == "surprise"
    groups.sort(key=lambda each: (-each["surprise"] if by_surprise else 0.0, natural(each["task_id"])))
    return {"phase": phase, "step": step, "steps": steps, "groups": groups}


def _group(task_id: str, members: Sequence[EpisodeSummary]) -> dict[str, Any]:
    rewards = [each.reward for each in members if each.reward is not None]
    mean, deviation = (fmean(rewards), pstdev(rewards)) if rewards else (None, 0.0)

    def above_mean(attempt: EpisodeSummary) -> float | None:
        return None if attempt.reward is None or mean is None else attempt.reward - mean

    attempts = [
        {
            **each._asdict(),
            "above_mean": above_mean(each),
            "surprise": abs(above_mean(each) or 0.0) / deviation if deviation else 0.0,
        }
        for each in sorted(members, key=lambda each: each.attempt)
    ]
    return {
        "task_id": task_id,
        "mean": mean,
        "deviation": deviation,
        "tied": len(rewards) > 1 and deviation == 0.0,
        "success": sum(each.is_correct for each in members) / len(members),
        "surprise": max(each["surprise"] for each in attempts),
        "attempts": attempts,
    }


def attempts_page(sources: Sources, query: Query) -> dict[str, Any]:
    """All attempts at one task in a step, turn by turn, and where the best and the worst of them part."""
    run = sources.run(query.text("run"))
    which = EpisodeFilter(
        phase=query.text("phase", "train"), step=query.optional_number("step"), task_id=query.text("task")
    )
    store_path = _store_path(run)
    with EpisodeBrowser.open(store_path) as browser:
        rows = sorted(browser.page(which, limit=MAX_ATTEMPTS), key=lambda each: each.attempt)
        total = browser.count(which)
    if not rows:
        raise ConfigError(f"{run.path} has no attempts at task {query.text('task')[:80]!r} there.")
    with EpisodeStore.open(store_path, read_only=True) as store:
        episodes = {row.id: store.episode(row.id) for row in rows}
        advantages = {row.id: store.token_numbers(row.id).get("advantage", []) for row in rows}
    group = _group(rows[0].task_id, rows)
    for attempt in group["attempts"]:
        attempt["trajectories"] = _turns(episodes[attempt["id"]])
        values = [value for value in advantages[attempt["id"]] if not isnan(value)]
        attempt["advantage"] = rounded(fmean(values)) if values else None
    with_reward = [each for each in group["attempts"] if each["reward"] is not None]
    parting: dict[str, Any] | None = None
    if len(with_reward) > 1 and group["deviation"]:
        best, worst = (
            max(with_reward, key=lambda each: each["reward"]),
            min(with_reward, key=lambda each: each["reward"]),
        )
        parting = {"best": best["id"], "worst": worst["id"], **_parting(best, worst)}
    return {**group, "total": total, "parting": parting, "phase": which.phase, "step": which.step}


def _turns(episode: Episode) -> list[dict[str, Any]]:
    return [
        {
            "name": trajectory.name,
            "num_turns": len(trajectory.steps),
            "turns": [
                {
                    "answer": shown_message({"role": "assistant", "content": step.model_response}),
                    "reward": step.reward,
                }
                for step in trajectory.steps[:MAX_TURNS]
            ],
        }
        for trajectory in episode.trajectories
    ]


def _parting(best: dict[str, Any], worst: dict[str, Any]) -> dict[str, Any]:
    """The first turn in which two attempts wrote different things."""
    for role, (mine, other) in enumerate(zip(best["trajectories"], worst["trajectories"], strict=False)):
        for number, (one, two) in enumerate(zip(mine["turns"], other["turns"], strict=False)):
            if one["answer"]["text"] != two["answer"]["text"]:
                return {"trajectory": role, "turn": number}
        if len(mine["turns"]) != len(other["turns"]):
            return {"trajectory": role, "turn": min(len(mine["turns"]), len(other["turns"]))}
    return {"trajectory": None, "turn": None}


def _store_path(run: RunDirectory) -> Any:
    if not run.store_path.is_file():
        raise ConfigError(f"{run.path} has saved no episodes yet; wait for its first step.")
    return run.store_path
