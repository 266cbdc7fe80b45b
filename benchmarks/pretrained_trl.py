"""A pretrained model on a one-turn task of examples/pretrained, beside TRL's GRPOTrainer.

    our run ──► its prompts, step by step ──► TRL: the same model, prompts, rate and rewards
        └──► CPU seconds of training                 └──► both models, measured on the same test tasks

    python benchmarks/pretrained_trl.py --task word_problems [--seed 60]

Runs of both sides follow each other in one process group, each with one thread. Every result is added to
results/pretrained_trl.json; the same command resumes our run, and repeats that of TRL.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from algorithm_curves import CpuView
from algorithm_trl import play_trl, settings_of
from learn_pretrained import MODEL, blocks, episode_task, load_example
from learning import ROOT, commit, machine
from pretrained_tables import BESIDE_TRL

from rllm.build.models import initial_model_path
from rllm.files.atomic import write_atomic
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.types.episode import Episode, Step, Trajectory

TASKS = ("extract", "word_problems")
"""Those of one turn that are written as programs."""


def first_attempts(run: Path, steps: int) -> Iterator[Episode]:
    """One episode of each task of each training step, in order."""
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        for step in range(steps):
            task_ids = set[str]()
            for episode in store.episodes(TRAIN_PHASE, step):
                if episode.task_id not in task_ids:
                    task_ids.add(episode.task_id)
                    yield episode


def compare(name: str, seed: int, root: Path) -> dict[str, Any]:
    """Train both and return their figures."""
    example, model = load_example(name), initial_model_path(MODEL)
    ours = example.trainer(model, root / "ours", seed, "test", threads=1)
    view = CpuView(ours.run.config.steps, f"rLLM, {name}, seed {seed}")
    with view:
        ours.run.tracker = view
        summary = ours.train().summary
    config = ours.run.config
    curve = [
        line["reward_mean"] for line in read_metrics(root / "ours/metrics.jsonl") if line["phase"] == "train"
    ]
    attempts = list(first_attempts(root / "ours", config.steps))
    steps = [attempt.trajectories[0].steps[0] for attempt in attempts]
    tokenizer = HuggingFaceTokenizer(Path(model))
    prompts = [
        tokenizer.apply_template(step.chat_completions[:-1], add_generation_prompt=True) for step in steps
    ]
    tasks = [episode_task(attempt) for attempt in attempts]

    def reward(row: int, text: str) -> float:
        answer = Trajectory(output=text, steps=[Step(model_response=text)])
        return float(example.score.evaluate(tasks[row], Episode(trajectories=[answer])).reward)

    settings = settings_of(config, prompts, root / "trl") | {"completion": config.rollout.max_tokens_per_turn}
    costs = play_trl(settings, steps[0].prompt_ids, reward)
    measured = example.trainer(
        str(root / "trl"),
        root / "measured",
        seed,
        "test",
        threads=1,
        steps=0,
        evaluation={**example.CONFIG["evaluation"], "at_start": False},
    )
    return {
        "task": name,
        "seed": seed,
        "commit": commit(),
        "machine": machine(),
        "rllm": {**_success(summary), "cpu_s": round(view.cpu_s["train"], 1), "curve": _rounded(curve)},
        "trl": {
            **_success(measured.train().summary),
            "cpu_s": round(costs["cpu"], 1),
            "curve": costs["curve"],
        },
    }


def _success(summary: dict[str, Any]) -> dict[str, Any]:
    after = summary["after"]
    names = ("success", "success_interval", "greedy", "greedy_interval")
    return {name: after[name] for name in names}


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--seed", type=int, default=60)
    parser.add_argument("--root", type=Path, default=ROOT / "runs" / "pretrained_trl")
    options = parser.parse_args()
    source = blocks(MODEL)[options.task].config
    result = compare(options.task, options.seed, options.root / f"{options.task}-{source}-seed{options.seed}")
    results = json.loads(BESIDE_TRL.read_text()) if BESIDE_TRL.exists() else []
    key = (options.task, options.seed)
    others = [other for other in results if (other["task"], other["seed"]) != key]
    write_atomic(BESIDE_TRL, json.dumps([*others, result], indent=1) + "\n")
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
