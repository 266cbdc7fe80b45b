"""An evaluation by task and by attempt: its report, the grader's reasons, and the same task elsewhere.

summary.json, or the columns of store.sqlite ──► report with its intervals
store.sqlite ──► tasks | attempts, filtered by verdict, outcome and words, a page at a time
other runs   ──► where the same task was attempted

A run of `rllm eval` has a part for each way of sampling; measured phases of a training run are shown alike.
"""

import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.eval.plan import KIND
from rllm.eval.report import report_of
from rllm.eval.results import Result, answer_of, asked_before_answer, result_of
from rllm.eval.statistics import student_quantile, wilson_interval
from rllm.eval.words import INTERVAL_METHODS, baselines_sentence, instances_sentence
from rllm.store.browsing import ORDERS, TASK_ORDERS, VERDICTS, EpisodeBrowser, EpisodeFilter
from rllm.store.episodes import EpisodeStore, natural
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Outcome
from rllm.types.task import EpisodeId
from rllm.view.messages import shown_message
from rllm.view.query import Query
from rllm.view.run_facts import facts_of
from rllm.view.sources import Sources
from rllm.view.text_index import search

MAX_ROWS = 200
MEASURED = ("sampled", "greedy", "after", "after.greedy", "before", "before.greedy", "untrained", "heldout")
"""Phases that measure, the one that says most first."""
_MAX_INTERVAL_ATTEMPTS = 3_000
"""The number of attempts of a report that is made here: resampling more would keep a page waiting."""
_CONVERSATION_CHARS = 8_000
"""The length of the conversation before the last answer."""


def evaluation_page(sources: Sources, query: Query) -> dict[str, Any]:
    """One way of an evaluation: its report, and a page of its tasks (`by=task`) or attempts."""
    run = sources.run(query.text("run"))
    by_task = query.choice("by", {"": 0, "task": 0, "attempt": 0}) != "attempt"
    order = query.choice("order", TASK_ORDERS if by_task else ORDERS)
    limit, offset = query.number("limit", 50, low=1, high=MAX_ROWS), query.number("offset", 0)
    verdict = query.choice("verdict", {"": "", **VERDICTS}) or None
    words = query.text("q").strip()
    config, summary = run.config(), run.summary() or {}
    page: dict[str, Any] = {
        "facts": {**facts_of(run).to_dict(), "run": query.text("run")},  # a file of it says no path
        "stamp": summary.get("stamp") or (config if config.get("kind") == KIND else {}),
        "elsewhere": _other_evaluations(sources, query.text("run"), config),
        "phases": [],
    }
    if not run.store_path.is_file():
        return page
    hits, progress = search(run, words) if words else ({}, None)
    with EpisodeBrowser.open(run.store_path) as browser:
        counts = {each.name: each.episodes for each in browser.phases()}
        measuring = _measuring_phases(counts, config)
        phase = query.text("phase") or next(iter(measuring), "")
        page["phases"] = [name for name in counts if name in measuring or name == phase]
        if phase not in counts:
            raise ConfigError(
                f"{run.path} has measured nothing in phase {phase[:80]!r}; it has "
                f"{', '.join(counts) or 'none'}."
            )
        old_results = browser.superseded(phase) if config.get("kind") == KIND else ()
        which = EpisodeFilter(
            phase=phase,
            task_id=query.optional_text("task"),
            outcome=query.optional_text("outcome"),
            ids=list(hits) if words else None,
            verdict=verdict,
            without=old_results,
        )
        descending = query.flag("descending") is True
        if by_task:
            tasks = browser.tasks(which, order=order, descending=descending)
            if not order:
                tasks.sort(key=lambda each: natural(each.task_id), reverse=descending)
            rows = [_task_row(each._asdict()) for each in tasks[offset : offset + limit]]
            total = len(tasks)
        else:
            rows = [
                each._asdict()
                for each in browser.page(
                    which, order=order, descending=descending, limit=limit, offset=offset
                )
            ]
            total = browser.count(which)
    report = summary.get("reports", {}).get(phase) or _report(run.store_path, phase, counts[phase])
    if not by_task:
        with EpisodeStore.open(run.store_path, read_only=True) as store:
            for row in rows:
                row |= _judgement(result_of(store.episode(row["id"]))) | {"hit": hits.get(row["id"])}
    other = query.text("beside")
    if other and by_task:
        _add_beside(rows, sources.run(other), phase)
    return page | {
        "phase": phase,
        "report": report,
        "baselines": baselines_sentence(summary["baselines"]) if summary.get("baselines") else "",
        "interval": INTERVAL_METHODS[report["interval_method"]],
        "instances": instances_sentence(report) if "distinct" in report else "",
        "by": "task" if by_task else "attempt",
        "rows": rows,
        "total": total,
        "offset": offset,
        "progress": progress,
    }


def answer_page(sources: Sources, query: Query) -> dict[str, Any]:
    """The question, the answer and the grader's verdict of one attempt."""
    run, row_id = sources.run(query.text("run")), query.number("id", 0)
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        episode = store.episode(row_id)
    conversation = "\n\n".join(_message_text(message) for message in asked_before_answer(episode))
    return {
        "id": row_id,
        "prompt": _without_middle(conversation),
        "answer": _without_middle(answer_of(episode)),
        **_judgement(result_of(episode)),
    }


