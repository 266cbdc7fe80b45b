"""How the default configuration of `rllm train frozenlake` was chosen.

    python benchmarks/search_frozenlake.py [--variants NAME ...] [--seeds 101 102] [--threads 1]
        [--table docs/search.md]

Each variant is trained from scratch and measured on validation maps, which share no map with the test maps
that are reported anywhere else; its seeds are not reported ones either. A run that is already there is not
repeated, so the search can be stopped and continued. One run takes two to three minutes on a core.
"""

import argparse
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from rllm.build.configs import training_config
from rllm.build.training import build_trainer
from rllm.models.builtin import PRESETS, TinyModel, create_model


@dataclass(kw_only=True, slots=True, frozen=True)
class Variant:
    """What differs from the default."""

    assignments: tuple[str, ...] = ()
    model: TinyModel = field(default_factory=lambda: PRESETS["tiny"])


def _size(width: int, layers: int) -> TinyModel:
    return TinyModel(hidden_size=width, num_layers=layers, num_heads=4, intermediate_size=3 * width)


VARIANTS = {
    "default": Variant(),
    "width 64, 2 layers": Variant(model=_size(64, 2)),
    "width 64, 3 layers": Variant(model=_size(64, 3)),
    "width 96, 3 layers": Variant(model=_size(96, 3)),
    "starts in the corner alone": Variant(assignments=("task.train_args.random_start=false",)),
    "training maps p = 0.8": Variant(assignments=("task.train_args.p=0.8",)),
    "training maps p = 0.5, 0.65, 0.8": Variant(assignments=("task.train_args.p=[0.5,0.65,0.8]",)),
    "grid alone": Variant(assignments=("task.agent_args.show_neighbours=false",)),
    "AdamW": Variant(
        assignments=(
            "optimizer.name=adamw",
            "optimizer.learning_rate=6e-4",
            "warm_start.learning_rate=3e-3",
        )
    ),
    "reinforce_plus_plus": Variant(assignments=("algorithm.estimator=reinforce_plus_plus",)),
    "64 tasks, groups of 4": Variant(
        assignments=("rollout.tasks_per_step=64", "rollout.group_size=4"),
    ),
    "learning rate 4e-4": Variant(assignments=("optimizer.learning_rate=4e-4",)),
    "learning rate 2.4e-3": Variant(assignments=("optimizer.learning_rate=2.4e-3",)),
    "240 steps": Variant(assignments=("steps=240",)),
    "80 steps of imitation": Variant(assignments=("warm_start.steps=80",)),
    "temperature 1": Variant(assignments=("rollout.temperature=1.0",)),
    "clip_high 0.2": Variant(assignments=("algorithm.clip_high=0.2",)),
    "1 update a step": Variant(assignments=("algorithm.updates_per_step=1",)),
    "sight 3": Variant(assignments=("warm_start.expert_args.sight=3",)),
    "strolls 45 %": Variant(assignments=("warm_start.noise=0.45",)),
}


def run(name: str, variant: Variant, seed: int, threads: int, root: Path) -> Path:
    """Train one variant with one seed; returns its run directory."""
    output = root / f"{name.replace(' ', '-').replace(',', '').replace('=', '')}-seed{seed}"
    model = root / "models" / f"{variant.model.hidden_size}x{variant.model.num_layers}-seed{seed}"
    if not model.exists():
        create_model(model, variant.model, seed)
    config = training_config(
        "frozenlake",
        assignments=(
            f"model.path={model}",
            f"threads={threads}",
            "evaluation.split=validation",
            "evaluation.every_steps=0",
            *variant.assignments,
        ),
        seed=seed,
    )
    build_trainer(config, output).train()
    return output


def table(root: Path, seeds: list[int]) -> str:
    """Markdown: means over the seeds that are there."""
    lines = [
        "| variant | seeds | warm start sampled | warm start greedy "
        "| after RL sampled | after RL greedy | skill | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in VARIANTS:
        stem = name.replace(" ", "-").replace(",", "").replace("=", "")
        paths = [root / f"{stem}-seed{seed}" / "summary.json" for seed in seeds]
        found = [json.loads(path.read_text()) for path in paths if path.exists()]
        if not found:
            continue
        cells = [
            [each["before"]["success"] for each in found],
            [each["before"]["greedy"] for each in found],
            [each["after"]["success"] for each in found],
            [each["after"]["greedy"] for each in found],
            [each["after"]["success"] - each["before"]["greedy"] for each in found],
        ]
        shown = " | ".join(f"{statistics.mean(values):.3f}" for values in cells)
        lines.append(
            f"| {name} | {len(found)} | {shown} | {statistics.mean(each['wall_s'] for each in found):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[101, 102])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--root", type=Path, default=Path("runs/search"))
    parser.add_argument("--table", type=Path, help="write the table below the last line of this file")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    for name in arguments.variants:
        for seed in arguments.seeds:
            console.print(f"{name}, seed {seed}")
            run(name, VARIANTS[name], seed, arguments.threads, arguments.root)
    text = table(arguments.root, arguments.seeds)
    print(text)
    if arguments.table is not None:
        kept = (
            arguments.table.read_text().split("| variant |")[0].rstrip() if arguments.table.exists() else ""
        )
        arguments.table.write_text(f"{kept}\n\n{text}\n")


if __name__ == "__main__":
    main()
