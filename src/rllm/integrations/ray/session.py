# pyright: reportMissingImports=false
"""This process as a driver of a Ray cluster: one that runs, or one that is started here.

cluster_connection(cluster) ──► ray.init, once more where it fails ──► the block ──► ray.shutdown

A cluster that is started here ends with this process, however it ends.
"""

import contextlib
import io
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata, util

from rllm.config.cluster import ClusterConfig
from rllm.config.schema import TrainConfig
from rllm.distributed.joining import SET_BY_LAUNCHER
from rllm.errors import ClusterError, ConfigError, MissingExtraError

OLDEST, BEYOND = (2, 60), (2, 61)
"""Versions of Ray from OLDEST on, up to BEYOND, which is no more among them."""
PAUSE_S = 5.0
"""Before a second try to start: what the first left behind ends meanwhile."""
ANSWER_S = 10.0
"""For the head of a cluster to take a connection."""
MEGABYTE = 1_000_000
MAX_PORT = 65535
MAX_WORKERS_PER_CORE = 4
"""On a cluster that is started here; each is a process with a model."""
PLACED_ON = "RLLM_PLACED_ON"
"""Tells a rank that is placed on a cluster the address of that one, which it drives."""


def require_installed() -> None:
    """Raises MissingExtraError, or ConfigError for a version that was never tried. Imports nothing."""
    if util.find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")
    version = metadata.version("ray")
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) < BEYOND:
        raise ConfigError(
            f"ray {version} is installed, and rollout workers were tried with 2.60 alone; run: "
            "pip install 'rllm[ray]'"
        )


def require_address(address: str, name: str = "`cluster.address`") -> None:
    """Raises ConfigError for an address that a driver cannot work at; empty is none."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{name} is {address!r}, Ray's client protocol, which moves every object through one "
            "connection; start the run on a node of the cluster and give its HOST:6379, or auto."
        )
    host, _, port = address.rpartition(":")
    is_place = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) <= MAX_PORT
    if address not in ("", "auto") and not is_place:
        raise ConfigError(
            f"{name} is {address!r}; write HOST:PORT with a port from 1 to {MAX_PORT}, such as "
            "10.0.0.1:6379, or auto on a node of the cluster."
        )


def require_running(address: str) -> None:
    """Raises ConfigError for what is no address of a cluster that runs already."""
    if not address:
        raise ConfigError(
            "--address is empty, and there is no cluster to look at; write HOST:PORT, such as 10.0.0.1:6379, "
            "or auto on a node of the cluster."
        )
    require_address(address, "--address")


def require_machine(cluster: ClusterConfig) -> None:
    """Raises ConfigError where a cluster that is started here asks for more than this machine has."""
    if cluster.address:
        return
    from rllm.trainer.free_memory import machine_bytes

    cores, memory_mb = os.cpu_count() or 1, machine_bytes("cpu") // MEGABYTE
    mend = "or give the `cluster.address` of a running one."
    if cluster.cpus_per_worker > cores:
        raise ConfigError(
            f"`cluster.cpus_per_worker` is {cluster.cpus_per_worker}, and the cluster is started on this "
            f"machine, which has {cores} cores; ask for at most as many, {mend}"
        )
    num_processes = cluster.workers + cluster.model_servers
    if num_processes * cluster.cpus_per_worker > cores * MAX_WORKERS_PER_CORE:
        servers = f" and `cluster.model_servers` is {cluster.model_servers}" if cluster.model_servers else ""
        raise ConfigError(
            f"`cluster.workers` is {cluster.workers}{servers}, each with {cluster.cpus_per_worker} cores "
            f"(`cluster.cpus_per_worker`), and the cluster is started on this machine, whose {cores} cores "
            f"are shared by {MAX_WORKERS_PER_CORE} each at most; ask for fewer workers, {mend}"
        )
    if cluster.object_store_mb > memory_mb:
        raise ConfigError(
            f"`cluster.object_store_mb` is {cluster.object_store_mb}, and this machine, on which the cluster "
            f"is started, has {memory_mb:,} MB of memory; ask for less, {mend}"
        )


def require_cores(config: TrainConfig, num_ranks: int) -> None:
    """Raises ConfigError where ranks are placed on a cluster that is started here, and this machine has not
    cores enough for them."""
    cores = os.cpu_count() or 1
    if not config.cluster.address and num_ranks * config.threads > cores * MAX_WORKERS_PER_CORE:
        raise ConfigError(
            f"--nproc is {num_ranks}, each with {config.threads} cores (`threads`), and the cluster is "
            f"started on this machine, whose {cores} cores are shared by {MAX_WORKERS_PER_CORE} each at "
            "most; start fewer, or give the `cluster.address` of a running one."
        )


@contextmanager
def cluster_connection(
    cluster: ClusterConfig, *, cores_of_ranks: int = 0, takes_logs: bool = True
) -> Iterator[None]:
    """Drive the cluster while the block runs; one that is started here has so many cores more than workers
    need. `takes_logs`: whether what actors print comes here. Raises ClusterError where there is none to be
    had."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing of a run is reported to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's default of 15 is for work beside services; on a cluster started here, workers are the work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    if ray.is_initialized():
        raise ClusterError("This process drives a Ray cluster already; call ray.shutdown() before a run.")
    with _own_stdout():
        with _own_sigterm(), _outside_of_ranks():
            with_second_try(
                lambda: _start(cluster, cores_of_ranks, takes_logs), ray.shutdown, cluster.address
            )
        try:
            yield
        finally:
            ray.shutdown()


