"""`make learn`: every built-in training block with the seeds that are reported, and which of them learn.

    blocks × seeds ──► one process a run: `rllm train NAME --seed N` ──► figures ──► results/learning.json
                                                                                        └──► README and docs

    python benchmarks/learning.py [--task NAME ...] [--seeds 50 51 52] [--hours 3] [--json]
    python benchmarks/learning.py --task blackjack --seeds 100 --split validation        while developing

A run is kept under its task, configuration, version of the source and seed: one that was stopped goes on, a
finished one is not repeated, and a changed configuration or source makes a new one. Only the reported seeds
on the test split are written to learning.json; others to `learning.json` under --root. The exit status is 0
where every block that was asked for reaches every floor (`learning_floors.py`), 1 where one does not, and 2
where time ran out: the same command then goes on.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from learning_blocks import ROOT, Block, blocks
from learning_figures import run_figures, task_figures, world_behind
from learning_floors import floors_of, missed, missed_together
from learning_tables import RESULTS

import rllm
from rllm.errors import ConfigError
from rllm.files.atomic import write_atomic
from rllm.tracking.jsonl import read_metrics

SEEDS = (50, 51, 52)
"""Reported; nothing is chosen by them."""
POLL_S, PROGRESS_S = 0.1, 30.0
UNKNOWN_WALL_S = 240.0
"""What a run is expected to take before any has finished."""
NO_TIME = 2


def source_version() -> str:
    """Of all that a run executes; the catalogue is left out, because configurations are compared apart."""
    source, digest = ROOT / "src" / "rllm", hashlib.sha256()
    for path in sorted(source.rglob("*")):
        if (
            path.is_file()
            and path.suffix in (".py", ".md", ".toml", ".json")
            and path.parent.name != "catalogue"
        ):
            digest.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Short, with `+` where files differ from it; empty outside of a clone."""
    process = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"], cwd=ROOT, capture_output=True, text=True
    )
    return process.stdout.strip()


@dataclass(kw_only=True, slots=True)
class Campaign:
    """All runs that were asked for."""

    blocks: list[Block]
    seeds: list[int]
    root: Path
    split: str
    limit_s: float
    source: str = field(default_factory=source_version)

    def place(self, block: Block, seed: int) -> Path:
        return self.root / block.name / f"{block.config}-{self.source}-{self.split}" / f"seed{seed}"

    def pairs(self) -> list[tuple[Block, int]]:
        """Seed by seed, so that a table that was stopped has something of every task."""
        return [(block, seed) for seed in self.seeds for block in self.blocks]

    def seconds(self, block: Block, seed: int) -> float | None:
        """What a finished run took, failed ones included."""
        return _about(self.place(block, seed)).get("wall_s")

    def seconds_left(self) -> float:
        """An estimate: what the same block took with another seed, or else the mean run."""
        seconds_of = {(block.name, seed): self.seconds(block, seed) for block, seed in self.pairs()}
        finished = [each for each in seconds_of.values() if each is not None]
        mean = sum(finished) / len(finished) if finished else UNKNOWN_WALL_S
        remaining_s = 0.0
        for (name, _), spent in seconds_of.items():
            if spent is None:
                mine = [each for (other, _), each in seconds_of.items() if other == name and each is not None]
                remaining_s += sum(mine) / len(mine) if mine else mean
        return remaining_s

    def run_all(self) -> bool:
        """Whether everything is finished; False where time ran out."""
        pairs, start_s = self.pairs(), time.monotonic()
        for number, (block, seed) in enumerate(pairs, start=1):
            if self.seconds(block, seed) is not None:
                continue
            left_s = self.limit_s - (time.monotonic() - start_s)
            if left_s <= 0:
                return False
            title = f"[{number}/{len(pairs)}] {block.name}, seed {seed}"
            _say(f"{title}: begins; about {_clock(self.seconds_left())} left")
            if not self.run_one(block, seed, title, left_s):
                return False
        return True

    def run_one(self, block: Block, seed: int, title: str, left_s: float) -> bool:
        """False where it was stopped for want of time.

        A run that fails is finished: its last words are kept.
        """
        place = self.place(block, seed)
        place.mkdir(parents=True, exist_ok=True)
        run, spent_path = block.runs(place)[0], place / "spent_cpu_s.json"
        spent_s: float = json.loads(spent_path.read_text()) if spent_path.exists() else 0.0
        start_s = report_s = time.monotonic()
        with (place / "output.txt").open("ab") as log:
            process = subprocess.Popen(
                block.words(seed, place, self.split), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                while (usage := _usage(process)) is None:
                    time.sleep(POLL_S)
                    if time.monotonic() - start_s > left_s:
                        return False
                    if time.monotonic() - report_s > PROGRESS_S:
                        report_s = time.monotonic()
                        _say(f"{title}: {_progress(run)}; about {_clock(self.seconds_left())} left for all")
            finally:
                if process.returncode is None:
                    process.terminate()  # it saves a checkpoint
                    stopped = _ended(process)
                    write_atomic(spent_path, json.dumps(spent_s + stopped.ru_utime + stopped.ru_stime))
        about: dict[str, Any] = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": commit(),
            "peak_mib": round(usage.ru_maxrss / 2**10, 1),
            "cpu_s": round(spent_s + usage.ru_utime + usage.ru_stime, 1),
            "wall_s": round(time.monotonic() - start_s, 1),
        }
        if process.returncode != 0:
            words = (place / "output.txt").read_text(errors="replace").strip().splitlines()
            about["failed"] = words[-1][:300] if words else "it said nothing"
            _say(f"{title}: FAILED: {about['failed']}")
        write_atomic(place / "about.json", json.dumps(about, indent=2) + "\n")
        return True

    def entry(self, block: Block) -> dict[str, Any] | None:
        """What learning.json says of a task; None before its first run has finished."""
        finished = [seed for seed in self.seeds if self.seconds(block, seed) is not None]
        if not finished:
            return None
        world = world_behind(block.environment, ROOT / block.files[0] if block.files else None)
        figures, whole = list[dict[str, Any]](), list[Path]()
        for seed in finished:
            place = self.place(block, seed)
            about, (run, earlier) = _about(place), block.runs(place)
            if "failed" in about:
                figures.append({"seed": seed, "failed": about["failed"]})
            else:
                whole.append(run)
                mine = run_figures(run, world, earlier)
                figures.append({"seed": seed, **mine, "peak_mib": about["peak_mib"], "cpu_s": about["cpu_s"]})
        latest = max((_about(self.place(block, seed)) for seed in finished), key=lambda each: each["date"])
        entry: dict[str, Any] = {
            "category": block.category,
            "settings": block.settings,
            "nproc": block.nproc,
            "source": self.source,
            "date": latest["date"],
            "rllm": rllm.__version__,
            "commit": latest["commit"],
            "tried": block.tried,
            "earlier": list(block.earlier),
            "runs": figures,
            **task_figures(whole, world),
        }
        entry["floors"] = floors_of(entry, self.seeds)
        return entry


