"""A configuration in, a run out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from rllm.agents.named import agent_named
from rllm.build.actors import agent_class_named, program_named
from rllm.build.agent_player import AgentPlayer
from rllm.build.distillation import prompt_run
from rllm.build.judges import judge_while_training, split_judging
from rllm.build.rows import BENCHMARK, held_out_rows, mixture_of, training_rows, validation_rows
from rllm.build.run_tasks import VALIDATION_TRIES
from rllm.build.runs import RunDatasets, RunOptions, agent_run, program_run, workflow_run
from rllm.build.workflow_player import workflow_player
from rllm.config.distill import PROMPTS
from rllm.config.schema import TrainConfig
from rllm.data.mixture import SOURCE
from rllm.data.task_arguments import argument_mixtures
from rllm.engine.traced import Program
from rllm.environments.world import World
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.judging import as_reward_fn, failing_alone, task_evaluator
from rllm.eval.tasks import benchmark_world, world_of
from rllm.files.jsonl import read_jsonl
from rllm.integrations.task_program import PAYS_ITSELF
from rllm.integrations.task_programs import is_task_program
from rllm.rewards.evaluator import Evaluator, as_evaluator
from rllm.trainer.distill import DistillationRun
from rllm.trainer.run import TrainingRun
from rllm.types.episode import Episode
from rllm.workflows.workers import OpenWorkers

VALIDATION_START = 1_000_000
"""Validation tasks while training come from here on, so that they are not those of
`evaluation.split = "validation"`."""


def build_run(
    config: TrainConfig,
    output: Path,
    *,
    open_workers: OpenWorkers | None = None,
) -> TrainingRun:
    """A run of the environment and agent, or the program, that the configuration names. `open_workers` runs
    the workers that a workflow calls."""
    if config.task.program:
        return _program_run(config, output, open_workers)
    if config.task.environment == PROMPTS:
        return _prompt_run(config, output)
    world, agent_class = world_of(config.task.environment), agent_class_named(config.task.agent)
    judging, task_args = split_judging(config.task.environment_args)
    pays = judge_while_training(config.task.environment, judging)
    evaluation = config.evaluation
    num_validation = (
        VALIDATION_TRIES if evaluation.split == "validation" else 1
    ) * evaluation.every_num_tasks
    tasks = DrawnTasks(world, config.task.num_train_tasks, {**task_args, **config.task.train_args})
    train_tasks = tasks if world.draws else tasks.whole()
    expert = world.expert(config.warm_start.expert_args)
    if expert is not None and config.warm_start.steps:  # asked once: what it cannot honour is refused now
        expert(train_tasks[0], config.warm_start.noise, np.random.default_rng(0))
    return agent_run(
        config,
        RunDatasets(
            train=train_tasks,
            heldout=world.tasks(evaluation.split, evaluation.num_tasks, **task_args),
            validation=world.tasks("validation", num_validation, start=VALIDATION_START, **task_args),
        ),
        AgentPlayer(
            agent_class=agent_class,
            env_class=world.env_class,
            agent_args=config.task.agent_args,
            env_args={} if pays is None else {"reward_fn": as_reward_fn(pays)},
        ),
        RunOptions(output=output, make=DistillationRun if config.distill.teacher else TrainingRun),
        demonstrate=expert,
        world=world,
    )


def _program_run(config: TrainConfig, output: Path, open_workers: OpenWorkers | None) -> TrainingRun:
    task, actor, options = config.task, program_named(config.task.program), RunOptions(output=output)
    train = training_rows(task.dataset)
    evaluation, val_name = config.evaluation, task.val_dataset
    datasets = RunDatasets(
        train=train,
        heldout=held_out_rows(val_name, evaluation.num_tasks) if val_name else None,
        validation=validation_rows(val_name, evaluation.every_num_tasks, start=VALIDATION_START)
        if val_name
        else None,
    )
    if actor.workflow is not None:
        if task.evaluator:
            raise ConfigError(
                f"The workflow `{task.program}` pays its own trajectories, so --evaluator {task.evaluator} "
                "would be ignored; leave it out, or call it in the workflow."
            )
        player = workflow_player(actor.workflow, open_workers=open_workers)
        return workflow_run(config, datasets, player, options)
    evaluator = task.evaluator or failing_alone(_evaluator_of(task.dataset))
    return program_run(config, datasets, Program.of(actor.flow, evaluator), options)


def _evaluator_of(dataset: str) -> Evaluator:
    """The evaluator of a program where none was named: its library's, the benchmark's world, or each task's
    own grader."""
    if is_task_program(dataset):
        return PAYS_ITSELF
    if mixture := mixture_of(dataset):
        return _by_source({name: _evaluator_of(name) for name in mixture})
    world = (
        benchmark_world(benchmark_named(dataset.removeprefix(BENCHMARK)))
        if dataset.startswith(BENCHMARK)
        else None
    )
    return task_evaluator() if world is None or world.evaluator is None else as_evaluator(world.evaluator)


def _by_source(evaluators: Mapping[str, Evaluator]) -> Evaluator:
    """Judges each task as the data set does that it is of."""

    def judge(task: Mapping[str, Any], episode: Episode) -> Any:
        return evaluators[task[SOURCE]].evaluate(task, episode)

    return Evaluator(judge, "the data sets' graders")


def _prompt_run(config: TrainConfig, output: Path) -> TrainingRun:
    task = config.task
    if not task.dataset:
        raise ConfigError("`task.dataset` is empty; set it to a JSONL file of prompts.")
    return prompt_run(
        config,
        RunDatasets(
            train=read_jsonl(Path(task.dataset)),
            heldout=read_jsonl(Path(task.val_dataset)) if task.val_dataset else None,
        ),
        RunOptions(output=output),
        agent_class=agent_named(task.agent),
        agent_args=task.agent_args,
    )


class DrawnTasks(Sequence[dict[str, Any]]):
    """`count` training tasks of a world, each made when somebody looks at it, with the arguments that it was
    made with. Arguments that are lists are gone through in turn, one value per task."""

    def __init__(self, world: World, count: int, task_args: Mapping[str, Any]) -> None:
        self._world = world
        self._count = count
        self._mixtures = argument_mixtures(task_args)
        self._each = -(-count // len(self._mixtures))
        for family in range(len(self._mixtures)):  # what cannot be made is refused now
            self._draw(family, 0, 1)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._count))]
        place, family = divmod(range(self._count)[index], len(self._mixtures))
        return self._draw(family, family * self._each + place, 1)[0]

    def whole(self) -> list[dict[str, Any]]:
        """All at once: quicker where one asks for all, and shorter where there are no more rows."""
        families = [
            self._draw(family, family * self._each, self._each) for family in range(len(self._mixtures))
        ]
        return [task for turn in zip(*families, strict=True) for task in turn][: self._count]

    def _draw(self, family: int, start: int, count: int) -> list[dict[str, Any]]:
        mixture = self._mixtures[family]
        return [{**mixture, **task} for task in self._world.tasks("train", count, start=start, **mixture)]
