"""The state of a run as its files tell it: the same for a run that is finished, running or stopped.

config.json, metrics.jsonl, summary.json, lock ──► RunFacts ──► `runs list`, `runs show`, `runs compare`
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from rllm.config.distill import PROMPTS
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics

REPORTS = ("untrained", "before", "after")
LABELS = {"untrained": "untrained", "before": "warm start", "after": "trained"}

_OWN_TO_LINES = ("phase", "step", "time_s", "run_s")
"""Keys of a line of metrics.jsonl that are no measurement."""


class RunStage(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Nobody works on it, and it has no result: `rllm train` goes on with it."""


@dataclass(kw_only=True, slots=True)
class RunFacts:
    """A run at a glance."""

    run: str
    """Its directory."""
    name: str
    kind: str
    """The command that made it: `train`, `sft`, …"""
    environment: str
    """Empty for a run that learns from rows; of an evaluation the benchmark."""
    seed: int
    state: RunStage
    pid: int | None
    """The process that is working on it."""
    phase: str
    """The last one that logged something; empty when none did."""
    phase_steps: int
    """Finished steps of that phase."""
    steps: int
    """Finished steps of reinforcement learning."""
    total_steps: int
    work_s: float | None
    """Seconds of work on the run, by whichever processes: those of its phases, as its summary counts them."""
    reports: dict[str, dict[str, Any]]
    """`untrained`, `before`, `after`, as far as measured: `success`, `greedy`; intervals once finished.
    Beside a teacher `reverse_kl`; of a run that learns from rows `loss`, and what else it measures."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def report(self, name: str, measure: str) -> float | None:
        return self.reports.get(name, {}).get(measure)


def metrics_of(run: RunDirectory) -> Sequence[dict[str, Any]]:
    """The lines of a run's metrics, read again only when the file has changed: pages ask every 2 s."""
    try:
        status = run.metrics_path.stat()
    except FileNotFoundError:
        return ()
    return _metrics_at(run.metrics_path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=64)
def _metrics_at(path: Path, size: int, changed_at: int, file: int) -> Sequence[dict[str, Any]]:
    return tuple(read_metrics(path))


def facts_of(run: RunDirectory) -> RunFacts:
    """Raises ConfigError, naming the file, when one cannot be read."""
    config, summary, metrics = run.config(), run.summary(), metrics_of(run)
    pid = run.writer_pid
    reports = {line["phase"]: line for line in metrics if line["phase"] in REPORTS} | (summary or {})
    kind = config.get("kind", "train")
    measures = ("success", "success_interval", "greedy", "greedy_interval", "return")
    measures += ("score", "score_interval")
    measures += ("reverse_kl", "reverse_kl_error")
    if config.get("task", {}).get("environment") == PROMPTS:  # nobody pays there
        measures = measures[-2:]
    if kind == "eval":
        reports = {"after": _evaluation_report(summary or {})}
    elif kind != "train":
        measures = tuple(name for name in reports.get("before", {}) if name not in _OWN_TO_LINES)
    last = metrics[-1] if metrics else {"phase": "", "step": -1}
    return RunFacts(
        run=str(run.path),
        name=run.name,
        kind=kind,
        environment=config["name"] if kind == "eval" else config.get("task", {}).get("environment", ""),
        seed=config.get("seed", 0),
        state=RunStage.FINISHED if summary else RunStage.RUNNING if pid else RunStage.STOPPED,
        pid=pid,
        phase=last["phase"],
        phase_steps=last["step"] + 1,
        steps=sum(line["phase"] == "train" for line in metrics),
        total_steps=config.get("steps", max((line.get("total_steps", 0) for line in metrics), default=0)),
        work_s=(summary or {}).get("wall_s", last.get("run_s", last.get("time_s"))),
        reports={
            name: {key: reports[name][key] for key in measures if key in reports[name]}
            for name in (report_labels(config) if kind == "train" else REPORTS)
            if name in reports
        },
    )


def _evaluation_report(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of an evaluation by the names that those of a run have."""
    report_fields: dict[str, Any] = {}
    for way, report in summary.get("reports", {}).items():
        name = "greedy" if way == "greedy" else "success"
        report_fields |= {name: report["success"], f"{name}_interval": report["success_interval"]}
    return report_fields


def report_labels(config: dict[str, Any]) -> dict[str, str]:
    """Labels of the reports that say something of their own, in their order. Without a warm start `before` is
    of the untrained model."""
    warm = config.get("warm_start", {}).get("steps", 0)
    return LABELS if warm else {"before": "before", "after": LABELS["after"]}