def elsewhere_page(sources: Sources, query: Query) -> dict[str, Any]:
    """Every run here that has attempted a task, with its success by phase."""
    task_id, mine = query.text("task"), sources.run(query.text("run"))
    name = _task_family(mine.config())
    rows: list[dict[str, Any]] = []
    for key, run in sources.runs().items():
        if not run.store_path.is_file() or _task_family(run.config()) != name:
            continue
        with EpisodeBrowser.open(run.store_path) as browser:
            phases = browser.phases()
            measuring = _measuring_phases([each.name for each in phases], run.config())
            for phase in phases:
                if phase.name not in measuring and run.path != mine.path:
                    continue
                which = EpisodeFilter(phase=phase.name, task_id=task_id)
                for each in browser.tasks(which, limit=1):
                    step = next(row.step for row in browser.page(EpisodeFilter(ids=[each.first_id])))
                    rows.append({"run": key, "phase": phase.name, "step": step, **_task_row(each._asdict())})
    return {"task": task_id, "rows": rows}


def _task_family(config: Mapping[str, Any]) -> str:
    """Runs of one family attempt tasks that have the same ids for the same questions."""
    return str(
        config.get("name") if config.get("kind") == KIND else config.get("task", {}).get("environment", "")
    )


def _other_evaluations(sources: Sources, mine: str, config: Mapping[str, Any]) -> list[str]:
    family = _task_family(config)
    return [
        key
        for key, run in sources.runs().items()
        if key != mine and family and _task_family(run.config()) == family
    ]


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    """A task with the intervals of its means; attempts at it are independent of each other."""
    names = ("num_paid", "mean_squared_reward", "least_reward", "greatest_reward")
    num_paid, square, least, greatest = (row.pop(name) for name in names)
    mean, reward_interval = row["mean_reward"], None
    if num_paid and 0.0 <= least <= greatest <= 1.0:
        reward_interval = wilson_interval(num_paid * mean, num_paid)
    elif num_paid > 1 and least < greatest:
        variance = max(0.0, square - mean**2) / (num_paid - 1)
        margin = student_quantile(0.05, num_paid - 1) * math.sqrt(variance)
        reward_interval = (mean - margin, mean + margin)
    return {
        **row,
        "reward_interval": reward_interval,
        "success": row["successes"] / row["attempts"],
        "success_interval": wilson_interval(row["successes"], row["attempts"]),
    }


def _add_beside(rows: list[dict[str, Any]], run: RunDirectory, phase: str) -> None:
    """To each task its success in another run, in the same phase or the one that says most there."""
    if not run.store_path.is_file():
        return
    with EpisodeBrowser.open(run.store_path) as browser:
        names = [each.name for each in browser.phases()]
        place = phase if phase in names else next(iter(_measuring_phases(names, run.config())), None)
        if place is None:
            return
        without = browser.superseded(place) if run.config().get("kind") == KIND else ()
        for row in rows:
            which = EpisodeFilter(phase=place, task_id=row["task_id"], without=without)
            for each in browser.tasks(which, limit=1):
                row["beside"] = {"phase": place, **_task_row(each._asdict())}


def _judgement(result: Result) -> dict[str, Any]:
    return {
        "verdict": "right" if result.is_correct else "failed" if result.has_failed else "wrong",
        "reason": result.reason,
        "extracted": result.extracted,
        "category": result.category,
        "cut_off": result.is_cut_off,
    }


def _measuring_phases(names: Collection[str], config: Mapping[str, Any]) -> list[str]:
    """Phases that measure, the one that says most first: all of an evaluation, some of a training run."""
    known = [name for name in MEASURED if name in names]
    others = [name for name in names if name not in MEASURED] if config.get("kind") == KIND else []
    return known + others


@lru_cache(maxsize=32)
def _report(store: Path, phase: str, num_episodes: int) -> dict[str, Any]:
    """The scores of episodes without a report yet, by their columns; made again when there are more."""
    with EpisodeBrowser.open(store) as browser:
        rows = browser.page(EpisodeFilter(phase=phase), limit=_MAX_INTERVAL_ATTEMPTS)
    results = {
        (row.step, row.task_id, row.attempt): Result(
            episode=EpisodeId(task_id=row.task_id, attempt=row.attempt),
            outcome=Outcome(row.outcome) if row.outcome else Outcome.INFRASTRUCTURE_FAILURE,
            is_correct=row.is_correct,
            reward=row.reward or 0.0,
            turns=row.num_steps,
        )
        for row in rows
    }
    report = report_of(list(results.values())).to_dict()
    return report | ({"of_first": len(rows)} if len(rows) < num_episodes else {})


def _message_text(message: Mapping[str, Any]) -> str:
    """A message in words, with the calls that it makes."""
    shown = shown_message(message)
    calls = (f"{call['name']}({call['arguments']})" for call in shown.get("calls", ()))
    return f"{shown['role']}: " + "\n".join(each for each in (shown["text"], *calls) if each)


def _without_middle(text: str) -> str:
    left_out = len(text) - _CONVERSATION_CHARS
    if left_out <= 0:
        return text
    half = _CONVERSATION_CHARS // 2
    return f"{text[:half]}\n\n… {left_out:,} characters are left out …\n\n{text[-half:]}"
