"""Algorithms side by side: what each makes of the same imitator, on two tasks that can tell them apart.

    imitation, once a seed ──► each variant from there, one change at a time ──► results/algorithms.json
                           └─► TRL's GRPOTrainer, same task, model, tokens and budget

    python benchmarks/algorithm_curves.py [--study single-turn] [--only RLOO GSPO] [--hours 3] [--json]
    python benchmarks/algorithm_curves.py --quick        three variants, one seed, three steps

Nothing is tuned for a variant but what its paper asks for (`algorithm_variants.py`). Figures are written
after every run, and a run whose figures are there is not repeated: the same command goes on, days later as
well, as long as the configuration is the same and the imitator of a seed comes to the same. Two processes may
share the work, told apart by --study or --only. Seconds are CPU seconds of one thread, so other work on the
machine does not count. The exit status is 2 where time ran out.
"""

import argparse
import fcntl
import hashlib
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from algorithm_tables import RESULTS, text_of
from algorithm_trl import train_with_trl
from algorithm_variants import (
    DEFAULT,
    IMITATION,
    MAIN,
    MORE,
    OURS,
    SEEDS,
    STUDIES,
    TRL,
    VARIANTS,
    Study,
    Variant,
    common,
    kept_runs,
    seeds_of,
    study_settings,
    variants_of,
)
from learning import NO_TIME, ROOT, commit, source_version

from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.files.atomic import write_atomic
from rllm.tracking.console import LiveView
from rllm.tracking.jsonl import read_metrics

QUICK = ("warm_start.steps=5", "evaluation.num_tasks=16")
QUICK_STEPS = 3


class CpuView(LiveView):
    """Shows a run, and adds up what each of its phases costs this process."""

    def __init__(self, total_steps: int, title: str) -> None:
        super().__init__(total_steps, title=title)
        self.cpu_s: dict[str, float] = {}
        self._last_s = cpu_seconds()

    def begin(self, phase: str) -> None:
        now_s = cpu_seconds()
        self.cpu_s[self._phase] = self.cpu_s.get(self._phase, 0.0) + now_s - self._last_s
        self._last_s = now_s
        super().begin(phase)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(kw_only=True, slots=True, frozen=True)
class Place:
    """Where the runs of one task and seed are, and how long they are."""

    root: Path
    study: Study
    seed: int
    threads: int
    steps: int
    """Of reinforcement."""
    source: str
    shorter: tuple[str, ...] = ()
    """What `--quick` changes."""

    @property
    def imitator(self) -> TrainConfig:
        return self.config("steps=0", "evaluation.split=validation", "evaluation.every_steps=0")

    @property
    def imitation(self) -> Path:
        return self.path(IMITATION, self.imitator)

    def config(self, *assignments: str) -> TrainConfig:
        words = (f"threads={self.threads}", *self.study.assignments, *self.shorter, *assignments)
        return training_config(self.study.task, None, words, self.seed)

    def learner(self, variant: Variant) -> TrainConfig:
        """Begins with the imitator."""
        model = f"model.path={self.imitation / 'model'}"
        return self.config(model, *common(self.steps), *variant.assignments)

    def path(self, name: str, config: TrainConfig) -> Path:
        """Another configuration or source has another directory."""
        content = json.dumps(config_dict(config), sort_keys=True).encode()
        digest = hashlib.sha256(content).hexdigest()[:12]
        word = "".join(each if each.isalnum() else "-" for each in name)
        return self.root / self.study.task / f"{word}-{digest}-{self.source}-{self.seed}"

    def title(self, name: str) -> str:
        return f"{name}, {self.study.task}, seed {self.seed}"

    def imitated(self) -> dict[str, Any]:
        summary, _ = trained(self.imitator, self.imitation, self.title(IMITATION))
        return {**success(summary), "baselines": summary["baselines"]}

    def learned(self, name: str, variant: Variant) -> dict[str, Any]:
        """The figures of one run, which begins anew where it was stopped: its seconds are whole."""
        config = self.learner(variant)
        output = self.path(name, config)
        shutil.rmtree(output, ignore_errors=True)
        summary, cpu_s = trained(config, output, self.title(name))
        lines = [each for each in read_metrics(output / "metrics.jsonl") if each["phase"] == "train"]
        curve = [round(each["success"], 4) for each in lines]
        return {**success(summary), "cpu_s": round(cpu_s["train"], 1), "curve": curve}

    def learned_by_trl(self, variant: Variant) -> dict[str, Any]:
        """The same budget of the same tasks, by TRL; its model is measured as ours are."""
        config = self.learner(variant)
        output = self.path(TRL, config)
        shutil.rmtree(output, ignore_errors=True)
        costs = train_with_trl(config, output)
        measuring = self.config(f"model.path={output}", *common(0))
        summary, _ = trained(measuring, output / "measured", self.title(f"{TRL}, measured"))
        return {**success(summary), "cpu_s": round(costs["cpu"], 1), "curve": costs["curve"]}


