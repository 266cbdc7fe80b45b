"""`make learn-pretrained`: each task of examples/pretrained with a pretrained model and the reported seeds.

    tasks × seeds ──► one process a run: train on the task's file ──► 8 attempts each, before and after
                                      └──► results/learn_pretrained/TASK-seedN.json ──► docs and examples

    python benchmarks/learn_pretrained.py [--task NAME ...] [--seeds N ...] [--hours 12]
    python benchmarks/learn_pretrained.py --task relay --variant lora        an adapter; TASK-lora-seedN.json
    python benchmarks/learn_pretrained.py --task extract --seeds 7 --split validation        while developing

A run that was stopped or failed is resumed, and one whose file is there is not repeated: commit the files as
they come.
Only reported seeds on the test split are written there; others under --root.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from learning import Campaign, machine
from learning_blocks import ROOT, Block
from learning_figures import run_figures, world_behind
from pretrained_tables import RESULTS

import rllm
from rllm.build.models import initial_model_path
from rllm.config.loader import load_config
from rllm.config.open_keys import OPEN_KEYS, get_key
from rllm.errors import ConfigError
from rllm.eval.pass_at_k import pass_at_k
from rllm.files.atomic import write_atomic
from rllm.models.named_templates import chat_template_named
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.run import TrainingRun
from rllm.types.episode import Episode

EXAMPLES = ROOT / "examples" / "pretrained"
MODEL = "smollm2-135m-instruct"
SEEDS = (60, 61, 62)
"""Reported; no setting was chosen by them."""
FRESH_SEEDS = {"constraints": (63, 64, 65)}
"""Reported of a task that was redesigned after a reported seed had been seen."""
NUM_PASS_TASKS, NUM_ATTEMPTS = 16, 8
"""Test tasks, and attempts at each, of pass@8."""
CONSTANTS: dict[str, Callable[[dict[str, Any]], Hashable]] = {
    "calculator": lambda task: tuple(task["signs"]),
    "constraints": lambda task: (task["case"], task["mark"]),
    "documents": lambda task: task["path"][-1],
    "extract": lambda task: str(task["answer"]),
    "lights": lambda task: tuple(task["rules"][light] for light in task["lights"]),
    "relay": lambda task: task["count"],
    "sql": lambda task: task["asked"],
    "word_problems": lambda task: task["sign"],
}
"""What one answer to all tasks has to fit: a number, a city, an order of moves; or one way to answer, such as
one case and mark for all sentences, one order of signs for all calculations."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "": (MODEL, {}),
    "lora": (MODEL, {"lora": {"rank": 16}}),
    "gemma3": ("gemma-3-270m", {}),
}
"""Variant -> model and settings; the first one is what the tasks are shipped for."""
SIGNAL_UNTIL = 0.9
"""Success up to which groups are to carry signal."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PretrainedBlock(Block):
    """One example with one model."""

    model: str
    variant: str = ""

    @property
    def result_name(self) -> str:
        """Name of the files of its results, before the seed."""
        return f"{self.name}-{self.variant}" if self.variant else self.name

    def words(self, seed: int, place: Path, split: str) -> list[str]:
        options = ["--task", self.name, "--seeds", str(seed), "--split", split, "--model", self.model]
        options += ["--variant", self.variant]
        return [sys.executable, __file__, *options, "--run", str(place / "run")]

    def runs(self, place: Path) -> tuple[Path, list[Path]]:
        return place / "run", []


@dataclass(kw_only=True, slots=True)
class PretrainedCampaign(Campaign):
    """Runs of tasks that differ in their seeds."""

    runs: list[tuple[Block, int]]

    def pairs(self) -> list[tuple[Block, int]]:
        return self.runs


def blocks(model: str, variant: str = "") -> dict[str, PretrainedBlock]:
    """Every example, by name."""
    return {
        path.stem: PretrainedBlock(
            name=path.stem,
            category="pretrained",
            files=(str(path.relative_to(ROOT)),),
            model=model,
            variant=variant,
        )
        for path in sorted(EXAMPLES.glob("*.py"))
    }


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class AttemptsRun(TrainingRun):
    """Plays 8 attempts at some reported tasks with the model of the run, and trains nothing."""

    async def _train(
        self, directory: Any, learner: Any, clients: Any, engine: Any, cluster: Any, encodings: Any
    ) -> dict[str, Any]:
        from rllm.trainer.rollouts import sampling_of

        learner.policies.publish()
        right: dict[str, list[bool]] = {}
        tasks = self.tasks.heldout[:NUM_PASS_TASKS]
        attempts = engine.run(
            tasks, group_size=NUM_ATTEMPTS, purpose="attempts", sampling=sampling_of(self.config)
        )
        async with aclosing(attempts):
            async for episode in attempts:
                right.setdefault(episode.task_id, []).append(episode.is_correct)
        rates = [pass_at_k(len(each), sum(each), NUM_ATTEMPTS) for each in right.values()]
        return {"pass_at_8": sum(rates) / len(rates), "tasks": len(rates)}

    def draw_curve(self, directory: Any, summary: dict[str, Any]) -> None:
        """There is none."""


def train_one(name: str, model: str, seed: int, split: str, run: Path, variant: str = "") -> None:
    """Train, then measure pass@8 of both models in directories beside the run; what is finished is kept."""
    example, model = load_example(name), with_chat_template(initial_model_path(model), run.with_name("model"))
    trainer = example.trainer(model, run, seed, split, threads=1, **VARIANTS[variant][1])
    trained = trainer.train().model_path
    for when, path in (("before", model), ("after", str(trained))):
        attempts = example.trainer(path, run.with_name(when), seed, split, threads=1).run
        AttemptsRun(attempts.config, attempts.player, attempts.tasks, output=attempts.output).train()


def with_chat_template(model: str, place: Path) -> str:
    """Return `model`, or for a base model a directory at `place` that gives it the ChatML template."""
    if not Path(model).is_dir() or HuggingFaceTokenizer(Path(model)).has_chat_template:
        return model
    shutil.copytree(model, place, dirs_exist_ok=True)
    (place / "chat_template.jinja").write_text(chat_template_named("chatml", begins_texts=True))
    return str(place)


def result_of(block: PretrainedBlock, place: Path, seed: int, split: str) -> dict[str, Any]:
    """What the file of a finished run holds."""
    about = json.loads((place / "about.json").read_text())
    entry = {"task": block.name, "model": block.model, "seed": seed, "rllm": rllm.__version__, **about}
    entry |= {"variant": block.variant, "machine": machine(), "files": block.settings}
    run = place / "run"
    steps = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    early = [line for line in steps if line["success"] < SIGNAL_UNTIL]
    config = load_config(json.loads((run / "config.json").read_text()))
    num_groups = sum(line["groups"] for line in early)
    entropies = [round(line["entropy"], 4) for line in steps if "entropy" in line]
    passes = {when: json.loads((place / when / "summary.json").read_text()) for when in ("before", "after")}
    world = world_behind("", ROOT / block.files[0])
    assert world is not None
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        episodes = {when: list(store.episodes(when)) for when in ("before", "after")}
    return entry | {
        **run_figures(run, world),
        "kinds": success_by_kind(episodes, world.kind),
        "steps": len(steps),
        "pass_at_8": {when: 100 * each["pass_at_8"] for when, each in passes.items()},
        "different_answers": {when: share_different(each) for when, each in episodes.items()},
        "constant": 100 * best_constant(block.name, world.tasks(split)[: len(episodes["after"])]),
        "entropy": [entropies[0], entropies[-1]] if entropies else [],
        "groups_with_signal": 1 - sum(line["groups_tied"] for line in early) / max(1, num_groups),
        "success_by_step": [round(line["success"], 4) for line in steps],
        "settings": {key: get_key(config, key) for key in OPEN_KEYS},
    }


def best_constant(name: str, tasks: Sequence[dict[str, Any]]) -> float:
    """Share of the tasks that one answer, or one way to answer, is right for."""
    return Counter(CONSTANTS[name](task) for task in tasks).most_common(1)[0][1] / len(tasks)


def success_by_kind(
    episodes: Mapping[str, Sequence[Episode]], kind: Callable[[Mapping[str, Any]], str]
) -> dict[str, list[float]]:
    """Kind of task -> share of right episodes before and after."""
    right: dict[str, dict[str, list[bool]]] = {}
    for when, played in episodes.items():
        for episode in played:
            of_kind = right.setdefault(kind(episode_task(episode)), {"before": [], "after": []})
            of_kind[when].append(episode.is_correct)
    return {
        name: [round(sum(each) / len(each), 4) for each in of_kind.values()]
        for name, of_kind in sorted(right.items())
    }


def episode_task(episode: Episode) -> dict[str, Any]:
    """The task as the example made it; a program's is a Task with the rest in its metadata."""
    task: Any = episode.task
    return task if isinstance(task, dict) else dict(task.metadata)


