"""Workers of a cluster that play a run's episodes, as the trainer sees them.

    tasks ──► ClusterEngine ──leases──► workers, an engine and the weights each ──► episodes
                   ▲ weights, once per policy version, whenever `run` or `score` finds new ones
              of several ranks, rank 0 has it, and hands all of them what it plays

Which cluster a run has is `cluster.kind`: `local` is none, every other name an entry point of the group
`rllm.clusters`. The trainer imports none of them.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from rllm.config.cluster import NO_CLUSTER, ClusterConfig
from rllm.config.distributed import HERE
from rllm.config.schema import LOCAL, TrainConfig
from rllm.distributed import RankGroup
from rllm.distributed.launch import RankStarter, ranks_here
from rllm.engine.attempts import EpisodeEngine
from rllm.engine.split import SplitEngine, WriterEngine
from rllm.errors import ConfigError
from rllm.rendering.chat import ChatRenderer
from rllm.store.encoding import EncodedEpisodes
from rllm.types.names import object_named

if TYPE_CHECKING:
    from rllm.inference.local.client import LocalClient
    from rllm.trainer.samplers import PolicyClient


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutJob:
    """The data that workers need to play a run's episodes."""

    config: TrainConfig
    player: "EpisodePlayer"
    models: Mapping[str, Any]
    """policy -> `LoadedModel`; the trainer changes the parameters of those that learn in place."""
    clients: Mapping[str, "LocalClient"]
    """Clients of those models in this process, which are told what is published."""
    directory: Path
    """The directory of the run."""

    def learning_models(self) -> dict[str, Any]:
        """policy -> the model whose parameters change, of the policies that learn."""
        policies = self.config.named_policies
        return {name: each.model for name, each in self.models.items() if policies[name].trainable}

    def policy_versions(self) -> dict[str, int]:
        """The versions of those parameters as they were last published, by policy."""
        return {name: client.policy_version for name, client in self.clients.items()}

    @contextmanager
    def between_publishes(self) -> Iterator[None]:
        """Nothing is published while the block runs: parameters and versions belong together."""
        with ExitStack() as stack:
            for client in self.clients.values():
                stack.enter_context(client.engine.between_steps())
            yield


class EpisodePlayer(Protocol):
    """An agent in its environment, a program, or a workflow. Can be pickled."""

    kind: ClassVar[Literal["agent", "program", "workflow"]]

    async def require_prompt_fits(self, config: TrainConfig, task: Any, renderer: ChatRenderer) -> None:
        """Raises ConfigError when the context cannot even hold the first prompt of a task and its answer,
        where that is known before it plays."""
        ...

    def open_engine(
        self, config: TrainConfig, clients: Mapping[str, Any], directory: Path
    ) -> AbstractAsyncContextManager[EpisodeEngine]:
        """The engine that plays while the block runs.

        `clients`: policy -> `TokenClient`, a `LocalClient` where `inference.lockstep` is true. `directory`
        holds files meanwhile.
        """
        ...


class ClusterEngine(EpisodeEngine, Protocol):
    """An engine whose episodes are played elsewhere."""

    async def score(
        self, ids: list[int], start: int, temperature: float = 1.0, *, policy: str
    ) -> list[float]:
        """As `LocalClient.score`, by a worker with the weights of `policy` as they are."""
        ...

    def metrics(self) -> Mapping[str, float | str]:
        """The work of the workers since the last call, for the metrics of a step."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class PolicyScorer:
    """One policy on the cluster, as a canary asks it."""

    engine: ClusterEngine
    policy: str

    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        return await self.engine.score(ids, start, temperature, policy=self.policy)


@dataclass(kw_only=True, slots=True)
class NodeReport:
    """A node that is alive; the second half is None where no probe ran on it."""

    address: str
    host: str
    cpus: float
    gpus: float
    memory_gb: float
    object_store_mb: float
    versions: dict[str, str] | None = None
    """The versions of Python and of the packages that have to agree with the driver's; empty where one is
    missing."""
    clock_skew_s: float | None = None
    """Seconds that its clock must be ahead of the driver's; see `clock_skew`."""
    sees_directory: bool | None = None
    """Whether it reads what the driver wrote into its working directory."""
    fetch_s: float | None = None
    """To get the bytes of the broadcast test."""


@dataclass(kw_only=True, slots=True)
class ClusterReport:
    """A cluster as its driver sees it."""

    nodes: list[NodeReport]
    versions: dict[str, str]
    """The driver's."""
    broadcast_mb: float = 0.0
    broadcast_mb_per_s: float | None = None
    """Over all nodes, from the driver's memory; None where it was not tried."""
    problems: list[str] = field(default_factory=list[str])
    """The parts that would be refused, each with its mend."""
    remarks: list[str] = field(default_factory=list[str])


def clock_skew(sent_at_s: float, their_s: float, received_at_s: float) -> float:
    """Seconds that a clock must be ahead (below 0: behind), whatever a question and its answer took on their
    ways; 0 where it may be right."""
    return their_s - min(max(their_s, sent_at_s), received_at_s)