def _usage(process: subprocess.Popen[bytes], how: int = os.WNOHANG) -> resource.struct_rusage | None:
    """Of a process that has ended, and of those that it has waited for; None while it runs."""
    pid, status, usage = os.wait4(process.pid, how)
    if pid == 0:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)  # its own `wait` would find nobody
    return usage


def _ended(process: subprocess.Popen[bytes]) -> resource.struct_rusage:
    usage = _usage(process, 0)
    assert usage is not None
    return usage


def _about(place: Path) -> dict[str, Any]:
    path = place / "about.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _progress(run: Path) -> str:
    lines = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    if not lines:
        return "starting"
    last = lines[-1]
    step = f" {last['step'] + 1}/{last['total_steps']}" if "total_steps" in last else ""
    success = f", {last['success']:.0%}" if "success" in last else ""
    return f"{last['phase']}{step}{success}"


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}


def written(
    results: Path, entries: dict[str, dict[str, Any]], seeds: Sequence[int], split: str
) -> dict[str, Any]:
    """The file with these entries in place of older ones; tasks that are no block any more leave."""
    before = json.loads(results.read_text())["tasks"] if results.exists() else {}
    by_name = blocks()
    tasks = {name: entry for name, entry in sorted((before | entries).items()) if name in by_name}
    report = {"seeds": list(seeds), "split": split, "machine": machine(), "tasks": tasks}
    results.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(results, json.dumps(report, indent=1) + "\n")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="*", default=[], metavar="NAME", help="blocks; all where left out")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--split", default="test", choices=("test", "validation"))
    parser.add_argument("--hours", type=float, default=3.0, help="stop then, to go on another time")
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "learning")
    parser.add_argument("--json", action="store_true", help="print the figures instead of a table")
    options = parser.parse_args()
    by_name = blocks()
    if unknown := [name for name in options.task if name not in by_name]:
        raise SystemExit(f"There is no block `{unknown[0]}`; there are {', '.join(by_name)}.")
    reported = tuple(options.seeds) == SEEDS and options.split == "test"
    campaign = Campaign(
        blocks=[by_name[name] for name in options.task or by_name],
        seeds=options.seeds,
        root=options.root,
        split=options.split,
        limit_s=3600.0 * options.hours,
    )
    is_whole = campaign.run_all()
    entries = {block.name: entry for block in campaign.blocks if (entry := campaign.entry(block))}
    results = RESULTS if reported else options.root / "learning.json"
    report = written(results, entries, options.seeds, options.split)
    if options.json:
        print(json.dumps({**report, "tasks": entries}))
    for name, entry in entries.items():
        _say(f"{name}: {'; '.join(missed(entry)) or 'reaches every floor'}")
    together = missed_together(entries) if not options.task else []
    _say("\n".join([*together, f"Figures: {results}"]))
    if not is_whole:
        _say(f"Time is over ({options.hours:g} h): the same command goes on.")
        return NO_TIME
    return int(bool(together) or any(missed(entry) for entry in entries.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