def trained(config: TrainConfig, output: Path, title: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The summary of a run, and its CPU seconds by phase."""
    view = CpuView(config.steps, title)
    with view:
        run = build_run(config, output)
        run.tracker = view
        return run.train().summary, view.cpu_s


def success(summary: dict[str, Any]) -> dict[str, Any]:
    """Shares of validation tasks."""
    return {"sampled": summary["after"]["success"], "greedy": summary["after"]["greedy"]}


def jobs(labels: Sequence[str], names: Sequence[str], *, trl: bool) -> Iterator[tuple[str, str, int]]:
    """(study, variant, seed): the main ones seed by seed, then the others, then ours beside TRL's, so that
    what was stopped can be compared."""
    variant_names = {*names, TRL} if trl and OURS in names else {*names}
    turns = [[name for name, each in VARIANTS.items() if each.seeds == num] for num in (MAIN, MORE)]
    for turn in (*turns, [OURS, TRL]):
        for place, seed in enumerate(SEEDS):
            for label in labels:
                num_seeds = seeds_of(label)
                for name in turn:
                    if name in variant_names and place < num_seeds.get(name, 0):
                        yield label, name, seed


class Campaign:
    """The figures, and what is missing of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.source = options, source_version()
        self.results: Path = options.root / "algorithms.json" if options.quick else RESULTS
        before = load_studies(self.results)
        if options.anew:
            kept = {label: each for label, each in before.items() if label not in options.study}
            write_atomic(self.results, json.dumps({"studies": kept}, indent=1) + "\n")
            before = kept
        self.studies: dict[str, dict[str, Any]] = {}
        for label in options.study:
            steps = QUICK_STEPS if options.quick else STUDIES[label].steps
            settings = study_settings(label, steps, QUICK if options.quick else ())
            runs = kept_runs(label, before.get(label), settings)
            task = STUDIES[label].task
            self.studies[label] = {"task": task, "steps": steps, "settings": settings, "runs": runs}

    def missing(self) -> list[tuple[str, str, int]]:
        options = self.options
        only = options.only or (("RLOO", OURS) if options.quick else VARIANTS)
        return [
            (label, name, seed)
            for label, name, seed in jobs(options.study, [DEFAULT, *only], trl=not options.alone)
            if str(seed) not in self.studies[label]["runs"].get(name, {})
            and (seed == SEEDS[0] or not options.quick)
        ]

    def run(self) -> bool:
        """Whether everything is there; False where time ran out."""
        deadline, missing = time.monotonic() + 3600.0 * self.options.hours, self.missing()
        for number, (label, name, seed) in enumerate(missing, start=1):
            if time.monotonic() > deadline:
                return False
            print(f"[{number}/{len(missing)}] {label}: {name}, seed {seed}", file=sys.stderr, flush=True)
            self.run_one(label, name, seed)
            self.write()
        return True

    def run_one(self, label: str, name: str, seed: int) -> None:
        place = Place(
            root=self.options.root,
            study=STUDIES[label],
            seed=seed,
            threads=self.options.threads,
            steps=self.studies[label]["steps"],
            source=self.source,
            shorter=QUICK if self.options.quick else (),
        )
        self.note_imitator(label, seed, place.imitated())
        variant = variants_of(label)[OURS if name == TRL else name]
        figures = place.learned_by_trl(variant) if name == TRL else place.learned(name, variant)
        origin = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        run = {**figures, "change": list(variant.assignments), **origin}
        self.studies[label]["runs"].setdefault(name, {})[str(seed)] = run

    def note_imitator(self, label: str, seed: int, figures: dict[str, Any]) -> None:
        """Runs are paired by their imitator, so it has to be the one that those on record began with."""
        before = self.studies[label]["runs"].setdefault(IMITATION, {}).setdefault(str(seed), figures)
        if (before["sampled"], before["greedy"]) != (figures["sampled"], figures["greedy"]):
            raise SystemExit(
                f"The imitator of {label}, seed {seed}, has {figures['sampled']:.1%} sampled and "
                f"{figures['greedy']:.1%} greedy, and {before['sampled']:.1%} and {before['greedy']:.1%} in "
                f"{self.results}: another machine or source made it, so new runs cannot be paired with those "
                "on record. `--anew` measures all of them again."
            )

    def write(self) -> None:
        """What is there now, beside what other processes have written since."""
        self.results.parent.mkdir(parents=True, exist_ok=True)
        self.options.root.mkdir(parents=True, exist_ok=True)
        with (self.options.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            studies = load_studies(self.results)
            for label, mine in self.studies.items():
                theirs = kept_runs(label, studies.get(label), mine["settings"])
                runs = {
                    name: theirs.get(name, {}) | mine["runs"].get(name, {}) for name in theirs | mine["runs"]
                }
                studies[label] = {**mine, "runs": runs}
            content = {label: studies[label] for label in STUDIES if studies.get(label, {}).get("runs")}
            write_atomic(self.results, json.dumps({"studies": content}, indent=1) + "\n")


def load_studies(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["studies"] if path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help="and the default")
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--anew", action="store_true", help="forget the figures that are on record")
    parser.add_argument("--hours", type=float, default=3.0, help="begin no run after that")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "algorithms")
    parser.add_argument("--quick", action="store_true", help="three variants, one seed, three steps")
    parser.add_argument("--json", action="store_true", help="print the figures instead of a table")
    options = parser.parse_args()
    if not options.quick:
        return compare(options)
    with tempfile.TemporaryDirectory() as scratch:
        options.root = Path(scratch)
        return compare(options)


def compare(options: argparse.Namespace) -> int:
    campaign = Campaign(options)
    is_whole = campaign.run()
    report = {"studies": load_studies(campaign.results)}
    print(json.dumps(report) if options.json else text_of(report))
    print(f"Figures: {campaign.results}", file=sys.stderr)
    return 0 if is_whole else NO_TIME


if __name__ == "__main__":
    sys.exit(main())
