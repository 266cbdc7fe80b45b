"""Tokens per second of what stands between episodes and the first forward pass, on one core.

    episodes ──► groups, advantages ──► rows ──► weights, micro-batches ──► (the model)
                 each estimator, too                └─ beside the fewest that could hold the tokens

    python benchmarks/algorithms.py [--quick] [--json]

Lengths are drawn from lognormal distributions, as those of reasoning models and agents are: a few answers are
many times as long as the median. Only tokens that are trained on are counted, though prompts and observations
are read and packed as well. Seconds are CPU seconds of this process with one thread, medians over the rounds,
so a busy neighbour costs little.

The bound of packing is the number of micro-batches that would do if rows could be cut anywhere: ⌈tokens /
budget⌉. A prompt that a group shares counts once in each of the micro-batches that the group's own tokens
would fill alone.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from rllm.algorithms.estimators import ESTIMATORS
from rllm.algorithms.grouping import group_advantages, group_episodes
from rllm.algorithms.losses import token_weights
from rllm.algorithms.returns import gae, whiten
from rllm.models.batching import micro_batches
from rllm.models.packing import WeightedRow, packed_trees
from rllm.trainer.samples import training_batch
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.messages import ModelOutput
from rllm.types.sample import NOT_SAMPLED, TrainingBatch, TrainingSample

TOKENS_PER_S, OF_BOUND = 2e6, 0.99
"""The targets, of the whole pipeline on one core and of packing."""
BUDGETS = (8_192, 32_768)
"""Tokens of a micro-batch."""
VOCABULARY = 30_000


@dataclass(kw_only=True, slots=True, frozen=True)
class Shape:
    """What a step looks like; lengths are medians of what is drawn."""

    name: str
    tasks: int
    group_size: int = 8
    prompt: int = 256
    turns: int = 1
    answer: int
    observation: int = 0
    spread: float
    """Standard deviation of the logarithm of a length."""
    longest: int


SHAPES = (
    Shape(name="one answer", tasks=64, answer=300, spread=0.9, longest=4_096),
    Shape(name="long thoughts", tasks=24, answer=1_000, spread=1.2, longest=7_500),
    Shape(name="agents", tasks=64, turns=6, answer=100, observation=100, spread=0.8, longest=1_000),
)


def turns_of(shape: Shape, rng: np.random.Generator) -> list[int]:
    """Tokens of each answer of an attempt."""

    def length(median: int, longest: int) -> int:
        return int(np.clip(rng.lognormal(math.log(median), shape.spread), 1, longest))

    num_turns = length(shape.turns, 4 * shape.turns) if shape.turns > 1 else 1
    return [length(shape.answer, shape.longest) for _ in range(num_turns)]


def episodes_of(shape: Shape) -> list[Episode]:
    rng = np.random.default_rng(0)
    episodes: list[Episode] = []
    for task in range(shape.tasks):
        prompt = rng.integers(VOCABULARY, size=shape.prompt).tolist()
        for attempt in range(shape.group_size):
            context_ids, steps = prompt, list[Step]()
            for num_tokens in turns_of(shape, rng):
                step = Step(reward=float(rng.integers(2)), observation=f"room {rng.integers(4)}")
                step.record_output(
                    ModelOutput(
                        prompt_ids=context_ids,
                        completion_ids=rng.integers(VOCABULARY, size=num_tokens).tolist(),
                        logprobs=rng.normal(-1.0, 0.5, size=num_tokens).tolist(),
                        policy_versions=[3] * num_tokens,
                    )
                )
                steps.append(step)
                observation_ids = rng.integers(VOCABULARY, size=shape.observation).tolist()
                context_ids = step.prompt_ids + step.response_ids + observation_ids
            episodes.append(
                Episode(
                    task_id=f"task-{task}",
                    rollout_idx=attempt,
                    outcome=Outcome.SCORED,
                    trajectories=[Trajectory(steps=steps, reward=sum(step.reward for step in steps))],
                )
            )
    return episodes


def long_rows(shape: Shape) -> list[TrainingSample]:
    """Rows as long as those of a step four times as large: all that packing looks at."""
    rng = np.random.default_rng(1)
    samples: list[TrainingSample] = []
    for task in range(4 * shape.tasks):
        for attempt in range(shape.group_size):
            answers = turns_of(shape, rng)
            num_tokens = shape.prompt + sum(answers) + shape.observation * (len(answers) - 1)
            ids_T = np.zeros(num_tokens, dtype=np.int64)
            ids_T[shape.prompt] = attempt
            zeros_T = np.zeros(num_tokens, dtype=np.float32)
            samples.append(
                TrainingSample(
                    token_ids_T=ids_T,
                    policy_versions_T=np.where(np.arange(num_tokens) < shape.prompt, NOT_SAMPLED, 3),
                    logprobs_T=zeros_T,
                    advantages_T=zeros_T,
                    group_key=(f"task-{task}", "agent"),
                    order_key=(f"task-{task}", attempt, 0, 0),
                )
            )
    return samples


def advantages_of(episodes: list[Episode], estimator: str, **options: Any) -> dict[str, Any]:
    groups, counts = group_episodes(episodes)
    baselines = dict.fromkeys(groups, 0.5) if ESTIMATORS[estimator].needs_greedy else {}
    return group_advantages(groups, lambda role: estimator, counts, baselines=baselines, **options)


def rows_of(episodes: list[Episode], advantages: dict[str, Any]) -> TrainingBatch:
    return training_batch(episodes, advantages)


def weighted(samples: list[TrainingSample]) -> list[WeightedRow]:
    weights = token_weights(samples, "token_mean")
    return [
        WeightedRow(index=index, sample=sample, weights_T=weights_T)
        for index, (sample, weights_T) in enumerate(zip(samples, weights, strict=True))
    ]


def packed(samples: list[TrainingSample], budget: int) -> None:
    for _ in micro_batches(weighted(samples), budget, torch.device("cpu")):
        pass


def with_critic(samples: list[TrainingSample], values: list[Any]) -> None:
    """GAE and whitening of rows, which are whole attempts here."""
    factors = []
    for sample, values_T in zip(samples, values, strict=True):
        assert sample.rewards_T is not None
        is_trained_T = sample.trainable_T
        factors.append(gae(sample.rewards_T[is_trained_T], values_T[is_trained_T], gamma=1.0, lam=0.95)[0])
    whiten(factors)


def cpu_s(work: Callable[[], Any], rounds: int) -> float:
    """Median CPU seconds of a round; the first one, which warms up, does not count."""
    work()
    seconds: list[float] = []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    episodes = episodes_of(shape)
    advantages = advantages_of(episodes, "grpo")
    batch = rows_of(episodes, advantages)
    samples = batch.samples
    num_tokens = batch.token_counts["trained"]
    values = [np.zeros(sample.num_tokens, dtype=np.float32) for sample in samples]
    lengths = [sample.num_trainable for sample in samples]
    stages = {
        "advantages": cpu_s(lambda: advantages_of(episodes, "grpo"), rounds),
        "rows": cpu_s(lambda: rows_of(episodes, advantages), rounds),
        "packing": cpu_s(lambda: packed(samples, BUDGETS[0]), rounds),
    }
    estimators = {name: cpu_s(lambda name=name: advantages_of(episodes, name), rounds) for name in ESTIMATORS}
    estimators["gae"] += cpu_s(lambda: with_critic(samples, values), rounds)
    estimators["grpo, credit of turns"] = cpu_s(
        lambda: advantages_of(episodes, "grpo", gamma=0.9, credit="turn"), rounds
    )
    return {
        "shape": shape.name,
        "trained_tokens": num_tokens,
        "row_tokens": sum(sample.num_tokens for sample in samples),
        "turns": sum(len(each.trajectories[0].steps) for each in episodes),
        "longest_by_median": max(lengths) / statistics.median(lengths),
        "stages_cpu_s": stages,
        "estimators_cpu_s": estimators,
        "tokens_per_s": num_tokens / sum(stages.values()),
    }


def packing(shape: Shape) -> list[dict[str, Any]]:
    """Of rows that share their prompts within a group, as in reinforcement learning, and of rows alone."""
    samples = long_rows(shape)
    rows = weighted(samples)
    alone = sum(sample.num_tokens - 1 for sample in samples)  # the last token predicts nothing
    shared = shape.prompt - 1  # the token that predicts the first answer is computed for each attempt
    own: Counter[tuple[str, str]] = Counter()
    for sample in samples:
        own[sample.group_key] += sample.num_tokens - 1 - shared
    return [
        packing_of(rows, budget, once, least, share)
        for budget in BUDGETS
        for once, least, share in (
            (
                sum(own.values()) + shared * len(own),
                sum(each + shared * math.ceil(each / (budget - shared)) for each in own.values()),
                True,
            ),
            (alone, alone, False),
        )
    ]


def packing_of(rows: list[WeightedRow], budget: int, once: int, least: int, share: bool) -> dict[str, Any]:
    """`once`: tokens where nothing is computed twice; `least`: where no prompt is computed again that need
    not be."""
    batches = packed_trees(rows, budget, share_prefixes=share)
    sizes = [sum(group.num_tokens for group in batch) for batch in batches]
    fewest = math.ceil(least / budget)
    return {
        "shared": share,
        "budget": budget,
        "micro_batches": len(sizes),
        "fewest": fewest,
        "of_bound": fewest / len(sizes),
        "filled": sum(sizes) / (len(sizes) * budget),
        "twice": sum(sizes) / once - 1.0,
    }


def show(results: list[dict[str, Any]]) -> None:
    console = Console(width=150)
    table = Table(title="episodes to micro-batches of 8,192 tokens: million trained tokens per CPU second")
    for name in ("step", "trained tokens", "… of all in rows", "longest / median", "advantages", "rows"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for name in ("packing", "together", "target", "met"):
        table.add_column(name, justify="right")
    for each in results:
        num_tokens = each["trained_tokens"]
        table.add_row(
            each["shape"],
            f"{num_tokens:,}",
            f"{num_tokens / each['row_tokens']:.0%}",
            f"{each['longest_by_median']:.1f}",
            *(f"{num_tokens / seconds / 1e6:.2f}" for seconds in each["stages_cpu_s"].values()),
            f"{each['tokens_per_s'] / 1e6:.2f}",
            f"{TOKENS_PER_S / 1e6:.0f}",
            "yes" if each["tokens_per_s"] >= TOKENS_PER_S else "NO",
        )
    console.print(table)
    console.print(_estimators(results))
    console.print(_packing(results))


def _estimators(results: list[dict[str, Any]]) -> Table:
    table = Table(title="groups and advantages alone: CPU µs per turn")
    table.add_column("estimator")
    for each in results:
        table.add_column(each["shape"], justify="right")
    for name in results[0]["estimators_cpu_s"]:
        table.add_row(
            name, *(f"{each['estimators_cpu_s'][name] / each['turns'] * 1e6:.1f}" for each in results)
        )
    return table


def _packing(results: list[dict[str, Any]]) -> Table:
    table = Table(title="micro-batches of a step four times as large")
    for name in ("step", "prompts", "budget", "micro-batches", "fewest", "of bound", "target", "met"):
        table.add_column(name, justify="left" if name in ("step", "prompts") else "right")
    for name in ("filled", "computed twice"):
        table.add_column(name, justify="right")
    for each in results:
        for row in each["packing"]:
            table.add_row(
                each["shape"],
                "shared" if row["shared"] else "each its own",
                f"{row['budget']:,}",
                str(row["micro_batches"]),
                str(row["fewest"]),
                f"{row['of_bound']:.1%}",
                f"{OF_BOUND:.0%}",
                "yes" if row["of_bound"] >= OF_BOUND else "NO",
                f"{row['filled']:.1%}",
                f"{row['twice']:.1%}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="times a quarter of the tasks, in three rounds")
    parser.add_argument("--json", action="store_true", help="print figures instead of tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    timed = [replace(shape, tasks=shape.tasks // 4) if options.quick else shape for shape in SHAPES]
    results = [
        {**measure(part, 3 if options.quick else 7), "packing": packing(shape)}
        for part, shape in zip(timed, SHAPES, strict=True)
    ]
    if options.json:
        print(json.dumps(results))
    else:
        show(results)


if __name__ == "__main__":
    main()
