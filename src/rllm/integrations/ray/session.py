# pyright: reportMissingImports=false
"""This process as a driver of a Ray cluster: one that runs, or one that is started here.

connected(cluster) ──► ray.init, once more where it fails ──► the block ──► ray.shutdown

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
from rllm.errors import ClusterError, ConfigError, MissingExtraError

OLDEST, BEYOND = (2, 60), (2, 61)
"""Versions of Ray from OLDEST on, up to BEYOND, which is no more among them."""
PAUSE_S = 5.0
"""Before a second try to start: what the first left behind ends meanwhile."""
ANSWER_S = 10.0
"""For the head of a cluster to take a connection."""
MEGABYTE = 1_000_000


def require_installed() -> None:
    """Raises MissingExtraError, or ConfigError for a version that was never tried. Imports nothing."""
    if util.find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")
    installed = metadata.version("ray")
    if not OLDEST <= tuple(int(part) for part in installed.split(".")[:2]) < BEYOND:
        raise ConfigError(
            f"ray {installed} is installed, and rollout workers were tried with 2.60 alone; run: "
            "pip install 'rllm[ray]'"
        )


def require_address(address: str) -> None:
    """Raises ConfigError for an address that a driver cannot work at."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"`cluster.address` is {address!r}, Ray's client protocol, which moves every object through one "
            "connection; start the run on a node of the cluster and give its HOST:6379, or auto."
        )


@contextmanager
def connected(cluster: ClusterConfig) -> Iterator[None]:
    """Drive the cluster while the block runs. Raises ClusterError where there is none to be had."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing of a run is reported to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's default of 15 is for work beside services; on a cluster started here, workers are the work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    if ray.is_initialized():
        raise ClusterError("This process drives a Ray cluster already; call ray.shutdown() before a run.")
    with _own_sigterm():
        with_second_try(lambda: _start(cluster), ray.shutdown, cluster.address)
    try:
        yield
    finally:
        ray.shutdown()


def _start(cluster: ClusterConfig) -> None:
    import ray

    if cluster.address:
        require_answer(cluster.address)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        return
    ray.init(
        address="local",
        num_cpus=num_cpus_here(cluster),
        include_dashboard=False,
        object_store_memory=cluster.object_store_mb * MEGABYTE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


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


def num_cpus_here(cluster: ClusterConfig) -> int:
    """Cores that a cluster started here hands out: what its workers ask for, or those of the machine."""
    return cluster.workers * cluster.cpus_per_worker or os.cpu_count() or 1


def with_second_try(
    start: Callable[[], None], clean_up: Callable[[], object], address: str, *, pause_s: float = PAUSE_S
) -> None:
    """Start-up on a crowded machine runs into Ray's own time limits: then a second try mostly succeeds."""
    for is_last in (False, True):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                start()
            return
        except (RuntimeError, OSError, ValueError) as error:
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
