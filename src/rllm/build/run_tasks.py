"""The tasks of a run, each with what all of them share, and what is known of those that are reported.

train, val and validation dataset ──► run_tasks ──► WorldTasks ──► facts: instances, kinds, simple policies,
                                                                        how many are trained on as well
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rllm.algorithms.task_sampler import TaskSampler
from rllm.config.schema import TrainConfig
from rllm.data.task_arguments import argument_mixtures, with_defaults
from rllm.environments.world import World, task_content
from rllm.errors import ConfigError
from rllm.eval.task_facts import TaskFacts, also_in, task_facts
from rllm.types.task import task_id_of

log = logging.getLogger(__name__)

VALIDATION_TRIES = 4
"""Tasks that are looked through for each one that is evaluated while training: reported ones are left out."""
_MAX_COMPARED = 4_096
"""Training tasks of a world, the first that come, that are compared with the reported ones: seconds."""
_MAX_COMPARED_DRAWN = 256
"""The same where an instance has to be drawn to be known, which takes up to 15 ms."""
_NAMED = 5


@dataclass(kw_only=True, slots=True, frozen=True)
class WorldTasks:
    """The tasks of a run, and the world that they are of; see `rllm.trainer.run.RunTasks`."""

    config: TrainConfig
    world: World | None
    train: Sequence[Any]
    heldout: Sequence[Any]
    """Reported before and after."""
    validation: Sequence[Any]
    """Evaluated while training. It may be tuned on, so none of it is reported."""
    pays: bool = False
    """Whether the world pays for the tasks. Simple policies are paid by it, so they are compared with nobody
    whom another judge pays."""

    def facts(self) -> TaskFacts:
        """Facts of the reported tasks. Warns of those that are trained on as well."""
        facts = task_facts(self.heldout, self.world, with_baselines=self.pays)
        count = self._num_compared()
        order = TaskSampler(self.train, seed=self.config.seed, purpose="tasks")
        overlap = also_in(facts, order.batch(0, count), self.world)
        if overlap and len(overlap) < len(facts.instances):
            log.warning(
                "%d of the %d tasks that are to be held out are trained on as well, such as %s: they are "
                "counted and not called held-out. Take them out of either.",
                len(overlap),
                len(facts.instances),
                ", ".join(overlap[:_NAMED]),
            )
        return replace(facts, trained_on=overlap, num_compared=count, num_train=self._num_drawn())

    def validation_facts(self) -> TaskFacts:
        return task_facts(self.validation, self.world, with_baselines=False)

    @property
    def _is_listed(self) -> bool:
        """Whether training tasks are rows, so that all can be looked at."""
        return self.world is None or (self.world.identity is task_content and not self.world.draws)

    def _num_drawn(self) -> int:
        """Training tasks that come up."""
        if self._is_listed:
            return len(self.train)
        quantities = self.config.derived()
        num_reinforced = quantities["groups_per_step"] * self.config.steps
        return min(len(self.train), max(num_reinforced, quantities["demonstrations"]))

    def _num_compared(self) -> int:
        if self.world is None or self._is_listed:
            return len(self.train)
        return min(self._num_drawn(), _MAX_COMPARED_DRAWN if self.world.identity_draws else _MAX_COMPARED)


def run_tasks(
    config: TrainConfig,
    train: Sequence[Any],
    heldout: Sequence[Any] | None,
    validation: Sequence[Any] | None,
    world: World | None,
    *,
    pays: bool = False,
) -> WorldTasks:
    """The tasks of a run. Reported is `heldout`, or the training tasks where there is none; evaluated between
    is `validation`, or the part of `heldout` beyond `evaluation.num_tasks`.

    A task keeps what it says itself and has the rest from `task.environment_args`; training tasks from
    `task.train_args` first. Raises ConfigError where evaluations between are asked for and there is nothing
    to evaluate on.
    """
    evaluation, common_args = config.evaluation, config.task.environment_args
    mixtures = [{**common_args, **mixture} for mixture in argument_mixtures(config.task.train_args)]
    train = with_defaults(train, mixtures)
    candidates = train if heldout is None else with_defaults(heldout, [common_args])
    report_tasks = candidates[: evaluation.num_tasks]
    if validation is not None:
        validation_tasks = with_defaults(validation, [common_args])
    else:
        end = len(report_tasks) + VALIDATION_TRIES * evaluation.every_num_tasks
        validation_tasks = () if heldout is None else candidates[len(report_tasks) : end]
    validation_only = _not_reported(validation_tasks, report_tasks, config, world)[
        : evaluation.every_num_tasks
    ]
    _require_validation(config, validation_only, len(validation_tasks))
    return WorldTasks(
        config=config, world=world, train=train, heldout=report_tasks, validation=validation_only, pays=pays
    )


def as_sequence(tasks: Iterable[Any]) -> Sequence[Any]:
    """As it is: a sequence may make its tasks when they are played."""
    return tasks if isinstance(tasks, Sequence) else list(tasks)


def _not_reported(
    tasks: Sequence[Any], report_tasks: Sequence[Any], config: TrainConfig, world: World | None
) -> Sequence[Any]:
    """Those of `tasks` that are instances of no reported one. Two splits of a world share none."""
    makes_splits = world is not None and world.identity is not task_content
    if not tasks or (makes_splits and config.evaluation.split == "test"):
        return tasks
    instances = set(also_in(task_facts(tasks, world, with_baselines=False), report_tasks, world))
    return [task for place, task in enumerate(tasks) if task_id_of(task, place) not in instances]


def _require_validation(config: TrainConfig, tasks: Sequence[Any], num_given: int) -> None:
    evaluation = config.evaluation
    if tasks or (evaluation.every_steps <= 0 and not evaluation.patience):
        return
    key = "patience" if evaluation.patience else "every_steps"
    lack = f"all {num_given} that there are, are reported" if num_given else "none were given"
    raise ConfigError(
        f"`evaluation.{key}` is {getattr(evaluation, key)}, but there are no validation tasks: {lack}. "
        "Give more held-out tasks (`--val-dataset`) than `evaluation.num_tasks`, which is "
        f"{evaluation.num_tasks}; or `validation_dataset` in Python; or leave the key out."
    )