@runtime_checkable
class ClusterKind(Protocol):
    """The maker of a run's workers, and what of a configuration they honour."""

    def require(self, config: TrainConfig) -> None:
        """Raises ConfigError, before any work, for the first key that it would not honour, and
        MissingExtraError where its library is not installed."""
        ...

    def engine(self, job: RolloutJob) -> AbstractAsyncContextManager[ClusterEngine]:
        """Workers that play while the block runs."""
        ...

    def ranks(
        self, config: TrainConfig, num_ranks: int, directory: Path
    ) -> AbstractContextManager[RankStarter]:
        """The place where so many ranks of the trainer are started while the block runs, as
        `distributed.placement` says. `directory`: of the run."""
        ...

    def report(self, cluster: ClusterConfig, *, broadcast_mb: int) -> ClusterReport:
        """The nodes of a cluster; with `broadcast_mb` each says what it is, and gets that many megabytes.

        Raises ClusterError where there is no cluster.
        """
        ...


def cluster_kind(name: str) -> ClusterKind | None:
    """The cluster that `cluster.kind` means; None for `local`. Raises ConfigError where there is no such
    kind."""
    return None if name == NO_CLUSTER else cluster_named(name)


def cluster_named(name: str) -> ClusterKind:
    """The entry point `name`. Raises ConfigError where there is none."""
    try:
        kind = object_named(name, group="rllm.clusters", what="kind of cluster")
    except ConfigError as error:
        raise ConfigError(
            f"`cluster.kind` is {name!r}: {error} `{NO_CLUSTER}` plays episodes in the run's own processes."
        ) from error
    if not isinstance(kind, ClusterKind):
        raise ConfigError(
            f"`cluster.kind` is {name!r}, which is {kind!r:.100}; it must have `require`, `engine`, `ranks` "
            "and `report`, as rllm.trainer.cluster.ClusterKind describes."
        )
    return kind


def require_cluster(config: TrainConfig) -> None:
    """Raises ConfigError, with the mend, for the first thing that a run on a cluster cannot honour."""
    kind = cluster_kind(config.cluster.kind)
    if kind is None:
        return
    mend = f"or leave `cluster.kind` at {NO_CLUSTER}."
    where = f"`cluster.kind` is {config.cluster.kind!r}, whose workers"
    if config.cluster.model_servers and config.inference.lockstep:
        raise ConfigError(
            f"`cluster.model_servers` is {config.cluster.model_servers}, whose calls come from several "
            "workers, and `inference.lockstep` is true: set that to false, or `cluster.model_servers` to 0."
        )
    if config.backend != LOCAL:
        raise ConfigError(
            f"{where} get their weights from the backend `{LOCAL}` alone, and `backend` is "
            f"{config.backend!r}: set it to that, {mend}"
        )
    if config.model.device != "cpu":
        raise ConfigError(
            f"{where} sample on the CPU, and `model.device` is {config.model.device!r}: set it to cpu, {mend}"
        )
    if config.distill.teacher:
        raise ConfigError(
            f"{where} were never tried beside a teacher, and `distill.teacher` is "
            f"{config.distill.teacher!r}: leave it out, {mend}"
        )
    kind.require(config)


def rank_places(config: TrainConfig, num_ranks: int, directory: Path) -> AbstractContextManager[RankStarter]:
    """Where the ranks of a run are started while the block runs. `directory`: of the run."""
    kind = cluster_kind(config.cluster.kind)
    if kind is None or config.distributed.placement == HERE:
        return nullcontext(ranks_here)
    return kind.ranks(config, num_ranks, directory)


@asynccontextmanager
async def episode_engine(
    config: TrainConfig,
    player: EpisodePlayer,
    models: Mapping[str, Any],
    clients: Mapping[str, "PolicyClient"],
    directory: Path,
    ranks: RankGroup,
    encodings: EncodedEpisodes,
) -> AsyncIterator[tuple[EpisodeEngine, ClusterEngine | None]]:
    """The engine that plays the episodes of a run, on each of `ranks`, and the cluster behind it: that of
    rank 0.

    `models`: policy -> LoadedModel. `directory`: of the run. `encodings`: see `SplitEngine`.
    """
    kind = cluster_kind(config.cluster.kind)
    if kind is None:
        async with player.open_engine(config, clients, directory) as engine:
            yield (engine if ranks.size == 1 else SplitEngine(engine, ranks, encodings)), None
        return
    if not ranks.is_writer:
        yield WriterEngine(None, ranks), None
        return
    job = RolloutJob(
        config=config,
        player=player,
        models=models,
        clients=cast("Mapping[str, LocalClient]", clients),  # a cluster has no other `inference.engine`
        directory=directory,
    )
    async with kind.engine(job) as cluster:
        yield (cluster if ranks.size == 1 else WriterEngine(cluster, ranks, encodings)), cluster
