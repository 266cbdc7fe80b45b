"""Training of programs: the same loop, with a gateway in this process between the program and the engine.

TracedEngine ──► program ──HTTP──► Gateway ──► LocalPolicy ──► LocalClient (the weights that are trained)
"""

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.config.policies import RoleConfig
from rllm.config.schema import TrainConfig
from rllm.distributed import rank_from_environment, world_size
from rllm.engine.traced import Program, TracedEngine
from rllm.errors import ConfigError, MissingExtraError
from rllm.inference.client import TokenClient

if TYPE_CHECKING:
    from rllm.gateway.server import Gateway
    from rllm.types.wire import Policy

PROGRAM_DEFAULTS: dict[str, Any] = {
    "inference": {"lockstep": False, "max_context": 2048},
    "rollout": {"max_tokens_per_turn": 0},
    "warm_start": {"steps": 0},
}
"""Where a run of a program differs from the defaults of `TrainConfig`."""

_LEDGER = "gateway"
"""Directory of a gateway's ledger within the run's, while it works."""
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


def require_program_config(
    config: TrainConfig, agent_args: Mapping[str, Any] | None, env_args: Mapping[str, Any] | None
) -> None:
    """Raises ConfigError for a key that a run of a program would ignore, or cannot honour."""
    require_no_effect(config, _NOT_FOR_PROGRAMS)
    require_one_policy(config, "agent_flow")
    if config.inference.lockstep:
        raise ConfigError(
            "`inference.lockstep` is true, but programs may ask several things at a time and think between "
            "as long as they like; set it to false."
        )
    for name, arguments in (("agent_args", agent_args), ("env_args", env_args)):
        if arguments:
            raise ConfigError(f"`{name}` is given, but `agent_flow` takes none; put it into the tasks.")


def require_no_effect(config: TrainConfig, idle_keys: Mapping[str, str]) -> None:
    """Raises ConfigError for a key that is not at its default and does nothing; `idle_keys`: key -> why."""
    default = TrainConfig()
    for key, why in idle_keys.items():
        if key == "algorithm.gamma" and config.discounts():
            continue
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(default, section), name):
            raise ConfigError(f"`{key}` is {value!r}, which does nothing here: {why}. Leave it out.")


def require_no_budget(config: TrainConfig, what: str) -> None:
    """Raises ConfigError for a budget of calls where no gateway is between them and the model."""
    for each in fields(config.rollout.budget):
        if value := getattr(config.rollout.budget, each.name):
            raise ConfigError(
                f"`rollout.budget.{each.name}` is {value}, which is for programs; with `{what}` set "
                "`rollout.max_turns`, `rollout.max_tokens_per_turn` or `rollout.episode_timeout_s`."
            )


def require_one_policy(config: TrainConfig, what: str) -> None:
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


@dataclass(kw_only=True, slots=True, frozen=True)
class ProgramPlayer:
    """A program that plays the episodes."""

    program: Program

    @asynccontextmanager
    async def open_engine(
        self, config: TrainConfig, clients: Mapping[str, Any], directory: Path
    ) -> AsyncIterator[TracedEngine]:
        """See `rllm.trainer.cluster.EpisodePlayer`. `directory` holds the gateway's ledger: episodes go to
        the store. Each rank has a gateway of its own."""
        rollout = config.rollout
        (client,) = clients.values()
        policy = local_policy(client, Path(config.model.path).name)
        async with (
            gateway_before(policy, _ledger_of_this_rank(directory)) as gateway,
            TracedEngine(
                self.program.flow,
                self.program.evaluator,
                gateway,
                model=policy.models()[0],
                n_parallel_tasks=rollout.num_parallel,
                episode_timeout_s=rollout.episode_timeout_s,
                evaluator_timeout_s=rollout.step_timeout_s,
                retry_limit=rollout.retry_limit,
                max_failed_fraction=rollout.max_failed_fraction,
                seed=config.seed,
                sets_max_tokens=rollout.max_tokens_per_turn > 0,
                requires_ids=True,
                stored=True,
                budget=rollout.budget,
            ) as engine,
        ):
            yield engine


def _ledger_of_this_rank(directory: Path) -> Path:
    """Rank 0 also removes those of ranks that were killed and do not come again."""
    rank = rank_from_environment()
    if rank:
        return directory / f"{_LEDGER}-{rank}"
    for left in directory.glob(f"{_LEDGER}-*"):
        number = left.name.rpartition("-")[2]
        if number.isdecimal() and int(number) >= world_size():
            shutil.rmtree(left, ignore_errors=True)
    return directory / _LEDGER


def local_policy(client: TokenClient, model: str) -> "Policy":
    """The built-in engine as what answers the gateway's calls."""
    try:
        from rllm.gateway.local import LocalPolicy
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "llguidance", "gateway") from error
    return LocalPolicy(client, model)


@asynccontextmanager
async def gateway_before(policy: "Policy", directory: Path) -> "AsyncIterator[Gateway]":
    """A gateway on a free port of this machine, for sessions that it has opened alone.

    Its ledger is in `directory`, which is emptied first and removed afterwards.
    """
    try:
        from rllm.gateway.server import Gateway
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "gateway") from error
    shutil.rmtree(directory, ignore_errors=True)  # of a process that was killed
    try:
        async with Gateway(policy, directory, require_session=True) as gateway:
            yield gateway
    finally:
        shutil.rmtree(directory, ignore_errors=True)
