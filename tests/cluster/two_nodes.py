"""A Ray cluster on this machine, whose nodes come and go.

python two_nodes.py ADDRESS      a driver of somebody else, who fills the object store of every node
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster

from rllm.integrations.ray.session import with_second_try

STORE_BYTES = 100 * 1024**2


class Nodes:
    """A cluster whose nodes are processes here: `head`, which plays nothing, and those that are added."""

    def __init__(self) -> None:
        with_second_try(self._start, ray.shutdown, "")

    def _start(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self, num_cpus: int = 1) -> Any:
        added: list[Any] = []

        def start() -> None:
            added.append(self.cluster.add_node(num_cpus=num_cpus, object_store_memory=STORE_BYTES))

        with_second_try(start, lambda: None, "")
        return added[0]

    def of(self, process: psutil.Process) -> Any:
        """The node that `process` was started on."""
        pids = {each.pid for each in process.parents()}
        return next(
            node
            for node in self.cluster.list_all_nodes()
            if pids & {each.process.pid for each in node.all_processes["raylet"]}
        )

    def remove(self, node: Any) -> None:
        """As a machine that loses its power."""
        self.cluster.remove_node(node, allow_graceful=False)


@contextmanager
def full_stores(address: str) -> Iterator[None]:
    """While the block runs, somebody's arrays take up nine tenths of every object store."""
    filling = subprocess.Popen(
        [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert filling.stdout is not None
    try:
        assert "full" in (line.strip() for line in filling.stdout)
        yield
    finally:
        filling.kill()
        filling.wait()


def _zeros() -> np.ndarray:
    return np.zeros(STORE_BYTES * 9 // 10, np.uint8)


def fill(address: str) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, log_to_driver=False)
    arrays = [
        ray.remote(_zeros)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote()
        for node in ray.nodes()
        if node["Alive"]
    ]
    ray.wait(arrays, num_returns=len(arrays), fetch_local=False)
    print("full", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    fill(sys.argv[1])
