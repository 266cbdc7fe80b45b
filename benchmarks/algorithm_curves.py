"""Algorithms side by side: what each makes of the same imitator, on two tasks that can tell them apart.

    imitation, once a seed ──► each variant from there, one change at a time ──► results/algorithms.json
                           └─► TRL's GRPOTrainer, same task, model, tokens and budget

    python benchmarks/algorithm_curves.py [--study single-turn] [--only RLOO GSPO] [--hours 3] [--json]
    python benchmarks/algorithm_curves.py --quick        three variants, one seed, three steps

Nothing is tuned for a variant but what its paper asks for (`algorithm_variants.py`). A run that was stopped
goes on and a finished one is not repeated, as long as configuration and source are the same. The exit status
is 2 where time ran out: the same command goes on then.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from algorithm_tables import OURS, RESULTS, TRL, text_of
from algorithm_trl import train_with_trl
from algorithm_variants import DEFAULT, SEEDS, STUDIES, VARIANTS, Study, Variant, common, variants_of
from learning import NO_TIME, ROOT, commit, source_version

from rllm.build.configs import training_config
from rllm.build.training import build_trainer
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.store.files import write_atomic
from rllm.tracking.console import LiveView
from rllm.tracking.jsonl import read_metrics

QUICK = ("warm_start.steps=5", "evaluation.num_tasks=16")


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
        return self.path("imitation", self.imitator)

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

    def imitated(self) -> dict[str, Any]:
        return trained(self.imitator, self.imitation, f"imitation, {self.study.task}, seed {self.seed}")

    def learned(self, name: str, variant: Variant) -> dict[str, Any]:
        """The figures of one run."""
        config = self.learner(variant)
        output = self.path(name, config)
        summary = trained(config, output, f"{name}, {self.study.task}, seed {self.seed}")
        lines = [each for each in read_metrics(output / "metrics.jsonl") if each["phase"] == "train"]
        return {
            **figures(summary),
            "seconds": round(summary["phase_s"]["train"], 1),
            "curve": [round(each["success"], 4) for each in lines],
        }

    def learned_by_trl(self, variant: Variant) -> dict[str, Any]:
        """The same budget of the same tasks, by TRL; its model is measured as ours are."""
        config = self.learner(variant)
        output = self.path(TRL, config)
        if not (output / "spent.json").exists():
            costs = train_with_trl(config, output)
            write_atomic(output / "spent.json", json.dumps(costs))
        measuring = self.config(f"model.path={output}", *common(0))
        summary = trained(measuring, self.path(f"{TRL} measured", measuring), f"{TRL}, seed {self.seed}")
        costs = json.loads((output / "spent.json").read_text())
        return {**figures(summary), "seconds": round(costs["wall"], 1), "curve": costs["curve"]}


def trained(config: TrainConfig, output: Path, title: str) -> dict[str, Any]:
    """The summary of a run, which goes on where it was stopped."""
    with LiveView(config.steps, title=title) as view:
        return build_trainer(config, output, view).train().summary


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Shares of validation tasks."""
    after = summary["after"]
    return {"sampled": after["success"], "greedy": after["greedy"], "baselines": summary["baselines"]}


def jobs(variants: dict[str, Variant], seeds: tuple[int, ...], *, trl: bool) -> list[tuple[str, int]]:
    """(variant, seed), seed by seed, so that what was stopped can be compared."""
    runs = [
        (name, seed)
        for place, seed in enumerate(seeds)
        for name, variant in variants.items()
        if place < variant.seeds
    ]
    if trl and OURS in variants:
        runs += [(TRL, seed) for seed in seeds[: variants[OURS].seeds]]
    return runs


def study_of(label: str, options: argparse.Namespace, deadline: float) -> tuple[dict[str, Any], bool]:
    """The figures of one study, and whether all its runs are there."""
    study, variants = STUDIES[label], variants_of(label)
    names = (DEFAULT, *(options.only or (("RLOO", OURS) if options.quick else variants)))
    variants = {name: each for name, each in variants.items() if name in names}
    runs: dict[str, dict[str, Any]] = {name: {} for name in ("imitation", *variants)}
    steps, is_whole = 3 if options.quick else study.steps, True
    for name, seed in jobs(variants, SEEDS[:1] if options.quick else SEEDS, trl=not options.alone):
        if is_whole := time.monotonic() < deadline:
            place = Place(
                root=options.root,
                study=study,
                seed=seed,
                threads=options.threads,
                steps=steps,
                source=source_version(),
                shorter=QUICK if options.quick else (),
            )
            runs["imitation"][str(seed)] = figures(place.imitated())
            by_trl = name == TRL
            run = place.learned_by_trl(variants[OURS]) if by_trl else place.learned(name, variants[name])
            runs.setdefault(name, {})[str(seed)] = run
    return {"task": study.task, "steps": steps, "runs": runs}, is_whole


def compare(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + 3600.0 * options.hours
    studies = {label: study_of(label, options, deadline) for label in options.study}
    report = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit(),
        "studies": {label: study for label, (study, _) in studies.items()},
    }
    results = options.root / "algorithms.json" if options.quick or options.only else RESULTS
    results.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(results, json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if options.json else text_of(report))
    print(f"Figures: {results}", file=sys.stderr)
    return 0 if all(is_whole for _, is_whole in studies.values()) else NO_TIME


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help="and the default")
    parser.add_argument("--alone", action="store_true", help="without TRL")
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


if __name__ == "__main__":
    sys.exit(main())
