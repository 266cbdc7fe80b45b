"""Training of programs: the same loop, with a gateway in this process between the program and the engine.

TracedEngine ──► program ──HTTP──► Gateway ──► LocalPolicy ──► LocalClient (the weights that are trained)
"""

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rllm.config.schema import TrainConfig
from rllm.distributed import rank_from_environment, world_size
from rllm.engine.settings import silence_limit_s
from rllm.engine.traced import Program, TracedEngine
from rllm.errors import MissingExtraError
from rllm.inference.client import TokenClient
from rllm.rendering.chat import ChatRenderer

if TYPE_CHECKING:
    from rllm.gateway.server import Gateway
    from rllm.types.wire import Policy

PROGRAM_DEFAULTS: dict[str, Any] = {
    "inference": {"lockstep": False},
    "rollout": {"max_tokens_per_turn": 0},
}
"""Where a run of a program differs from the defaults of `TrainConfig`."""

_LEDGER = "gateway"
"""Directory of a gateway's ledger within the run's, while it works."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ProgramPlayer:
    """A program that plays the episodes."""

    program: Program
    kind: ClassVar[Literal["program"]] = "program"

    async def require_prompt_fits(self, config: TrainConfig, task: Any, renderer: ChatRenderer) -> None:
        """The prompts of a program are known once it runs."""

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
                wall_timeout_s=rollout.wall_timeout_s or None,
                model_timeout_s=silence_limit_s([client], config.inference.model_timeout_s),
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
