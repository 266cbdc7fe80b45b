# pyright: reportMissingImports=false
"""What a cluster is made of, and whether its nodes would play a run alike.

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

from rllm.errors import ClusterError
from rllm.integrations.ray.session import MEGABYTE
from rllm.integrations.ray.worker import Machine, this_machine
from rllm.trainer.cluster import ClusterReport, NodeReport

MAX_SKEW_S = 1.0
"""Between clocks, after which the times of episodes and logs are out of order."""
PROBE_S = 300.0
"""For a node to start a process and answer."""


@dataclass(kw_only=True, slots=True)
class Probe:
    """What a process on a node finds."""

    machine: Machine
    sees_directory: bool


def inspected(broadcast_mb: int) -> ClusterReport:
    """Of the cluster that this process drives."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    report = ClusterReport(nodes=[_report_of(node) for node in alive], versions=dict(this_machine().versions))
    if not broadcast_mb:
        return report
    with tempfile.NamedTemporaryFile(prefix=".rllm-shared-", dir=Path.cwd()) as file:
        # All at once: each starts a process and imports everything, which takes most of the time.
        probes = [_on(node, _probe) for node in alive]
        starts = [probe.remote(file.name) for probe in probes]
        for probe, started, found in zip(probes, starts, report.nodes, strict=True):
            _ask(partial(probe.remote, file.name), started, found, report)
    _broadcast(alive, report, broadcast_mb)
    unseen = [each.address for each in report.nodes if each.sees_directory is False]
    if unseen:
        report.remarks.append(
            f"{', '.join(unseen)} cannot read {Path.cwd()}: agents from a file of yours travel as code, but "
            "what they read from there, or import beside it, has to be on each node."
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


def _on(node: dict[str, Any], function: Any) -> Any:
    """`function` as a task of that node, which takes none of its cores."""
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=where, max_retries=1)


def _ask(probe: Callable[[], Any], started: Any, found: NodeReport, report: ClusterReport) -> None:
    """`probe` asks again once `started` is there, so that the clock is read without waiting for imports."""
    try:
        ray.get(started, timeout=PROBE_S)
        asked_s = time.time()
        answer: Probe = ray.get(probe(), timeout=PROBE_S)
    except GetTimeoutError:
        report.problems.append(
            f"{found.address} has not answered within {PROBE_S:.0f} s: is it overloaded, or cut off?"
        )
        return
    except RayError as error:
        report.problems.append(
            f"{found.address} does not run rllm ({type(error).__name__}): install the same rllm there, in "
            "the environment that `ray start` was called in."
        )
        return
    found.versions = dict(answer.machine.versions)
    found.clock_skew_s = answer.machine.clock_s - (asked_s + time.time()) / 2
    found.sees_directory = answer.sees_directory
    for name, version in report.versions.items():
        if found.versions[name] != version:
            report.problems.append(
                f"{found.address} has {name} {found.versions[name] or 'not installed'}, and the driver has "
                f"{version}: install the same on both."
            )
    if abs(found.clock_skew_s) > MAX_SKEW_S:
        report.problems.append(
            f"The clock of {found.address} is {found.clock_skew_s:+.1f} s off the driver's (limit "
            f"{MAX_SKEW_S:g} s): times of episodes would be out of order; synchronise it (NTP)."
        )


def _probe(shared: str) -> Probe:
    return Probe(machine=this_machine(), sees_directory=os.path.exists(shared))


def _broadcast(alive: list[dict[str, Any]], report: ClusterReport, megabytes: int) -> None:
    block_B = np.random.default_rng(0).integers(0, 256, megabytes * MEGABYTE, np.uint8)
    expected = int(block_B[:: MEGABYTE // 8].sum())
    started_s = time.perf_counter()
    try:
        ref = ray.put(block_B)
        fetches = [_on(node, _fetch).remote(ref) for node in alive]
        for found, (seconds, digest) in zip(report.nodes, ray.get(fetches, timeout=PROBE_S), strict=True):
            found.fetch_s = seconds
            if digest != expected:
                raise ClusterError(f"{found.address} read other bytes than were sent to it.")
    except RayError as error:
        report.problems.append(
            f"{megabytes} MB did not reach every node ({type(error).__name__}): give the object stores more "
            "(`ray start --object-store-memory`), or end what fills them."
        )
        return
    seconds = time.perf_counter() - started_s
    report.broadcast_mb = megabytes
    report.broadcast_mb_per_s = megabytes * len(alive) / seconds


def _fetch(block_B: Any) -> tuple[float, int]:
    started_s = time.perf_counter()
    digest = int(block_B[:: MEGABYTE // 8].sum())
    return time.perf_counter() - started_s, digest
