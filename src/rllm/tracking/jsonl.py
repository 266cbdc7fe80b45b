"""metrics.jsonl: one JSON object a line, `{"phase": …, "step": …, "time_s": …, metric: value, …}`.

    log ──► one write per line ──► metrics.jsonl ──► read_metrics ──► list of dicts
    resume: truncate_after ──► the lines up to the resume point ──► log goes on

A process that is killed can only tear the last line; readers skip it, and the next writer removes it.
`time_s` counts the seconds that the run was worked on: a resumed run counts on from the last line.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllm.errors import ConfigError
from rllm.files.atomic import StorageErrors, write_atomic
from rllm.tracking.base import Metric

_OWN_KEYS = ("phase", "step", "time_s")


class JsonlTracker:
    """Appends to a metrics file; each line is with the operating system before `log` returns."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        worked_s = _mend_tail(path)
        self._clock = clock
        self._started_s = clock() - worked_s
        with StorageErrors(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def begin(self, phase: str) -> None:
        """Nothing to record: lines say what was measured."""

    def advance(self, done: int, total: int) -> None:
        """Nothing to record: the numbers are not there yet."""

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        fields: dict[str, Any] = {
            "phase": phase,
            "step": int(step),
            "time_s": round(self._clock() - self._started_s, 3),
        }
        for name, value in metrics.items():
            fields[name] = _require_metric(name, value, f"step {step} of {phase}")
        line = json.dumps(fields).encode() + b"\n"
        with StorageErrors(self.path):
            self._append(line)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: bytes) -> None:
        size_before = os.fstat(self._descriptor).st_size
        num_written = 0
        try:
            while num_written < len(line):
                num_written += os.write(self._descriptor, line[num_written:])
        finally:
            # A full disk may take a part of the line, and the next line would go on in it.
            if 0 < num_written < len(line):
                os.ftruncate(self._descriptor, size_before)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every line of a metrics file in order; a torn last line is left out, any other damage is an error."""
    return read_metrics_after(path, 0)[0]


def read_metrics_after(path: Path, offset: int) -> tuple[list[dict[str, Any]], int, int]:
    """The lines behind the first `offset` bytes, and where they start and end: for one who reads on while a
    run writes.

    A file of which no line ends there was cut by a resumed run: it is read from its beginning.
    """
    if not path.is_file():
        return [], 0, 0
    with path.open("rb") as file:
        file.seek(max(offset - 1, 0))
        start = offset if file.read(1) == b"\n" else 0
        file.seek(start)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    metrics: list[dict[str, Any]] = []
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        where = f"{path}, line {number}" + (f" behind byte {start}" if start else "")
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON ({error}); delete that line.") from error
        is_line = isinstance(fields, dict) and isinstance(fields.get("phase"), str)
        if not is_line or not isinstance(fields.get("step"), int):
            raise ConfigError(
                f"{where} is no metrics line (no text `phase` and whole number `step`); delete that line."
            )
        metrics.append(fields)
    return metrics, start, start + len(whole)


def truncate_after(path: Path, phase_order: Sequence[str], phase: str, step: int) -> None:
    """Drop, all at once, the lines beyond (phase, step): a run that resumes there will write them again.

    `phase_order` names all phases of the run in the order they come. No tracker may have the file open.
    """
    place = {name: index for index, name in enumerate(phase_order)}
    metrics = read_metrics(path)
    unknown = {phase, *(fields["phase"] for fields in metrics)} - place.keys()
    if unknown:
        raise ValueError(
            f"{path}: phases {sorted(unknown)} are not in the phase order {list(phase_order)}; add them."
        )
    lines = [
        line
        for line, fields in zip(_whole_lines(path), metrics, strict=True)
        if (place[fields["phase"]], fields["step"]) <= (place[phase], step)
    ]
    if path.exists():
        write_atomic(path, b"".join(line + b"\n" for line in lines))


def _require_metric(name: str, value: Any, where: str) -> Metric:
    if name in _OWN_KEYS:
        raise ValueError(f"Metric `{name}` at {where} has the name of one of the line's own keys; rename it.")
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, int | float | str):
        raise ValueError(f"Metric `{name}` at {where} is a {type(value).__name__}; log a number or a string.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"Metric `{name}` at {where} is {value}, which is no measurement; leave it out and say why."
        )
    return value


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def _mend_tail(path: Path) -> float:
    """Cut a torn last line off, so that the next one starts fresh, and return the last `time_s`."""
    lines = _whole_lines(path)
    size = sum(len(line) + 1 for line in lines)
    if path.is_file() and path.stat().st_size > size:
        with StorageErrors(path):
            os.truncate(path, size)
    return json.loads(lines[-1]).get("time_s", 0.0) if lines else 0.0
