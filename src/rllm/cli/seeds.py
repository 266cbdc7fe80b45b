"""`rllm train … --seeds N`: a configuration and N seeds in, N runs and one report over them out.

    seed S … S+N-1 ──► a process each, one after the other ──► DIR/seedS …
                                                                  └──► DIR/report.json, DIR/seeds.png, a table

Finished runs are kept and stopped ones continue, so the same command resumes after any end.
"""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.text import Text

from rllm.build.training import build_run
from rllm.cli.command import REASON_FILE, elapsed_s, print_json
from rllm.cli.plan import conflict_with_run, require_place, unused_directory
from rllm.cli.terminal import (
    FittingTable,
    err,
    is_partial,
    mean_return,
    out,
    print_next,
    print_sentence,
    rate,
    table,
)
from rllm.cli.train_options import TrainOptions
from rllm.config.limits import seed_in_range
from rllm.config.schema import TrainConfig
from rllm.distributed import world_size
from rllm.distributed.launch import INTERRUPTED, REFUSED, launch
from rllm.errors import ConfigError
from rllm.eval.statistics import mean_interval
from rllm.files.atomic import write_atomic
from rllm.store.run_directory import RunDirectory, is_run
from rllm.tracking.console import readable_seconds
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.cluster import rank_places
from rllm.view.run_facts import report_labels

REPORT, PICTURE = "report.json", "seeds.png"
SHARES = ("success", "greedy")
MEASURES = (*SHARES, "return")
"""Measures of an evaluation that are averaged over seeds."""
_COLUMNS = {"success": "sampled", "greedy": "greedy", "return": "return"}


