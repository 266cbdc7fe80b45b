"""`cluster.kind = "ray"`: what it honours of a configuration, and how a run gets its workers.

Nothing of Ray is imported before a run works.
"""

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from rllm.config.cluster import ClusterConfig
from rllm.config.schema import TrainConfig
from rllm.distributed.launch import RankStarter
from rllm.integrations.ray.session import (
    cluster_connection,
    require_address,
    require_cores,
    require_installed,
    require_machine,
    require_running,
)
from rllm.trainer.cluster import ClusterEngine, ClusterReport, RolloutJob


class RayKind:
    """A `ClusterKind`."""

    def require(self, config: TrainConfig) -> None:
        require_address(config.cluster.address)
        require_machine(config.cluster)
        require_installed()

    @asynccontextmanager
    async def engine(self, job: RolloutJob) -> AsyncIterator[ClusterEngine]:
        with cluster_connection(job.config.cluster):
            from rllm.integrations.ray.engine import ray_engine
            from rllm.integrations.ray.logs import cluster_log

            with cluster_log(job.directory / "cluster.log"):
                async with ray_engine(job) as engine:
                    yield engine

    @contextmanager
    def ranks(self, config: TrainConfig, num_ranks: int, directory: Path) -> Iterator[RankStarter]:
        require_cores(config, num_ranks)
        cores = num_ranks * config.threads
        with cluster_connection(config.cluster, cores_of_ranks=cores, takes_logs=False):
            from rllm.integrations.ray.logs import ray_messages
            from rllm.integrations.ray.ranks import rank_starter

            with ray_messages(partial(print, file=sys.stderr, flush=True)):
                yield rank_starter(config, directory)

    def report(self, cluster: ClusterConfig, *, broadcast_mb: int) -> ClusterReport:
        require_running(cluster.address)
        require_installed()
        with cluster_connection(cluster):
            from rllm.integrations.ray.inspection import inspect_cluster

            return inspect_cluster(broadcast_mb)


RAY = RayKind()
"""The entry point `ray` of the group `rllm.clusters`."""