def share_different(episodes: list[Episode]) -> float:
    """Share of the episodes whose answers no earlier episode gave."""
    answers = {
        tuple(step.model_response for trajectory in episode.trajectories for step in trajectory.steps)
        for episode in episodes
    }
    return len(answers) / len(episodes)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="*", default=[], metavar="NAME", help="examples; all where left out")
    parser.add_argument("--seeds", nargs="+", type=int, help="the reported seeds of each task if left out")
    parser.add_argument("--split", default="test", choices=("test", "validation"))
    parser.add_argument("--variant", default="", choices=VARIANTS, help="model and settings; the usual ones")
    parser.add_argument("--model", default="", help="another model than that of the variant")
    parser.add_argument("--hours", type=float, default=100.0, help="stop then, to go on another time")
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "learn_pretrained")
    parser.add_argument("--run", type=Path, help="train one task with one seed into this directory")
    options = parser.parse_args(words)
    options.model = options.model or VARIANTS[options.variant][0]
    by_name = blocks(options.model, options.variant)
    if unknown := [name for name in options.task if name not in by_name]:
        raise ConfigError(f"There is no example `{unknown[0]}`; there are {', '.join(by_name)}.")
    if options.run is not None:
        train_one(
            options.task[0], options.model, options.seeds[0], options.split, options.run, options.variant
        )
        return 0
    return run_campaign(options, [by_name[name] for name in options.task or by_name])


