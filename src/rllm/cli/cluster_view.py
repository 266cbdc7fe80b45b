"""The work of a run's cluster workers, from its metrics: how fast each sampled, how long it waited."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from rllm.cli.terminal import table

_WORKER = re.compile(r"cluster\.([\w-]+)\.(tokens_per_s|idle_share)")


@dataclass(kw_only=True, slots=True)
class WorkerFacts:
    """Means over the steps that the worker was there for."""

    steps: int
    tokens_per_s: float
    idle_share: float

    @property
    def busy_tokens_per_s(self) -> float:
        """Sampled while it played."""
        busy_share = 1.0 - self.idle_share
        return self.tokens_per_s / busy_share if busy_share > 0.0 else 0.0


@dataclass(kw_only=True, slots=True)
class ClusterFacts:
    """Sums over all training steps of a run."""

    workers: dict[str, WorkerFacts] = field(default_factory=dict[str, WorkerFacts])
    slowest: str = ""
    """The worker that sampled fewest tokens a second while it played."""
    workers_lost: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def cluster_facts(lines: Iterable[Mapping[str, Any]]) -> ClusterFacts | None:
    """The facts in `lines` of metrics.jsonl; None where no episode was played on a cluster."""
    values: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list[float]))
    num_lost: int | None = None
    for line in lines:
        num_lost = line.get("cluster.workers_lost", num_lost)
        for name, value in line.items():
            if match := _WORKER.fullmatch(name):
                values[match[1]][match[2]].append(value)
    if num_lost is None:
        return None
    workers = {
        name: WorkerFacts(
            steps=len(of_worker["tokens_per_s"]),
            tokens_per_s=_mean(of_worker["tokens_per_s"]),
            idle_share=_mean(of_worker["idle_share"]),
        )
        for name, of_worker in values.items()
    }
    speed_of_worker = {name: each.busy_tokens_per_s for name, each in workers.items() if each.tokens_per_s}
    slowest = min(speed_of_worker, key=lambda name: speed_of_worker[name]) if speed_of_worker else ""
    return ClusterFacts(workers=workers, slowest=slowest, workers_lost=num_lost)


def print_cluster(console: Console, cluster: ClusterFacts) -> None:
    console.print(f"\nRollout workers, of which {cluster.workers_lost} were lost", style="bold")
    numbers = ("steps", "tokens/s", "idle", "tokens/s while it plays")
    worker_table = table("worker", *numbers, "", right=numbers)
    for name, each in cluster.workers.items():
        worker_table.add_row(
            name,
            str(each.steps),
            f"{each.tokens_per_s:,.0f}",
            f"{each.idle_share:.0%}",
            f"{each.busy_tokens_per_s:,.0f}",
            "slowest" if name == cluster.slowest else "",
        )
    console.print(worker_table)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
