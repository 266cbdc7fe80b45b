"""Numbers on their way to somebody else's program, which can neither stop a run nor slow it.

log ──► a bounded queue ──thread──► Sink.log, tried again a few times ──► tensorboard | wandb | mlflow | …
           │ full: the oldest line is dropped            │ fails for good: said once, the run goes on
           └─ metrics.jsonl has every line in any case

Every number is named PHASE/METRIC, with the names of metrics.jsonl: `train/success`, `after/greedy`.
"""

import importlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rllm.tracking.base import Metric, Tracker

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Lines that wait for a sink; beyond them the oldest is dropped."""
RETRY_S = (0.5, 2.0, 8.0)
"""Waits before a line is tried again."""
CLOSE_S = 15.0
"""The time that the end of a run waits for a sink."""
CLOSE_S_OF_DOWN = 1.0
"""The same of one that takes nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SinkRun:
    """The run, as sinks know it."""

    name: str
    """The name of its directory."""
    directory: Path
    config: Mapping[str, Any]


class Sink(Protocol):
    """One foreign program. Only `log` is needed; errors of all kinds may be raised."""

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None: ...


def metric_names(phase: str, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """PHASE/METRIC -> number, for what is a finite number; texts and NaN have no place on a curve."""
    return {
        f"{phase}/{name}": float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def require_sinks(names: Sequence[str]) -> None:
    """Raises MissingExtraError for a package that is not there, and ConfigError for an address, protocol or
    key that a sink cannot work with, before any work."""
    for name in names:
        _module(name).require_usable()


def open_sinks(names: Sequence[str], run: SinkRun) -> list["BufferedSink"]:
    """The sinks of a run. One that cannot be opened now is said, and the run goes on without it."""
    return [BufferedSink(partial(_opened, name, run), name) for name in names]


def _opened(name: str, run: SinkRun) -> Sink:
    return _module(name).open_sink(run)


def as_tracker(tracker: Any) -> Tracker:
    """A tracker as it is; an object that has only `log`, or is no whole tracker, behind a queue."""
    if all(callable(getattr(tracker, name, None)) for name in ("begin", "advance", "close")):
        return tracker
    return BufferedSink(lambda: tracker, type(tracker).__name__)


def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")


class BufferedSink:
    """A sink behind a queue, as a tracker. No method raises or waits, but `close`, for at most CLOSE_S."""

    def __init__(
        self, open_sink: Callable[[], Sink], name: str, *, sleep: Callable[[float], object] | None = None
    ) -> None:
        """`open_sink` is called in the thread: opening may take a while."""
        self.name, self.num_dropped, self.num_failed = name, 0, 0
        self._open_sink = open_sink
        self._lines: deque[tuple[int, str, dict[str, Metric]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._is_down = False
        """The last line was refused for good: nobody waits for such a service."""
        self._sleep = sleep or self._wait
        self._thread = threading.Thread(target=self._run, name=f"tracking to {name}", daemon=True)
        self._thread.start()

    def begin(self, phase: str) -> None:
        """Nothing to send."""

    def advance(self, done: int, total: int) -> None:
        """Nothing to send: the numbers are not there yet."""

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        with self._changed:
            if len(self._lines) >= MAX_WAITING:
                self._lines.popleft()
                self.num_dropped += 1
            self._lines.append((step, phase, dict(metrics)))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # With a limit, because a foreign program may hang. The thread is a daemon and ends with the process.
        self._thread.join(CLOSE_S_OF_DOWN if self._is_down else CLOSE_S)
        num_left = len(self._lines) + self.num_dropped + self.num_failed
        if num_left:
            log.warning("%s was not given %d lines; metrics.jsonl has all of them.", self.name, num_left)

    def _run(self) -> None:
        sink: Any = None
        try:
            sink = self._retried(self._open_sink)
            while (line := self._next()) is not None:
                step, phase, metrics = line
                try:
                    self._retried(partial(sink.log, step, phase, metrics))
                except Exception as error:  # noqa: BLE001  whatever a foreign program raises
                    self.num_failed += 1
                    self._is_down = True
                    if self.num_failed == 1:
                        self._complain(error)
        except Exception as error:  # noqa: BLE001  it cannot be opened
            self._is_down = True
            self._complain(error)
        finally:
            close = getattr(sink, "close", None)
            if close is not None:
                try:
                    close()
                except Exception as error:  # noqa: BLE001  whatever a foreign program raises
                    log.warning("%s could not be closed: %s", self.name, error)

    def _next(self) -> tuple[int, str, dict[str, Metric]] | None:
        with self._changed:
            while not self._lines:
                if self._closing:
                    return None
                self._changed.wait()
            return self._lines.popleft()

    def _retried(self, work: Callable[[], Any]) -> Any:
        # One try a line while it is down: with all waits each would take 10 s, and the queue would overflow.
        for wait_s in () if self._is_down else RETRY_S:
            try:
                return work()
            except Exception as error:  # noqa: BLE001  whatever a foreign program raises
                log.debug("%s: %s; trying again in %s s", self.name, error, wait_s)
            self._sleep(wait_s)
        done = work()
        self._is_down = False
        return done

    def _wait(self, wait_s: float) -> None:
        """Shorter when the run ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, wait_s)

    def _complain(self, error: Exception) -> None:
        log.warning("%s takes no numbers (%s: %s); the run goes on.", self.name, type(error).__name__, error)
