"""Training in a world with heavy tails: sampling and learning in turn, beside sampling further steps ahead.

    python benchmarks/asynchronous.py [--tails lognormal,pareto,none] [--ahead 0,1,2,4] [--seeds 0,1,2]
        [--steps 40] [--median-ms 60] [--workers 2] [--quick] [--json]

The world answers a turn after a wait that is drawn from its task and turn: log-normal (sigma 1), Pareto
(alpha 1.1) or none, cut at 20 times the median; waiting takes no processor. Model, inference and updates are
real: the built-in model imitates a bad speller, then learns to say the letter that it is asked for. All runs
of a seed play the same tasks in the same steps. Printed are updates and episodes a second by wall clock,
beside those of the run in turn; how often the last eight steps were right, by the same number of episodes;
and the seconds until three in four answers were. With `--workers` so many workers of a Ray cluster on this
machine play (extra `ray`).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rllm.agents.conversation import ConversationAgent
from rllm.environments.base import BaseEnv
from rllm.tracking.console import LiveView
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types.draws import draw_seed

LETTERS = "ABCDEFGHIJKLMNOP"
TURNS = 3
CUT = 20.0
"""Times the median that a wait has at most."""
LAST = 8
"""Steps whose success is reported."""
GOAL = 0.75


def wait_of(tail: str, median_s: float, *key: Any) -> float:
    """Seconds that the world takes for a turn."""
    rng = np.random.default_rng(draw_seed(*key))
    if tail == "none":
        return 0.0
    times = float(np.exp(rng.normal())) if tail == "lognormal" else (0.5 / rng.random()) ** (1 / 1.1)
    return median_s * min(CUT, times)


class SlowSpelling(BaseEnv):
    """Asks for a letter, `TURNS` times; each turn that is right pays its part, after a wait."""

    def __init__(self, letters: str, name: int, tail: str, median_s: float) -> None:
        self.letters, self.name, self.tail, self.median_s = letters, name, tail, median_s
        self.turn = 0
        self.attempt = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn, self.attempt = 0, seed or 0
        return self.letters[0], {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(wait_of(self.tail, self.median_s, self.name, self.attempt, self.turn))
        is_right = action[:1] == self.letters[self.turn]
        self.turn += 1
        over = self.turn == TURNS
        return "" if over else self.letters[self.turn], is_right / TURNS, over, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "SlowSpelling":
        return SlowSpelling(info["letters"], info["name"], info["tail"], info["median_s"])


def demonstrate(task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[tuple[str, str]]:
    return [
        (letter, LETTERS[rng.integers(len(LETTERS))] if rng.random() < noise else letter)
        for letter in task["letters"]
    ]


def tasks(count: int, tail: str, median_s: float) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "task_id": f"spell-{name}",
            "letters": "".join(rng.choice(list(LETTERS), TURNS)),
            "name": name,
            "tail": tail,
            "median_s": median_s,
        }
        for name in range(count)
    ]


def settings(ahead: int, seed: int, steps: int, workers: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "steps": steps,
        "threads": 1,
        "inference": {"lockstep": False, "max_context": 128, "num_slots": 512},
        "rollout": {
            "tasks_per_step": 8,
            "group_size": 8,
            "max_turns": TURNS,
            "max_tokens_per_turn": 2,
            "num_parallel": 512,
            "env_workers": 512,
        },
        "schedule": {"kind": "async", "max_staleness": ahead} if ahead else {},
        "cluster": {"kind": "ray", "workers": workers, "lease_episodes": 64 // workers} if workers else {},
        "algorithm": {"updates_per_step": 1},
        "optimizer": {"learning_rate": 5e-4},
        "warm_start": {"steps": 30, "noise": 0.6, "episodes_per_step": 32},
        "evaluation": {"num_tasks": 1, "every_steps": 0},
        "checkpoint": {"every_steps": steps},
    }


def measure(tail: str, ahead: int, seed: int, options: argparse.Namespace) -> dict[str, float | None]:
    """One run: its pace, and what it learned."""
    steps, median_s = options.steps, options.median_ms / 1_000
    with tempfile.TemporaryDirectory() as folder:
        trainer = AgentTrainer(
            config=settings(ahead, seed, steps, options.workers),
            train_dataset=tasks(4_096, tail, median_s),
            val_dataset=tasks(1, "none", 0.0),
            agent_class=ConversationAgent,
            env_class=SlowSpelling,
            demonstrate=demonstrate,
            tracker=LiveView(steps, console=Console(quiet=True)),
            output=Path(folder) / "run",
        )
        trainer.train()
        lines = list(read_metrics(Path(folder) / "run" / "metrics.jsonl"))
    train = [each for each in lines if each["phase"] == "train"]
    before_s = max(each["run_s"] for each in lines if each["phase"] == "before")
    rewards = [each["reward_mean"] for each in train]
    smooth = [statistics.fmean(rewards[max(0, place - 3) : place + 1]) for place in range(len(rewards))]
    reached = [each["run_s"] - before_s for each, mean in zip(train, smooth, strict=True) if mean >= GOAL]
    elapsed_s = train[-1]["run_s"] - before_s
    return {
        "updates_per_s": len(train) / elapsed_s,
        "episodes_per_s": sum(each["episodes"] for each in train) / elapsed_s,
        "success": statistics.fmean(rewards[-LAST:]),
        "seconds_to_goal": reached[0] if reached else None,
        "trainer_idle": statistics.fmean(
            each.get("trainer_idle", each["rollout_s"] / each["step_s"]) for each in train
        ),
        "staleness_mean": statistics.fmean(each.get("staleness_mean", 0.0) for each in train),
        "staleness_max": max(each.get("staleness_max", 0.0) for each in train),
    }


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a tail and number of steps ahead: medians over the seeds; seeds in turn, so that a busy moment
    slows all alike."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    plan = [
        (tail, ahead, seed) for seed in options.seeds for tail in options.tails for ahead in options.ahead
    ]
    for tail, ahead, seed in track(plan, "runs", console=Console(stderr=True)):
        figures = measure(tail, ahead, seed, options)
        runs.setdefault((tail, ahead), []).append(figures)
    rows: list[dict[str, Any]] = []
    for (tail, ahead), of_seeds in runs.items():
        base = runs[tail, options.ahead[0]]
        faster = [
            mine["updates_per_s"] / other["updates_per_s"] for mine, other in zip(of_seeds, base, strict=True)
        ]
        medians = {name: median([each[name] for each in of_seeds]) for name in of_seeds[0]}
        successes = [round(each["success"], 3) for each in of_seeds]
        rows.append(
            {
                "tail": tail,
                "ahead": ahead,
                "times": statistics.median(faster),
                **medians,
                "of_seeds": successes,
            }
        )
    return rows


def median(values: Sequence[float | None]) -> float | None:
    """None where a value is missing: nobody knows how large it would be."""
    known = [each for each in values if each is not None]
    return statistics.median(known) if len(known) == len(values) else None


def table_of(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.steps} steps of 64 episodes, median wait {options.median_ms:g} ms a turn")
    for name in (
        "tail",
        "steps ahead",
        "updates/s",
        "times in turn",
        "bound",
        "episodes/s",
        "right at the end",
        "s to 75 %",
        "trainer idle",
        "staleness, mean (most)",
    ):
        table.add_column(name, justify="left" if name == "tail" else "right")
    for row in rows:
        table.add_row(
            row["tail"],
            str(row["ahead"]),
            f"{row['updates_per_s']:.2f}",
            f"{row['times']:.2f}",
            str(row["ahead"] + 1),
            f"{row['episodes_per_s']:,.0f}",
            f"{row['success']:.1%}",
            "" if row["seconds_to_goal"] is None else f"{row['seconds_to_goal']:.0f}",
            f"{row['trainer_idle']:.0%}",
            f"{row['staleness_mean']:.2f} ({row['staleness_max']:.0f})",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    numbers = lambda text: [int(each) for each in text.split(",")]  # noqa: E731
    parser.add_argument("--tails", type=lambda text: text.split(","), default=["lognormal", "pareto", "none"])
    parser.add_argument("--ahead", type=numbers, default=[0, 1, 2, 4], help="the first is compared with")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--median-ms", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=0, help="0 plays in the trainer's process")
    parser.add_argument("--quick", action="store_true", help="one seed, one tail, in turn and two ahead")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.tails, options.ahead, options.seeds = ["pareto"], [0, 2], [0]
    rows = compare(options)
    if options.json:
        print(json.dumps(rows))
    else:
        Console(width=140).print(table_of(rows, options))


if __name__ == "__main__":
    main()