def _start(cluster: ClusterConfig, cores_of_ranks: int, takes_logs: bool) -> None:
    import ray

    if address := os.environ.get(PLACED_ON) or cluster.address:
        require_answer(address)
        ray.init(address=address, log_to_driver=takes_logs, logging_level=logging.ERROR)
        return
    ray.init(
        address="local",
        num_cpus=num_cpus_here(cluster, cores_of_ranks),
        include_dashboard=False,
        object_store_memory=cluster.object_store_mb * MEGABYTE,
        log_to_driver=takes_logs,
        logging_level=logging.ERROR,
    )


@contextmanager
def _own_stdout() -> Iterator[None]:
    """Ray prints workers' lines, and its own about workers and nodes that end, to the standard output of the
    driver, which is for what a command was asked for: `rllm.integrations.ray.logs` takes them.

    The switch is the one that Ray's debugger turns; there is none for the second kind that is public.
    """
    import ray._private.worker

    before = ray._private.worker._worker_logs_enabled
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray._private.worker._worker_logs_enabled = before


@contextmanager
def _outside_of_ranks() -> Iterator[None]:
    """Processes that are started here inherit the environment, and are no ranks of the run."""
    rank_variables = {name: os.environ.pop(name) for name in SET_BY_LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(rank_variables)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray makes SIGTERM end the process at once; a run saves what it has, so its handler comes back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def require_answer(address: str) -> None:
    """Raises OSError where nobody listens at HOST:PORT: Ray itself would ask there for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()


def num_cpus_here(cluster: ClusterConfig, cores_of_ranks: int) -> int:
    """Cores that a cluster started here hands out: what its workers and ranks ask for, or those of the
    machine."""
    num_cores = (max(1, cluster.workers) + cluster.model_servers) * cluster.cpus_per_worker + cores_of_ranks
    return num_cores if cluster.workers else max(os.cpu_count() or 1, num_cores)


def with_second_try(
    start: Callable[[], None], clean_up: Callable[[], object], address: str, *, pause_s: float = PAUSE_S
) -> None:
    """Start-up on a crowded machine runs into Ray's own time limits: then a second try mostly succeeds."""
    for is_last in (False, True):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                start()
            return
        except Exception as error:
            # Ray raises a bare Exception where a node takes longer than its time limit.
            if not isinstance(error, RuntimeError | OSError | ValueError) and type(error) is not Exception:
                raise
            clean_up()
            if is_last:
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                where = (
                    f"The Ray cluster at {address!r} cannot be reached"
                    if address
                    else "Ray cannot be started"
                )
                raise ClusterError(
                    f"{where} ({first:.300}). Is `ray start --head` running there, and `cluster.address` its "
                    "address? Empty starts one on this machine."
                ) from error
            time.sleep(pause_s)
