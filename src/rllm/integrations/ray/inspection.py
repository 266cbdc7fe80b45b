# pyright: reportMissingImports=false
"""The parts of a cluster, and whether its nodes would play a run alike.

nodes() ──► one probe on each node: versions, clock, the driver's directory
        ──► one block, put once, fetched by each node: megabytes per second
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllm.errors import ClusterError, ConfigError
from rllm.integrations.ray.job import Machine, this_machine
from rllm.integrations.ray.session import MEGABYTE
from rllm.trainer.cluster import ClusterReport, NodeReport, clock_skew

MAX_SKEW_S = 1.0
"""Between clocks, after which the times of episodes and logs are out of order."""
PROBE_S = 300.0
"""For a node to start a process and answer."""


@dataclass(kw_only=True, slots=True)
class Probe:
    """The machine of a process on a node, and the files that it can read."""

    machine: Machine
    sees_directory: bool


def inspect_cluster(broadcast_mb: int) -> ClusterReport:
    """A report on the cluster that this process drives. Raises ConfigError for a broadcast that a node cannot
    hold."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    report = ClusterReport(nodes=[_report_of(node) for node in alive], versions=dict(this_machine().versions))
    if not broadcast_mb:
        return report
    _require_room(report, broadcast_mb)
    with tempfile.NamedTemporaryFile(prefix=".rllm-shared-", dir=Path.cwd()) as file:
        # All at once: each starts a process and imports everything, which takes most of the time.
        probes = [_on(node, _probe) for node in alive]
        starts = [probe.remote(file.name) for probe in probes]
        for probe, start, node in zip(probes, starts, report.nodes, strict=True):
            _ask(partial(probe.remote, file.name), start, node, report)
    _broadcast(alive, report, broadcast_mb)
    without_directory = [each.address for each in report.nodes if each.sees_directory is False]
    if without_directory:
        report.remarks.append(
            f"{', '.join(without_directory)} cannot read {Path.cwd()}: agents from a file of yours travel as "
            "code, but what they read from there, or import beside it, has to be on each node."
        )
    return report


def _report_of(node: dict[str, Any]) -> NodeReport:
    resources = node["Resources"]
    return NodeReport(
        address=node["NodeManagerAddress"],
        host=node["NodeManagerHostname"],
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        memory_gb=resources.get("memory", 0.0) / 1e9,
        object_store_mb=resources.get("object_store_memory", 0.0) / MEGABYTE,
    )


def _require_room(report: ClusterReport, broadcast_mb: int) -> None:
    """Raises ConfigError for a broadcast that some node cannot hold."""
    smallest = min(report.nodes, key=lambda each: each.object_store_mb)
    if broadcast_mb > smallest.object_store_mb:
        raise ConfigError(
            f"--broadcast-mb is {broadcast_mb}, and the object store of {smallest.address} has "
            f"{smallest.object_store_mb:,.0f} MB; send less, or start it with a larger --object-store-memory."
        )


def _on(node: dict[str, Any], function: Any) -> Any:
    """`function` as a task of that node, which takes none of its cores."""
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=where, max_retries=1)


def _ask(probe: Callable[[], Any], start: Any, node: NodeReport, report: ClusterReport) -> None:
    """`probe` asks again after the answer of `start`, so that imports do not delay the clock."""
    try:
        ray.get(start, timeout=PROBE_S)
        sent_at_s = time.time()
        answer: Probe = ray.get(probe(), timeout=PROBE_S)
    except GetTimeoutError:
        report.problems.append(
            f"{node.address} has not answered within {PROBE_S:.0f} s: is it overloaded, or cut off?"
        )
        return
    except RayError as error:
        report.problems.append(
            f"{node.address} does not run rllm ({type(error).__name__}): install the same rllm there, in "
            "the environment that `ray start` was called in."
        )
        return
    node.versions = dict(answer.machine.versions)
    node.clock_skew_s = clock_skew(sent_at_s, answer.machine.clock_s, time.time())
    node.sees_directory = answer.sees_directory
    for name, version in report.versions.items():
        if node.versions[name] != version:
            report.problems.append(
                f"{node.address} has {name} {node.versions[name] or 'not installed'}, and the driver has "
                f"{version}: install the same on both."
            )
    if abs(node.clock_skew_s) > MAX_SKEW_S:
        report.problems.append(
            f"The clock of {node.address} is {node.clock_skew_s:+.1f} s off the driver's (limit "
            f"{MAX_SKEW_S:g} s): times of episodes would be out of order; synchronise it (NTP)."
        )


def _probe(path: str) -> Probe:
    return Probe(machine=this_machine(), sees_directory=os.path.exists(path))


def _broadcast(alive: list[dict[str, Any]], report: ClusterReport, megabytes: int) -> None:
    block_B = np.random.default_rng(0).integers(0, 256, megabytes * MEGABYTE, np.uint8)
    expected = int(block_B[:: MEGABYTE // 8].sum())
    started_s = time.perf_counter()
    try:
        # Inside a list, because Ray fetches what a task is given before the task begins to take the time.
        refs = [ray.put(block_B)]
        fetches = [_on(node, _fetch).remote(refs) for node in alive]
        for node, (seconds, digest) in zip(report.nodes, ray.get(fetches, timeout=PROBE_S), strict=True):
            node.fetch_s = seconds
            if digest != expected:
                raise ClusterError(f"{node.address} read other bytes than were sent to it.")
    except RayError as error:
        report.problems.append(
            f"{megabytes} MB did not reach every node ({type(error).__name__}): give the object stores more "
            "(`ray start --object-store-memory`), or end what fills them."
        )
        return
    seconds = time.perf_counter() - started_s
    report.broadcast_mb = megabytes
    report.broadcast_mb_per_s = megabytes * len(alive) / seconds


def _fetch(refs: list[Any]) -> tuple[float, int]:
    """(seconds until the bytes are here, their digest)."""
    started_s = time.perf_counter()
    (block_B,) = ray.get(refs)
    seconds = time.perf_counter() - started_s
    return seconds, int(block_B[:: MEGABYTE // 8].sum())