@dataclass(kw_only=True, slots=True, frozen=True)
class SeedRun:
    """The run of one seed."""

    seed: int
    path: Path
    options: TrainOptions
    """The options of a `rllm train` of this seed alone."""

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result; None until the run has finished."""
        return RunDirectory.read(self.path).summary() if is_run(self.path) else None


def settle_seeds(options: TrainOptions, config: TrainConfig) -> TrainOptions:
    """Return `options` with the directory of all seeds as `output`. `config`: of the first seed.

    Raises ConfigError for what several seeds cannot honour.
    """
    num_seeds = options.seeds or 0
    if num_seeds < 2:
        raise ConfigError(
            f"--seeds is {num_seeds}; an interval needs 2 or more. For one run leave it out, and choose its "
            "seed with --seed."
        )
    if assignment := next((word for word in options.all_assignments if word.startswith("seed=")), ""):
        raise ConfigError(
            f"--set {assignment} would give all {num_seeds} runs one seed; name the first with --seed."
        )
    seed_in_range("seed", config.seed + num_seeds - 1)
    if options.resume:
        raise ConfigError("--resume is for one run; leave it out: --seeds continues every run that it finds.")
    if options.preview:
        raise ConfigError(f"--preview shows the first step of one run; leave --seeds {num_seeds} out.")
    if world_size() > 1:
        raise ConfigError(
            f"--seeds starts a process for each of {num_seeds} runs, and this one is a rank of a run already "
            f"(WORLD_SIZE is {world_size()}); leave torchrun out, and give --nproc."
        )
    config.distributed.require_ranks(options.nproc)
    directory = options.seeds_directory
    if options.fresh:
        directory = unused_directory(directory)
    if is_run(directory):
        raise ConfigError(f"{directory} is a run; choose another --output to hold the runs of --seeds.")
    require_place(directory)
    return replace(options, output=directory, fresh=False)


def train_seeds(options: TrainOptions, config: TrainConfig) -> None:
    """Train what is missing and print the report; exits with 1 where a seed has none to report.

    `options` as `settle_seeds` returns them; `config`: of the first seed.
    """
    runs = _runs(options, config.seed)
    words = [*options.words(options.seeds_directory), "--seeds", str(len(runs))]
    words += ["--nproc", str(options.nproc)] if options.nproc > 1 else []
    try:
        _require_same_configs(runs)
        failures = _train_all(runs)
    except KeyboardInterrupt as interrupt:
        raise click.Abort(f"Interrupted. Go on with: {shlex.join(words)}") from interrupt
    report = seeds_report(runs, failures)
    report["picture"] = _draw(runs, options)
    report_path = options.seeds_directory / REPORT
    write_atomic(report_path, json.dumps(report, indent=2, allow_nan=False) + "\n")
    if options.as_json:
        print_json(report)
    else:
        _print_report(report, report_path, words)
    if failures:
        sys.exit(1)


def _runs(options: TrainOptions, first_seed: int) -> list[SeedRun]:
    return [
        SeedRun(
            seed=seed,
            path=options.directory(seed),
            options=replace(options, seed=seed, seeds=None, output=None, as_json=False),
        )
        for seed in range(first_seed, first_seed + (options.seeds or 0))
    ]


def _require_same_configs(runs: Sequence[SeedRun]) -> None:
    """Raises ConfigError, before any work, for runs that are there and have other settings."""
    for run in runs:
        if is_run(run.path):
            check = build_run(run.options.config(), run.path).require_same_config
            if conflict := conflict_with_run(run.path, check):
                raise ConfigError(conflict)


def _train_all(runs: Sequence[SeedRun]) -> dict[int, str]:
    """Train every run that is not finished. Returns seed -> the reason that it failed for.

    Raises ConfigError where the first of them is refused, as all others would be.
    """
    failures: dict[int, str] = {}
    has_begun = False
    for number, run in enumerate(runs, start=1):
        title = f"Seed {run.seed}, {number} of {len(runs)}"
        if run.summary is not None:
            print_sentence(err(), f"{title}: {run.path} is finished.", style="dim")
            continue
        print_sentence(err(), f"{title}, into {run.path}", style="bold")
        code, reason = _train(run)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code == REFUSED and not has_begun and not is_run(run.path):
            raise ConfigError(reason)
        has_begun = True
        if code:
            failures[run.seed] = reason
            print_sentence(err(), f"Seed {run.seed} failed: {reason}", style="red")
    return failures


def _train(run: SeedRun) -> tuple[int, str]:
    """Train one seed in processes of its own. Returns the exit code, and the reason where it is not 0."""
    options, config = run.options, run.options.config()
    with (
        tempfile.TemporaryDirectory(prefix="rllm-seed-") as place,
        rank_places(config, options.nproc, run.path) as start,
        _results_on_stderr(),
    ):
        reason_path = Path(place) / "reason.txt"
        os.environ[REASON_FILE] = str(reason_path)
        try:
            words, restarts = options.rank_words(run.path), config.distributed.restarts
            code = launch(words, options.nproc, run.path, restarts=restarts, start=start)
        finally:
            del os.environ[REASON_FILE]
        if reason_path.exists():
            return code, reason_path.read_text("utf-8")
        return code, f"its process ended with exit code {code}; the lines above say more."


@contextmanager
def _results_on_stderr() -> Iterator[None]:
    """Let processes that are started meanwhile print to stderr alone: stdout is for the report."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def seeds_report(runs: Sequence[SeedRun], failures: Mapping[int, str]) -> dict[str, Any]:
    """Return the measures of every seed, and their means with intervals over the seeds that have finished."""
    rows: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for run in runs:
        row: dict[str, Any] = {"seed": run.seed, "run": str(run.path)}
        if (summary := run.summary) is None:
            row["failed"] = failures.get(run.seed, "it has not finished.")
        else:
            names = names or report_labels(RunDirectory.read(run.path).config())
            row |= _measures(summary, names)
        rows.append(row)
    finished_rows = [row for row in rows if "failed" not in row]
    return {
        "seeds": rows,
        "labels": names,
        "finished": len(finished_rows),
        "mean": _means(finished_rows, names) if finished_rows else None,
        "interval": _interval_sentence(len(finished_rows), len(rows)),
    }


