# pyright: reportMissingImports=false
"""The output of every process of a run, line by line in one file of the run, each with its name.

worker's stdout and stderr ──► Ray's log monitor on its node ──► the driver ──┐
Ray's messages about workers and nodes that ended ────────────────────────────┤
the driver's own warnings ────────────────────────────────────────────────────┴──► RUN/cluster.log

Lines of a worker that was killed come as well: the monitor reads them from the node's disk.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import ray

# Ray has no public way to its workers' lines but the terminal; `require_installed` holds its version.
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
from ray._raylet import GcsErrorSubscriber, JobID

from rllm.errors.redaction import escaped, without_keys

TO_FILE = "rllm_cluster_log"
"""The name of the handler of workers' lines."""
POLL_S = 0.5
"""The longest that the end of `ray_messages` waits for the reader."""


@contextmanager
def cluster_log(path: Path) -> Iterator[None]:
    """Append to `path` while the block runs."""
    with path.open("a", encoding="utf-8") as file:
        lines = _Lines(file)
        records = _Records(lines)
        dispatcher.add_handler(TO_FILE, lines.add_batch)
        logging.getLogger("rllm").addHandler(records)
        try:
            with ray_messages(partial(lines.add, "ray")):
                yield
        finally:
            logging.getLogger("rllm").removeHandler(records)
            dispatcher.remove_handler(TO_FILE)  # returns once no thread is in it any more


@contextmanager
def ray_messages(add: Callable[[str], object]) -> Iterator[None]:
    """While the block runs, give Ray's messages to this driver to `add`: a worker was killed, a node is lost.

    Ray itself prints them to standard output, which `cluster_connection` keeps it from.
    """
    job_id = ray.get_runtime_context().get_job_id()
    subscriber = GcsErrorSubscriber(address=ray.get_runtime_context().gcs_address)
    subscriber.subscribe()
    is_over = threading.Event()

    def read() -> None:
        with suppress(OSError, ray.exceptions.RpcError):  # the head is gone, which the run finds itself
            while not is_over.is_set():
                _, message = subscriber.poll(timeout=POLL_S)
                if message is not None and _concerns(message["job_id"], job_id):
                    add(message["error_message"])

    reader = threading.Thread(target=read, name="ray messages", daemon=True)
    reader.start()
    try:
        yield
    finally:
        # The reader ends before the subscriber is closed: it may be in the middle of a poll.
        is_over.set()
        reader.join()
        subscriber.close()


def _concerns(job_of_message: bytes | None, job_id: str) -> bool:
    """Whether a message is of this job or of all."""
    return job_of_message is None or job_of_message in (JobID.nil().binary(), bytes.fromhex(job_id))


class _Lines:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def add(self, name: str, text: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with self._lock:
            for line in text.splitlines():
                self._file.write(f"{now} {name} | {escaped(without_keys(line))}\n")
            self._file.flush()

    def add_batch(self, batch: dict[str, Any]) -> None:
        """Add the lines that a node's log monitor read of one process; Ray's lines about the nodes are left
        out."""
        if batch.get("pid") == "autoscaler":
            return
        name = batch.get("actor_name") or batch.get("task_name") or f"process {batch.get('pid')}"
        self.add(f"{name} {batch.get('ip')}", "\n".join(batch.get("lines", ())))


class _Records(logging.Handler):
    """The driver's own."""

    def __init__(self, lines: _Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.add("trainer", self.format(record))
