"""Names in, objects out: the one file that knows which class a name in a configuration stands for."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllm.agents.base import BaseAgent
from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.base import BaseEnv
from rllm.environments.frozenlake import FrozenLakeEnv, demonstration, lake_tasks
from rllm.errors import ConfigError, MissingExtraError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.evaluate import evaluate
from rllm.store.run_directory import RunDirectory, is_run
from rllm.tracking.base import Tracker
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.warm_start import Demonstrate
from rllm.types.episode import Episode
from rllm.types.messages import SamplingParams

VALIDATION_START = 1_000_000
"""Validation tasks while training come from here on, so that they are not those of
`evaluation.split = "validation"`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class World:
    """An environment by name: its class, its tasks and its expert."""

    env_class: type[BaseEnv]
    tasks: Callable[..., list[dict[str, Any]]]
    """(split, count, *, start, **task arguments) -> tasks."""
    demonstrate: Demonstrate | None


def _lake_expert(task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[tuple[str, str]]:
    return demonstration(task, noise=noise, rng=rng)


WORLDS = {"frozenlake": World(env_class=FrozenLakeEnv, tasks=lake_tasks, demonstrate=_lake_expert)}
AGENTS: dict[str, type[BaseAgent]] = {"frozenlake": FrozenLakeAgent}


def training_config(
    benchmark: str, path: Path | None = None, assignments: tuple[str, ...] = (), seed: int | None = None
) -> TrainConfig:
    """The benchmark's own configuration, then the file, then `seed`, then the assignments."""
    spec = benchmark_named(benchmark)
    named = {
        "task": {
            "environment": spec.environment,
            "agent": spec.agent,
            "environment_args": spec.task,
            "train_args": spec.train_task,
        }
    }
    extra = () if seed is None else (f"seed={seed}",)
    return load_config(path, (*extra, *assignments), base={**spec.train, **named})


def build_trainer(config: TrainConfig, output: Path, tracker: Tracker | None = None) -> AgentTrainer:
    """A trainer for the environment and agent that the configuration names."""
    world, agent_class = _world_named(config.task.environment), _agent_named(config.task.agent)
    task_args = config.task.environment_args
    evaluation = config.evaluation
    return AgentTrainer(
        config,
        train_dataset=_mixed_tasks(
            world, config.task.num_train_tasks, {**task_args, **config.task.train_args}
        ),
        val_dataset=world.tasks(evaluation.split, evaluation.num_tasks, **task_args),
        validation_dataset=world.tasks(
            "validation", evaluation.every_num_tasks, start=VALIDATION_START, **task_args
        ),
        agent_class=agent_class,
        env_class=world.env_class,
        agent_args=config.task.agent_args,
        demonstrate=world.demonstrate,
        output=output,
        tracker=tracker,
    )


def model_directory(path: Path) -> Path:
    """The model that `--model` means: a run's trained model, or a model directory itself."""
    if not is_run(path):
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is neither a run nor a model directory (it has no config.json).")
        return path
    model = RunDirectory.read(path).model_path
    if not model.is_dir():
        raise ConfigError(f"The run {path} has no trained model yet; let `rllm train` finish it first.")
    return model


async def evaluate_model(
    benchmark: str,
    model: Path,
    *,
    num_tasks: int = 256,
    split: str = "test",
    seed: int = 0,
    threads: int = 0,
    on_episode: Callable[[Episode], None] = lambda episode: None,
) -> dict[str, dict[str, Any]]:
    """`sampled` (at temperature 1) and `greedy` reports on a benchmark's held-out tasks, on the built-in
    engine.

    `model` is a run or a model directory. A run is measured on tasks like those that it was trained for, such
    as lakes of its size; a model directory on the benchmark's own.
    """
    try:
        from rllm.inference.local.client import LocalClient
        from rllm.models.devices import use_threads
        from rllm.models.directory import load_model
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    config = training_config(benchmark)
    if is_run(model):
        trained_with = load_config(RunDirectory.read(model).config())
        if trained_with.task.environment == config.task.environment:
            config = trained_with
    world, rollout = _world_named(config.task.environment), config.rollout
    tasks = world.tasks(split, num_tasks, **config.task.environment_args)
    use_threads(threads)
    client = LocalClient(
        load_model(model_directory(model), device=config.model.device),
        num_slots=config.inference.num_slots,
        max_context=config.inference.max_context,
        max_prefill_tokens=config.inference.max_prefill_tokens,
        lockstep=config.inference.lockstep,
    )
    engine = AgentExecutionEngine(
        _agent_named(config.task.agent),
        world.env_class,
        config.task.agent_args,
        rollout_engine=client,
        n_parallel_agents=rollout.num_parallel,
        max_steps=rollout.max_turns,
        trajectory_timeout=rollout.episode_timeout_s,
        step_timeout_s=rollout.step_timeout_s,
        retry_limit=rollout.retry_limit,
        max_workers=rollout.env_workers,
        seed=seed,
    )
    reports: dict[str, dict[str, Any]] = {}
    try:
        for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            sampling = SamplingParams(temperature=temperature, max_tokens=rollout.max_tokens_per_turn)
            report, _ = await evaluate(engine, tasks, sampling, f"eval/{name}", on_episode)
            reports[name] = report.to_dict()
    finally:
        await client.close()
    return reports


def _mixed_tasks(world: World, count: int, task_args: dict[str, Any]) -> list[dict[str, Any]]:
    """`count` training tasks; arguments that are lists are gone through in turn, one value per task."""
    choices = [value if isinstance(value, list) else [value] for value in task_args.values()]
    mixtures = [dict(zip(task_args, values, strict=True)) for values in itertools.product(*choices)]
    each = -(-count // len(mixtures))
    families = [
        world.tasks("train", each, start=number * each, **mixture) for number, mixture in enumerate(mixtures)
    ]
    return [task for turn in zip(*families, strict=True) for task in turn][:count]


def _world_named(name: str) -> World:
    if name not in WORLDS:
        raise ConfigError(f"There is no environment `{name}`; there are: {', '.join(WORLDS)}.")
    return WORLDS[name]


def _agent_named(name: str) -> type[BaseAgent]:
    if name not in AGENTS:
        raise ConfigError(f"There is no agent `{name}`; there are: {', '.join(AGENTS)}.")
    return AGENTS[name]