def reported_seeds(name: str) -> tuple[int, ...]:
    return FRESH_SEEDS.get(name, SEEDS)


def run_campaign(options: argparse.Namespace, chosen: list[PretrainedBlock]) -> int:
    """Return the exit status: 0 if every run is finished, 1 if one failed, 2 if time ran out."""
    # Seed by seed, so that a campaign that was stopped has something of every task.
    seeds_by_block = [options.seeds or reported_seeds(block.name) for block in chosen]
    pairs = [pair for seeds in zip(*seeds_by_block, strict=True) for pair in zip(chosen, seeds, strict=True)]
    is_usual = options.model == VARIANTS[options.variant][0]
    has_reported_seeds = all(seed in reported_seeds(block.name) for block, seed in pairs)
    is_reported = options.split == "test" and is_usual and has_reported_seeds
    results = RESULTS if is_reported else options.root / "results"
    campaign = PretrainedCampaign(
        blocks=[*chosen],
        seeds=sorted({seed for _, seed in pairs}),
        runs=[*pairs],
        root=options.root,
        split=options.split,
        limit_s=3600.0 * options.hours,
        source="-".join(filter(None, (Path(options.model).name, options.variant))),
    )
    status = 0
    for number, (block, seed) in enumerate(pairs, start=1):
        path = results / f"{block.result_name}-seed{seed}.json"
        if path.exists():
            continue
        place = campaign.place(block, seed)
        if campaign.seconds(block, seed) is None and not campaign.run_one(
            block, seed, f"[{number}/{len(pairs)}] {block.name}, seed {seed}", campaign.limit_s
        ):
            return 2
        about = place / "about.json"
        if "failed" in json.loads(about.read_text()):  # it has been said; the same command tries again
            about.unlink()
            status = 1
            continue
        results.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(result_of(block, place, seed, options.split), indent=1) + "\n")
    return status


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
