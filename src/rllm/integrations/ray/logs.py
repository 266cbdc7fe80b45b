# pyright: reportMissingImports=false
"""The output of every process of a run, line by line in one file of the run, each with its name.

worker's stdout and stderr ──► Ray's log monitor on its node ──► the driver ──┐
the driver's own warnings ────────────────────────────────────────────────────┴──► RUN/cluster.log

Lines of a worker that was killed come as well: the monitor reads them from the node's disk.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

# Ray has no public way to its workers' lines but the terminal; `require_installed` holds its version.
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from rllm.errors.redaction import escaped, without_keys

TO_TERMINAL, TO_FILE = "ray_print_logs", "rllm_cluster_log"
"""Names of handlers of workers' lines: Ray's own, and ours."""


@contextmanager
def cluster_log(path: Path) -> Iterator[None]:
    """Append to `path` while the block runs; nothing of the workers goes to the terminal."""
    dispatcher.remove_handler(TO_TERMINAL)
    with path.open("a", encoding="utf-8") as file:
        lines = _Lines(file)
        records = _Records(lines)
        dispatcher.add_handler(TO_FILE, lines.add_batch)
        logging.getLogger("rllm").addHandler(records)
        try:
            yield
        finally:
            logging.getLogger("rllm").removeHandler(records)
            dispatcher.remove_handler(TO_FILE)  # returns once no thread is in it any more


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
