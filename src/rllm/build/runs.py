"""A run for each of the three ways to bring an agent.

    agent_run(config, datasets, AgentPlayer(...))         an agent in its environment
    program_run(config, datasets, Program(...))           a program that asks a model over HTTP
    workflow_run(config, datasets, WorkflowPlayer(...))   roles that one or several models play

Each checks the configuration for its way: a key that it would ignore is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rllm.build.agent_player import AgentPlayer
from rllm.build.demonstrations import Demonstrate, DemonstrateRoles
from rllm.build.experts import agent_expert, role_expert
from rllm.build.models import settle_model_names
from rllm.build.program_player import PROGRAM_DEFAULTS, ProgramPlayer
from rllm.build.run_tasks import WorldTasks, as_sequence, run_tasks
from rllm.build.workflow_player import WORKFLOW_DEFAULTS, WorkflowPlayer
from rllm.config.loader import load_config
from rllm.config.policies import RoleConfig
from rllm.config.schema import TrainConfig
from rllm.engine.traced import Program
from rllm.environments.world import World
from rllm.errors import ConfigError
from rllm.tracking.base import Tracker
from rllm.trainer.backends.named import require_backend
from rllm.trainer.cluster import require_cluster
from rllm.trainer.defaults import KeyChoice, settle_defaults
from rllm.trainer.run import Expert, RunTasks, TrainingRun
from rllm.types.callables import name_of
from rllm.types.task import tasks_of

ConfigSource = TrainConfig | Mapping[str, Any] | str | Path | Iterable[str] | None
"""Whatever `load_config` reads."""
_NOT_FOR_PROGRAMS = {
    "rollout.max_turns": "a program decides itself how often it asks the model",
    "rollout.env_workers": "programs have threads of their own",
    "algorithm.gamma": "no advantage is discounted; set `algorithm.credit`",
    "task.environment_args": "a program's tasks are rows of its dataset",
    "task.train_args": "a program's tasks are rows of its dataset",
    "task.agent_args": "a program gets its task and nothing else",
    "task.num_train_tasks": "a program's tasks are rows of its dataset",
    "evaluation.split": "a program's held-out tasks are those of `val_dataset`",
}
_NOT_FOR_WORKFLOWS = {
    "rollout.max_turns": "a workflow decides itself how often it asks the model",
    "algorithm.gamma": "no advantage is discounted; set `algorithm.credit`",
    "task.environment_args": "a workflow gets its tasks as they are",
    "task.train_args": "a workflow gets its tasks as they are",
    "task.agent_args": "a workflow gets `workflow_args`",
    "task.num_train_tasks": "a workflow's tasks are those of `train_dataset`",
    "evaluation.split": "a workflow's held-out tasks are those of `val_dataset`",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class RunDatasets:
    """The tasks that a run is given; see `rllm.build.run_tasks.run_tasks`."""

    train: Sequence[Any]
    heldout: Sequence[Any] | None = None
    validation: Sequence[Any] | None = None

    def tasks(
        self,
        config: TrainConfig,
        to_tasks: Callable[[Sequence[Any]], Sequence[Any]] = as_sequence,
        world: World | None = None,
        *,
        pays: bool = False,
    ) -> WorldTasks:
        heldout, validation = (
            None if rows is None else to_tasks(rows) for rows in (self.heldout, self.validation)
        )
        return run_tasks(config, to_tasks(self.train), heldout, validation, world, pays=pays)


@dataclass(kw_only=True, slots=True, frozen=True)
class RunOptions:
    """Settings that runs of all three ways have."""

    output: Path
    """The run directory."""
    tracker: Tracker | None = None
    """Where numbers go as well as to `metrics.jsonl` and the screen."""
    backend: str = ""
    """As the key of that name, which it is where empty."""
    assignments: Sequence[str] = ()
    """Keys that win over the configuration, each as `section.key=value`."""
    estimators: Mapping[str, str] | None = None
    """role -> advantage estimator, as `roles.ROLE.estimator`."""
    make: Callable[..., TrainingRun] = TrainingRun
    """`TrainingRun`, or what is made in its place with the same arguments."""

    def settle(
        self, config: TrainConfig, *, plays_agent: bool, has_expert: bool
    ) -> tuple[TrainConfig, list[KeyChoice]]:
        """Return `config` with these settings, every key that it leaves open chosen for the model, and the
        choices.

        Raises ConfigError for a backend or cluster that cannot honour it.
        """
        backend = [f'backend="{self.backend}"'] if self.backend else []
        config = _with_estimators(load_config(config, [*self.assignments, *backend]), self.estimators or {})
        settle_model_names(config)
        require_cluster(config)
        choices = settle_defaults(
            config, Path(self.output), has_expert=has_expert, is_program=not plays_agent
        )
        require_backend(config, plays_agent=plays_agent)
        return config, choices

    def run(
        self,
        config: TrainConfig,
        player: Any,
        tasks: RunTasks,
        expert: Expert | None,
        choices: list[KeyChoice],
    ) -> TrainingRun:
        """Return what `make` makes of these parts and settings."""
        return self.make(
            config, player, tasks, expert=expert, output=self.output, tracker=self.tracker, choices=choices
        )


def agent_run(
    config: ConfigSource,
    datasets: RunDatasets,
    player: AgentPlayer,
    options: RunOptions,
    *,
    demonstrate: Demonstrate | None = None,
    world: World | None = None,
) -> TrainingRun:
    """A run of an agent in its environment. `demonstrate`: the expert of the warm start. `world`: what knows
    which tasks are one instance, and what simple policies come to."""
    config = load_config(config)
    _require_one_policy(config, "agent_class")
    _require_no_budget(config, "agent_class")
    if config.rollout.max_tokens_per_turn == 0:
        raise ConfigError("`rollout.max_tokens_per_turn` is 0; an agent needs at least 1 to answer with.")
    config, choices = options.settle(config, plays_agent=True, has_expert=demonstrate is not None)
    tasks = datasets.tasks(config, world=world, pays="reward_fn" not in player.env_args)
    expert = None if demonstrate is None else agent_expert(config, demonstrate, player, world)
    return options.run(config, player, tasks, expert, choices)


def program_run(
    config: ConfigSource,
    datasets: RunDatasets,
    program: Program,
    options: RunOptions,
    *,
    demonstrate: Demonstrate | None = None,
    world: World | None = None,
) -> TrainingRun:
    """A run of a program with its evaluator, which asks the model through a gateway of the run; the others as
    of `agent_run`."""
    name = program.flow.name
    config = load_config(config, base={**PROGRAM_DEFAULTS, "task": {"environment": name, "agent": name}})
    _require_no_effect(config, _NOT_FOR_PROGRAMS)
    _require_one_policy(config, "agent_flow")
    if config.inference.lockstep:
        raise ConfigError(
            "`inference.lockstep` is true, but programs may ask several things at a time and think between "
            "as long as they like; set it to false."
        )
    config, choices = options.settle(config, plays_agent=False, has_expert=demonstrate is not None)
    tasks, player = datasets.tasks(config, tasks_of, world), ProgramPlayer(program=program)
    expert = None if demonstrate is None else agent_expert(config, demonstrate, world=world)
    return options.run(config, player, tasks, expert, choices)


def workflow_run(
    config: ConfigSource,
    datasets: RunDatasets,
    player: WorkflowPlayer,
    options: RunOptions,
    *,
    demonstrate: DemonstrateRoles | None = None,
    world: World | None = None,
) -> TrainingRun:
    """A run of a workflow, whose roles are on the policies that play them. `demonstrate`: the expert of all
    roles; `world` as of `agent_run`."""
    name = name_of(player.workflow_class)
    config = load_config(config, base={**WORKFLOW_DEFAULTS, "task": {"environment": name, "agent": name}})
    _require_no_effect(config, _NOT_FOR_WORKFLOWS)
    _require_no_budget(config, "workflow_class")
    config, choices = options.settle(config, plays_agent=False, has_expert=demonstrate is not None)
    tasks = datasets.tasks(config, world=world)
    expert = None if demonstrate is None else role_expert(config, demonstrate)
    return options.run(config, player, tasks, expert, choices)


def _require_no_effect(config: TrainConfig, idle_keys: Mapping[str, str]) -> None:
    """Raises ConfigError for a key that is not at its default and does nothing; `idle_keys`: key -> why."""
    default = TrainConfig()
    for key, why in idle_keys.items():
        if key == "algorithm.gamma" and config.discounts():
            continue
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(default, section), name):
            raise ConfigError(f"`{key}` is {value!r}, which does nothing here: {why}. Leave it out.")


def _require_no_budget(config: TrainConfig, what: str) -> None:
    """Raises ConfigError for a budget of calls where no gateway is between them and the model."""
    for each in fields(config.rollout.budget):
        if value := getattr(config.rollout.budget, each.name):
            raise ConfigError(
                f"`rollout.budget.{each.name}` is {value}, which is for programs; with `{what}` set "
                "`rollout.max_turns`, `rollout.max_tokens_per_turn` or `rollout.episode_timeout_s`."
            )


def _require_one_policy(config: TrainConfig, what: str) -> None:
    """Raises ConfigError for what only the roles of a workflow can have."""
    if len(config.policies) > 1:
        raise ConfigError(
            f"The policies are {', '.join(config.policies)}, but `{what}` is played by one; give a "
            "`workflow_class`, or one policy."
        )
    for role, settings in config.roles.items():
        for name in ("temperature", "max_tokens", "history"):
            if (value := getattr(settings, name)) != getattr(RoleConfig(), name):
                raise ConfigError(
                    f"`roles.{role}.{name}` is {value!r}, but with `{what}` nobody asks the model by role; "
                    "leave it out, or give a `workflow_class`."
                )


def _with_estimators(config: TrainConfig, estimators: Mapping[str, str]) -> TrainConfig:
    """`config` with an advantage estimator for each of these roles. Raises ConfigError for one that has
    another already."""
    for role, estimator in estimators.items():
        estimator_name = config.role(role).estimator
        if estimator_name not in ("", estimator):
            raise ConfigError(
                f"`roles.{role}.estimator` is {estimator_name!r}, but `traj_group_adv_estimator_map` says "
                f"{estimator!r}; give one of them."
            )
    return load_config(config, (f"roles.{role}.estimator={name}" for role, name in estimators.items()))
