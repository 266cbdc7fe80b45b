"""The pages of runs: the table of all of them, one run with its curves and alarms, several beside each other.

config.json, metrics.jsonl, summary.json, lock ──► runs_page, run_page, comparison_page
store.sqlite ──► distribution_page: rewards, outcomes and lengths by step
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import ConfigError
from rllm.store.browsing import UNJUDGED, EpisodeBrowser, EpisodeSummary
from rllm.store.episodes import TRAIN_PHASE
from rllm.store.run_directory import RunDirectory
from rllm.tracking.alarms import alarms_of
from rllm.tracking.jsonl import read_metrics_after
from rllm.view.notes import NO_NOTE, notes
from rllm.view.query import Query
from rllm.view.run_facts import facts_of, metrics_of
from rllm.view.sources import Sources

NUM_SPARKS = 40
"""Points of a curve in the table of runs."""
MAX_STEPS_READ = 40
"""Steps whose episodes a distribution is made of; of more, so many evenly spread ones."""
NUM_BINS = 10
_DIGITS = 6


def runs_page(sources: Sources, query: Query) -> dict[str, Any]:
    """Every run at a glance; a damaged one does not hide the others."""
    rows: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    of_reader = notes()
    for key, run in sources.runs().items():
        try:
            rows.append({"key": key, **_row(run), **of_reader.get(str(run.path), NO_NOTE)})
        except (ConfigError, PermissionError) as error:
            unreadable.append({"key": key, "error": str(error)})
    return {"roots": [str(root) for root in sources.roots], "runs": rows, "unreadable": unreadable}


def _row(run: RunDirectory) -> dict[str, Any]:
    facts, lines = facts_of(run), metrics_of(run)
    name = "success" if any("success" in line for line in lines) else "loss"
    curve = [line[name] for line in lines if line["phase"] == TRAIN_PHASE and name in line]
    started_at = run.config_path.stat().st_mtime if run.config_path.is_file() else None
    return {
        **facts.to_dict(),
        "spark": [rounded(value) for value in spread(curve, NUM_SPARKS)],
        "spark_of": name,
        "started_at": started_at,
        "lost_pid": run.lost_writer_pid,
    }


def run_page(sources: Sources, query: Query) -> dict[str, Any]:
    """One run; with `after`, a byte of metrics.jsonl, only the lines behind it."""
    run = sources.run(query.text("run"))
    after = query.number("after", 0)
    lines, start, offset = read_metrics_after(run.metrics_path, after)
    facts = facts_of(run)
    train = [line for line in metrics_of(run) if line["phase"] == TRAIN_PHASE]
    page: dict[str, Any] = {
        "facts": facts.to_dict(),
        "series": series_of(lines),
        "after": start,
        "offset": offset,
        "alarms": [alarm.to_dict() for alarm in alarms_of(train, run.config())],
        "lost_pid": run.lost_writer_pid,
        **notes().get(str(run.path), NO_NOTE),
    }
    if after == 0:
        page |= {"config": run.config(), "summary": run.summary(), "phases": phases_of(run)}
    return page


def phases_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Phases of the store; none while nothing was saved."""
    if not run.store_path.is_file():
        return []
    with EpisodeBrowser.open(run.store_path) as browser:
        return [phase._asdict() for phase in browser.phases()]


def series_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Phase -> metric -> its values, one for each line of the phase; null where a line lacks it."""
    by_phase: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_phase.setdefault(line["phase"], []).append(line)
    return {
        phase: {
            name: [rounded(line.get(name)) for line in mine]
            for name in dict.fromkeys(name for line in mine for name in line if name != "phase")
            if any(isinstance(line.get(name), int | float) for line in mine)
        }
        for phase, mine in by_phase.items()
    }


def distribution_page(sources: Sources, query: Query) -> dict[str, Any]:
    """Rewards, outcomes, endings and lengths of the episodes of each step of a phase."""
    run, phase = sources.run(query.text("run")), query.text("phase", TRAIN_PHASE)
    if not run.store_path.is_file():
        return {"phase": phase, "steps": [], "bins": []}
    with EpisodeBrowser.open(run.store_path) as browser:
        steps = spread(browser.steps(phase), MAX_STEPS_READ)
        by_step = {step: browser.step_summaries(phase, step) for step in steps}
    rewards = [each.reward for rows in by_step.values() for each in rows if each.reward is not None]
    low, high = (min(rewards), max(rewards)) if rewards else (0.0, 1.0)
    low, high = min(low, 0.0), high if high > low else low + 1.0
    edges = [low + (high - low) * index / NUM_BINS for index in range(NUM_BINS + 1)]
    return {
        "phase": phase,
        "bins": [rounded(edge) for edge in edges],
        "steps": [{"step": step, **_step_facts(rows, low, high)} for step, rows in by_step.items()],
    }


def _step_facts(rows: Sequence[EpisodeSummary], low: float, high: float) -> dict[str, Any]:
    counts_B = [0] * NUM_BINS
    for each in rows:
        if each.reward is not None:
            counts_B[min(NUM_BINS - 1, int(NUM_BINS * (each.reward - low) / (high - low)))] += 1
    return {
        "episodes": len(rows),
        "correct": sum(each.is_correct for each in rows),
        "rewards": counts_B,
        "outcomes": dict(Counter(each.outcome or UNJUDGED for each in rows)),
        "endings": dict(Counter(each.termination_reason for each in rows)),
        "turns": quartiles([each.num_steps for each in rows]),
        "tokens": quartiles([each.num_sampled_tokens for each in rows]),
        "seconds": quartiles([each.duration_s for each in rows if each.duration_s is not None]),
    }


def quartiles(values: Sequence[float]) -> list[float | None]:
    """Least, lower quartile, median, upper quartile, greatest."""
    ascending = sorted(values)
    if not ascending:
        return [None] * 5
    return [rounded(ascending[round(part * (len(ascending) - 1) / 4)]) for part in range(5)]


def spread(values: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of them, evenly spread, the first and the last among them."""
    if len(values) <= limit:
        return list(values)
    return [values[round(index * (len(values) - 1) / (limit - 1))] for index in range(limit)]


def rounded(value: Any) -> Any:
    """A number with the digits that a picture needs; None for what JSON has no number for."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
