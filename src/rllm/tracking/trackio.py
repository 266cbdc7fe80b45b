# pyright: reportMissingImports=false
"""Numbers to Trackio, on this machine or in the Space of TRACKIO_SPACE_ID; `trackio show` shows them."""

import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout

from rllm.errors import MissingExtraError
from rllm.tracking.base import Metric
from rllm.tracking.sinks import SinkRun, metric_names

try:
    import trackio
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "trackio", "trackio") from error


def require_usable() -> None:
    """Its own database on this machine needs nothing."""


class TrackioSink:
    def __init__(self, run: SinkRun) -> None:
        with redirect_stdout(sys.stderr):  # it prints, and stdout is for what a command was asked for
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "rllm"),
                name=run.name,
                space_id=os.environ.get("TRACKIO_SPACE_ID"),
                config=dict(run.config),
                resume="allow",
                embed=False,
            )

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        self._run.log({**metric_names(phase, metrics), f"{phase}/step": step})

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


def open_sink(run: SinkRun) -> TrackioSink:
    return TrackioSink(run)
