"""Training of workflows: the same loop, with all roles of an attempt on the policies that play them.

AgentWorkflowEngine ──► Workflow.run ──► RolloutEngine ──role──► LocalClient of its policy
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from rllm.config.schema import TrainConfig
from rllm.contracts.contract import Contract
from rllm.distributed import rank_from_environment
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.errors import ConfigError
from rllm.inference.rollout_engine import RoleSettings
from rllm.rendering.chat import ChatRenderer
from rllm.types.names import object_named
from rllm.workflows.workers import OpenWorkers, opened_workers, worker_contracts
from rllm.workflows.workflow import Workflow

WORKFLOW_DEFAULTS: dict[str, Any] = {
    "inference": {"lockstep": False},
    "rollout": {"max_tokens_per_turn": 0},
    "algorithm": {"old_logprobs": "trainer"},
}
"""Where a run of a workflow differs from the defaults of `TrainConfig`. Its calls come from several places at
once, so without lockstep no batch of the engine is ever quite the same: what the trainer says of the tokens
is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkflowPlayer:
    """A workflow, with what each attempt makes it with."""

    workflow_class: type[Workflow]
    workflow_args: Mapping[str, Any]
    open_workers: OpenWorkers | None = None
    """Opens the workers of the workflow that have a model or program of their own."""
    contracts: Mapping[str, Contract] = field(default_factory=dict[str, Contract])
    """The contracts of its workers, by name; see `contracts_of`."""
    kind: ClassVar[Literal["workflow"]] = "workflow"

    async def require_prompt_fits(self, config: TrainConfig, task: Any, renderer: ChatRenderer) -> None:
        """The prompts of a workflow are known once it runs."""

    @asynccontextmanager
    async def open_engine(
        self, config: TrainConfig, clients: Mapping[str, Any], directory: Path
    ) -> AsyncIterator[AgentWorkflowEngine]:
        """See `rllm.trainer.cluster.EpisodePlayer`."""
        from rllm.inference.local.waves import Waves

        rollout = config.rollout
        # Each rank has runs of its own: one process writes a directory of them.
        runs = directory / (f"workers-{rank}" if (rank := rank_from_environment()) else "workers")
        async with opened_workers(self.open_workers, self.contracts, runs) as workers:
            yield AgentWorkflowEngine(
                self.workflow_class,
                self.workflow_args,
                workers=workers,
                contracts=self.contracts,
                n_parallel_tasks=rollout.num_parallel,
                retry_limit=rollout.retry_limit,
                max_failed_fraction=rollout.max_failed_fraction,
                stored=True,
                raise_on_error=False,
                clients=clients,
                roles=_role_settings(config),
                seed=config.seed,
                step_timeout_s=rollout.step_timeout_s,
                episode_timeout_s=rollout.episode_timeout_s,
                wall_timeout_s=rollout.wall_timeout_s or None,
                model_timeout_s=config.inference.model_timeout_s,
                max_workers=rollout.env_workers,
                waves=Waves(clients) if config.inference.lockstep else None,
            )


def workflow_player(
    workflow_class: Any,
    workflow_args: Mapping[str, Any] | None = None,
    open_workers: OpenWorkers | None = None,
) -> WorkflowPlayer:
    """The player of a workflow, with the contracts of its workers. Raises ConfigError for what is no
    workflow."""
    if not (isinstance(workflow_class, type) and issubclass(workflow_class, Workflow)):
        raise ConfigError(
            f"`workflow_class` is {workflow_class!r}; it must be a subclass of rllm.workflows.Workflow."
        )
    return WorkflowPlayer(
        workflow_class=workflow_class,
        workflow_args=dict(workflow_args or {}),
        open_workers=open_workers,
        contracts=contracts_of(workflow_class),
    )


def contracts_of(workflow_class: type[Workflow]) -> dict[str, Contract]:
    """The contracts of its workers, by name. The files that do their work are imported, so that they are
    there wherever the class is: on nodes of a cluster that have no files of the driver's."""
    contracts = worker_contracts(workflow_class)
    for contract in contracts.values():
        actor = contract.binding.actor
        if actor.rpartition(":")[0].endswith(".py"):
            object_named(str(Path(contract.source).parent / actor), group="", what="program")
    return contracts


def _role_settings(config: TrainConfig) -> dict[str, RoleSettings]:
    """Settings of the roles that are configured, and of those that bear the name of a policy."""
    settings: dict[str, RoleSettings] = {}
    for name in {**config.roles, **config.policies}:
        role = config.role(name)
        settings[name] = RoleSettings(
            policy=config.policy_of(name),
            temperature=role.temperature or None,
            max_tokens=role.max_tokens or None,
            history=role.history,
        )
    return settings
