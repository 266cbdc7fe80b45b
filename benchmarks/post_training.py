"""SFT, then DPO (docs/algorithms.md); a small student beside its teacher (docs/distill.md). On FrozenLake.

    imitator ──► a few steps of RL, stored ──► SFT on what succeeded ──► its own play ──► DPO: success
                                                      └──────────────────────────────────► against failure
    teacher: `rllm train frozenlake` ──► student with 30 % of its parameters, from random weights

    python benchmarks/post_training.py [--seeds 0 1 2] [--root runs/post_training]     SFT, then DPO
    python benchmarks/post_training.py --teachers RUN RUN RUN                          students, one for each

A teacher's student has the teacher's seed. Runs that are already there are not repeated.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from rllm.build.asked import Asked
from rllm.build.configs import distill_config, training_config
from rllm.build.evaluation import evaluated
from rllm.build.providers import resolve_model
from rllm.build.training import build_run
from rllm.models.builtin import TinyModel, create_model
from rllm.store.run_directory import RunDirectory
from rllm.tracking.console import LiveView
from rllm.trainer import AgentDPOTrainer, AgentSFTTrainer

NUM_TASKS = 1024
"""Held-out lakes of each measurement."""
STUDENT = TinyModel(hidden_size=48, num_layers=2, num_heads=4, intermediate_size=144)
STORED_STEPS = 20
NUM_PLAYED = 512
"""Lakes that the fine-tuned model plays, eight times each, for the pairs of DPO."""


def percent(report: dict[str, Any]) -> str:
    low, high = report["success_interval"]
    return f"{100 * report['success']:.1f} ({100 * low:.0f}–{100 * high:.0f})"


def line(what: str, seed: int, model: Path) -> str:
    reports = asyncio.run(
        evaluated(
            Asked(benchmark="frozenlake", place=resolve_model(str(model)), num_tasks=NUM_TASKS, threads=1)
        )
    )["reports"]
    return f"| {what} | {seed} | {percent(reports['sampled'])} | {percent(reports['greedy'])} |"


def stored_run(root: Path, seed: int) -> Path:
    """A run that has only begun to learn: its episodes are what SFT and DPO learn from."""
    output = root / f"stored-{seed}"
    changes = (f"steps={STORED_STEPS}", "threads=1", "evaluation.every_steps=0", "evaluation.num_tasks=8")
    config = training_config("frozenlake", None, changes, seed)
    with LiveView(config.steps, title=output.name) as view:
        run = build_run(config, output)
        run.tracker = view
        run.train()
    return output


def fine_tuned(root: Path, stored: Path, seed: int) -> Path:
    """Beginning with the model that the stored run had in the end."""
    output = root / f"sft-{seed}"
    config = {
        "seed": seed,
        "threads": 1,
        "epochs": 2,
        "batch_size": 64,
        "optimizer": {"learning_rate": 1e-3},
        "data": {"run": str(stored)},
    }
    AgentSFTTrainer(config, output=output).train()
    return output


def played(root: Path, start: Path, seed: int) -> Path:
    """What the fine-tuned model itself makes of training lakes: the episodes of a run of one step, all of
    which were sampled before its first update."""
    output = root / f"played-{seed}"
    changes = (
        "steps=1",
        "threads=1",
        "warm_start.steps=0",
        "optimizer.warmup_steps=0",
        f"model.path={start / 'model'}",
        f"rollout.tasks_per_step={NUM_PLAYED}",
        "rollout.group_size=8",
        "evaluation.every_steps=0",
        "evaluation.num_tasks=8",
    )
    build_run(training_config("frozenlake", None, changes, seed), output).train()
    return output


def preferred(root: Path, stored: Path, start: Path, seed: int) -> Path:
    output = root / f"{stored.name}-dpo"
    config = {
        "seed": seed,
        "threads": 1,
        "epochs": 1,
        "batch_size": 64,
        "model": {"path": str(start / "model")},
        "optimizer": {"learning_rate": 1e-4},
        "data": {"run": str(stored)},
    }
    AgentDPOTrainer(config, output=output).train()
    return output


def distilled(root: Path, teacher: Path, seed: int) -> dict[str, Any]:
    small = root / f"student-{seed}"
    if not small.exists():
        create_model(small, STUDENT, seed)
    changes = (
        f"seed={seed}",
        "threads=1",
        f"model.path={small}",
        "warm_start.steps=100",
        "warm_start.learning_rate=1e-2",
        "steps=60",
        "evaluation.every_steps=0",
        f"evaluation.num_tasks={NUM_TASKS}",
    )
    config = distill_config("frozenlake", str(teacher), None, changes)
    output = root / f"distilled-{seed}"
    with LiveView(config.steps, title=output.name) as view:
        run = build_run(config, output)
        run.tracker = view
        return run.train().summary


def after_sft(root: Path, seed: int) -> list[str]:
    """Lines of the first table."""
    stored = stored_run(root, seed)
    tuned = fine_tuned(root, stored, seed)
    return [
        line("the stored run's", seed, stored),
        line("SFT on its successes", seed, tuned),
        line("then DPO on its own play", seed, preferred(root, played(root, tuned, seed), tuned, seed)),
        line("then DPO on the stored run", seed, preferred(root, stored, tuned, seed)),
    ]


def of_students(root: Path, teacher: Path) -> list[str]:
    """Lines of the second."""
    seed = RunDirectory.read(teacher).config()["seed"]
    summary = distilled(root, teacher, seed)
    return [line("teacher", seed, teacher)] + [
        f"| student, {when} its own play; reverse KL {summary[when]['reverse_kl']:.3f} | {seed} | "
        f"{percent(summary[when])} | {100 * summary[when]['greedy']:.1f} |"
        for when in ("before", "after")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--root", type=Path, default=Path("runs/post_training"))
    parser.add_argument(
        "--teachers", type=Path, nargs="+", help="Runs of `rllm train frozenlake`: a student of each instead."
    )
    arguments = parser.parse_args()
    arguments.root.mkdir(parents=True, exist_ok=True)
    print("| model | seed | sampled | greedy |\n|---|---|---|---|", flush=True)
    for teacher in arguments.teachers or ():
        print("\n".join(of_students(arguments.root, teacher)), flush=True)
    for seed in () if arguments.teachers else arguments.seeds:
        print("\n".join(after_sft(arguments.root, seed)), flush=True)


if __name__ == "__main__":
    main()
