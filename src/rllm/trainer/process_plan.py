"""The processes that a run will consist of, from its configuration alone: how many, on how many cores, and on
which ports they listen.

    TrainConfig, number of ranks ──► trainer · rollout workers · model servers · Ray's own
"""

from dataclasses import asdict, dataclass
from typing import Any

from rllm.config.distributed import HERE
from rllm.config.schema import TrainConfig

LOOPBACK = "a free port of 127.0.0.1"
HEAD_PORT = 6379
"""The port of a Ray head that was not told another one."""
BY_RAY = "a port that Ray chooses on each node"
FROM_RANGE = "10002 to 19999 on each node, or as `ray start --min-worker-port` and `--max-worker-port` say"


@dataclass(kw_only=True, slots=True, frozen=True)
class ProcessPlan:
    """Processes of one kind."""

    name: str
    number: int
    """0: as many as the nodes have room for."""
    cores: int
    """Cores of each; 0: those of its machine, shared evenly."""
    ports: tuple[str, ...]
    """Where each of them listens; none where nobody connects to it."""

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def __str__(self) -> str:
        number = "as many as there is room for" if self.number == 0 else f"{self.number:,}"
        cores = {0: "sharing the cores of a machine", 1: "1 core each"}.get(
            self.cores, f"{self.cores:,} cores each"
        )
        listens = f", listening on {'; '.join(self.ports)}" if self.ports else ""
        return f"{self.name}: {number}, {cores}{listens}"


def process_plan(
    config: TrainConfig, *, num_ranks: int, is_program: bool, is_of_torchrun: bool
) -> list[ProcessPlan]:
    """`is_program`: whether what plays is a program, which calls a gateway. `is_of_torchrun`: whether
    torchrun starts the ranks."""
    cluster, gateway = config.cluster, (f"{LOOPBACK} (gateway)",) if is_program else ()
    meeting = _meeting(config, num_ranks, is_of_torchrun=is_of_torchrun)
    plans = [
        ProcessPlan(
            name="trainer",
            number=num_ranks,
            cores=config.threads,
            ports=(*meeting, *(() if cluster.is_used else gateway)),
        )
    ]
    if config.inference.replicas:
        number = config.inference.replicas * len(config.named_policies)
        plans.append(ProcessPlan(name="vLLM server", number=number, cores=0, ports=(LOOPBACK,)))
    if not cluster.is_used:
        return plans
    ports = (FROM_RANGE if cluster.address else BY_RAY,)
    cores = cluster.cpus_per_worker
    plans.append(
        ProcessPlan(name="rollout worker", number=cluster.workers, cores=cores, ports=(*ports, *gateway))
    )
    if cluster.model_servers:
        plans.append(ProcessPlan(name="model server", number=cluster.model_servers, cores=cores, ports=ports))
    plans.append(ProcessPlan(name="Ray head", number=1, cores=0, ports=(_head(cluster.address), BY_RAY)))
    return plans


def _meeting(config: TrainConfig, num_ranks: int, *, is_of_torchrun: bool) -> tuple[str, ...]:
    """Where several ranks find each other, and then speak."""
    if num_ranks == 1:
        return ()
    first = LOOPBACK if config.distributed.placement == HERE else "a free port of its node"
    if is_of_torchrun:
        first = "MASTER_PORT, as torchrun sets it"
    return f"{first} (rank 0, where ranks meet)", "free ports of its machine (gloo, between ranks)"


def _head(address: str) -> str:
    if not address:
        return "a free port of this machine"
    return f"{HEAD_PORT}, or as `ray start --port` said" if address == "auto" else address