def _measures(summary: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The measures of one run: name of a report -> measures, and its `gain`, after minus before."""
    reports = {
        name: {measure: (summary.get(name) or {}).get(measure) for measure in MEASURES} for name in names
    }
    gain: dict[str, float | None] = {}
    for measure in MEASURES:
        before, after = reports["before"][measure], reports["after"][measure]
        gain[measure] = None if before is None or after is None else after - before
    return {**reports, "gain": gain, "wall_s": summary["wall_s"]}


def _means(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """The same of all runs: of each measure `mean` and `interval`."""
    means: dict[str, Any] = {
        name: {measure: _mean([row[name][measure] for row in rows]) for measure in MEASURES}
        for name in (*names, "gain")
    }
    for measures in (means[name] for name in names):
        for measure in SHARES:
            if interval := measures[measure]["interval"]:  # Student's has no bounds, and shares have
                measures[measure]["interval"] = [max(0.0, interval[0]), min(1.0, interval[1])]
    return {**means, "wall_s": _mean([row["wall_s"] for row in rows])}


def _mean(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean over seeds and its 95 % interval; both None where a seed was not measured, and no interval where
    all seeds have one value."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return {"mean": None, "interval": None}
    interval = mean_interval(numbers, range(len(numbers)))
    return {"mean": fmean(numbers), "interval": None if interval is None else list(interval)}


def _interval_sentence(num_finished: int, num_seeds: int) -> str:
    if num_finished < 2:
        return f"{num_finished} of {num_seeds} seeds finished, and an interval over seeds needs two."
    count = str(num_seeds) if num_finished == num_seeds else f"the {num_finished} finished of {num_seeds}"
    return (
        f"95 % intervals of the mean are over {count} seeds (Student's t): a seed decides every random draw "
        "of a run, and all runs are measured on the same held-out tasks. Seeds that all have one value have "
        "no interval."
    )


def _draw(runs: Sequence[SeedRun], options: TrainOptions) -> str | None:
    """Draw the curves of all seeds and their mean. Returns the place of the picture; None without a curve."""
    from rllm.tracking.picture import draw_comparison

    finished_runs = {f"seed {run.seed}": run for run in runs if run.summary is not None}
    if not finished_runs:
        return None
    path = options.seeds_directory / PICTURE
    draw_comparison(
        {name: read_metrics(RunDirectory.read(run.path).metrics_path) for name, run in finished_runs.items()},
        path,
        summaries={name: run.summary for name, run in finished_runs.items()},
        x_axis="steps",
        title=f"Success on {options.label}, {len(finished_runs)} seeds",
        mean_label="mean",
    )
    return str(path)


def _print_report(report: Mapping[str, Any], path: Path, words: Sequence[str]) -> None:
    console = out()
    for row in report["seeds"]:
        if "failed" in row:
            print_sentence(console, Text(f"Seed {row['seed']} failed: {row['failed']}", style="red"))
    if report["finished"]:
        console.print("\nSuccess on held-out tasks", style="bold")
        console.print(_report_table(report))
    print_sentence(console, Text(report["interval"], style="dim"))
    print_sentence(console, Text(f"Took {readable_seconds(elapsed_s())}."))
    console.print(f"\nRuns     {path.parent}", soft_wrap=True)
    console.print(f"Report   {path}", soft_wrap=True)
    following: list[tuple[list[str], str]] = []
    if report["finished"] < len(report["seeds"]):
        following.append(([*words], "continue what failed"))
    if report["picture"]:
        console.print(f"Picture  {report['picture']}", soft_wrap=True)
        following.append((["rllm", "runs", "list", str(path.parent)], "look at the runs"))
        following.append((["rllm", "view", str(path.parent)], "compare them in the browser"))
    print_next(console, following)


def _report_table(report: Mapping[str, Any]) -> FittingTable:
    """Table with a row for each seed that finished, their mean, and its interval."""
    rows = [row for row in report["seeds"] if "failed" not in row]
    labels: dict[str, str] = report["labels"]
    places = [(name, measure) for name in labels for measure in _shown_measures(rows)]
    columns = [f"{labels[name]}, {_COLUMNS[measure]}" for name, measure in places]
    report_table = table("seed", *columns, "gain, sampled", "work", spare=[*reversed(columns)])
    for row in rows:
        cells = (_value(row[name][measure], measure) for name, measure in places)
        gain, work = _gain(row["gain"]["success"]), readable_seconds(row["wall_s"])
        report_table.add_row(str(row["seed"]), *cells, gain, work, end_section=row is rows[-1])
    mean = report["mean"]
    figures = [(mean[name][measure], measure) for name, measure in places]
    gain, work = mean["gain"]["success"], mean["wall_s"]
    cells = (_value(figure["mean"], measure) for figure, measure in figures)
    report_table.add_row("mean", *cells, _gain(gain["mean"]), readable_seconds(work["mean"]))
    cells = (
        _interval(figure["interval"], 1.0 if measure == "return" else 100.0) for figure, measure in figures
    )
    report_table.add_row("95 %", *cells, _interval(gain["interval"], 100.0, sign="+"), "")
    return report_table


def _shown_measures(rows: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """The measures, with returns where these are other numbers than success."""
    ends = [row["after"] for row in rows]
    return MEASURES if any(is_partial(end["return"], end["success"]) for end in ends) else SHARES


def _value(value: float | None, measure: str) -> Text:
    return Text(mean_return(value)) if measure == "return" else rate(value)


def _gain(value: float | None) -> Text:
    return Text("–", style="dim") if value is None else Text(f"{100 * value:+.1f} points")


def _interval(interval: Sequence[float] | None, scale: float, sign: str = "") -> Text:
    if interval is None:
        return Text("–", style="dim")
    digits = 3 if scale == 1.0 else 1
    return Text(f"[{', '.join(f'{scale * end:{sign}.{digits}f}' for end in interval)}]", style="dim")
