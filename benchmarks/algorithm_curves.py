"""docs/algorithms.md's table: what each algorithm makes of the same imitator, on two tasks, three seeds each.

    python benchmarks/algorithm_curves.py [--tasks frozenlake countdown] [--seeds 0 1 2] [--only PPO GRPO]

A task's imitator is made once for each seed (the warm start of `rllm train TASK`) and every algorithm begins
with it, for the same number of steps of the same size. Nothing is tuned for one of them but what its paper
asks for. Runs that are already there are not repeated.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.build.configs import training_config
from rllm.build.training import build_trainer
from rllm.tracking.console import LiveView

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "PPO": ("algorithm.estimator=gae", "critic.trunk=separate"),
    "GRPO": (),
    "RLOO": ("algorithm.estimator=rloo",),
    "ReMax": ("algorithm.estimator=remax",),
    "REINFORCE++": ("algorithm.estimator=reinforce_plus_plus",),
    "GSPO": ("algorithm.loss=gspo", "algorithm.clip_high=-1"),  # the bounds of its paper
}
STEPS = {"frozenlake": 30, "countdown": 120}
NUM_TASKS = 512
"""Held-out tasks of each measurement."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Place:
    """Where the runs of one task and seed are."""

    root: Path
    task: str
    seed: int
    threads: int

    @property
    def imitation(self) -> Path:
        return self.root / self.task / f"imitation-{self.seed}"

    def trained(self, algorithm: str) -> Path:
        return self.root / self.task / f"{algorithm.replace('+', 'p')}-{self.seed}"

    def run(self, output: Path, *assignments: str) -> dict[str, Any]:
        every = (
            f"threads={self.threads}",
            f"evaluation.num_tasks={NUM_TASKS}",
            "evaluation.every_steps=0",
        )
        config = training_config(self.task, None, (*every, *assignments), self.seed)
        with LiveView(config.steps, title=f"{output.name} on {self.task}") as view:
            return build_trainer(config, output, view).train().summary

    def imitated(self) -> dict[str, Any]:
        return self.run(self.imitation, "steps=0")

    def learned(self, algorithm: str) -> dict[str, Any]:
        begin = (f"model.path={self.imitation / 'model'}", "warm_start.steps=0", f"steps={STEPS[self.task]}")
        return self.run(self.trained(algorithm), *begin, *ALGORITHMS[algorithm])


def percent(report: dict[str, Any], way: str) -> str:
    low, high = report[f"{way}_interval"]
    return f"{100 * report[way]:.1f} ({100 * low:.0f}–{100 * high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--root", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    lines = ["| task | algorithm | seed | sampled | greedy | seconds |", "|---|---|---|---|---|---|"]
    for task in arguments.tasks:
        for seed in arguments.seeds:
            place = Place(root=arguments.root, task=task, seed=seed, threads=arguments.threads)
            report = place.imitated()["after"]
            lines.append(
                f"| {task} | imitation alone | {seed} | {percent(report, 'success')} | "
                f"{percent(report, 'greedy')} | |"
            )
            for algorithm in arguments.only:
                summary = place.learned(algorithm)
                report = summary["after"]
                lines.append(
                    f"| {task} | {algorithm} | {seed} | {percent(report, 'success')} | "
                    f"{percent(report, 'greedy')} | {summary['phase_s']['train']:.0f} |"
                )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
