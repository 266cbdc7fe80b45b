"""Facts of the tasks of a report, whoever attempts them.

tasks, World ──► task_facts ──► instances and kinds by task, expected returns of simple policies
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rllm.environments.world import World, task_content
from rllm.eval.results import CATEGORY, Result, instance_hash, row_of
from rllm.eval.statistics import effective_size
from rllm.types.task import Task, task_id_of

MIN_DISTINCT = 200
"""Instances below which an interval is wider than most differences that one looks for: ±7 points at 50 %."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskFacts:
    """By task id, in the order of the tasks."""

    instances: Mapping[str, str] = field(default_factory=dict[str, str])
    """The instance of each task, up to what changes nothing."""
    kinds: Mapping[str, str] = field(default_factory=dict[str, str])
    """Empty texts where a world has one kind only."""
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Policy -> expected return on each task; empty where nobody knows."""
    trained_on: Collection[str] = ()
    """Tasks that are instances of training tasks, as far as these were looked at."""
    num_train: int = 0
    """Training tasks that the run draws, as far as that is known before it; 0 where nobody trains."""
    num_compared: int = 0
    """The number of those that were compared with the reported ones, the first that come."""

    @property
    def title(self) -> str:
        """The title of the tasks."""
        if not self.trained_on:
            return "held-out tasks"
        if len(self.trained_on) == len(self.instances):
            return "training tasks"
        return f"tasks, {len(self.trained_on)} of them training tasks"

    @property
    def distinct(self) -> int:
        return len(set(self.instances.values()))

    @property
    def effective_size(self) -> float:
        return effective_size(list(self.instances.values()))

    def means(self) -> dict[str, float]:
        """Expected return of each simple policy over all tasks."""
        return {
            policy: sum(returns.values()) / len(returns)
            for policy, returns in self.baselines.items()
            if returns
        }

    def to_dict(self) -> dict[str, Any]:
        """The facts of the tasks in a report, as plain JSON."""
        return {
            "title": self.title,
            "reported": len(self.instances),
            "distinct": self.distinct,
            "effective_size": self.effective_size,
            "trained_on": len(self.trained_on),
            **(
                {"train_tasks": self.num_train, "train_tasks_compared": self.num_compared}
                if self.num_train
                else {}
            ),
        }

    def described(self, results: Sequence[Result]) -> list[Result]:
        """The results with what their tasks are instances of, and their kind as category."""
        return [
            replace(
                result,
                instance=self.instances.get(result.episode.task_id, result.instance),
                category=self.kinds.get(result.episode.task_id) or result.category,
            )
            for result in results
        ]


NO_FACTS = TaskFacts()


def task_facts(
    tasks: Sequence[Task | Mapping[str, Any]], world: World | None = None, *, with_baselines: bool = True
) -> TaskFacts:
    """Facts of `tasks` as their `world` knows them; without one a task is all that it says.

    `with_baselines` is off where somebody else than the world pays, because then its returns are others.
    """
    ids = [task_id_of(task, place) for place, task in enumerate(tasks)]
    rows = [row_of(task) for task in tasks]
    identity = task_content if world is None else world.identity
    kinds = [str(row.get(CATEGORY, "")) if world is None else _kind(world, row) for row in rows]
    expected_returns = (
        world.baselines(rows) if world is not None and world.baselines and with_baselines else {}
    )
    return TaskFacts(
        instances={name: instance_hash(identity(row)) for name, row in zip(ids, rows, strict=True)},
        kinds=dict(zip(ids, kinds, strict=True)),
        baselines={
            policy: dict(zip(ids, map(float, each), strict=True)) for policy, each in expected_returns.items()
        },
    )


def also_in(
    facts: TaskFacts, tasks: Sequence[Task | Mapping[str, Any]], world: World | None = None
) -> list[str]:
    """Those of the facts' tasks, by id, that are instances of one of `tasks`."""
    identity = task_content if world is None else world.identity
    others = {instance_hash(identity(row_of(task))) for task in tasks}
    return [task_id for task_id, instance in facts.instances.items() if instance in others]


def _kind(world: World, row: Mapping[str, Any]) -> str:
    return world.kind(row) or str(row.get(CATEGORY, ""))
