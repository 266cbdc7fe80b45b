# pyright: reportMissingImports=false
"""Numbers as event files for TensorBoard, in RUN/tensorboard: `tensorboard --logdir runs`."""

import time
from collections.abc import Mapping

from rllm.errors import MissingExtraError
from rllm.tracking.base import Metric
from rllm.tracking.sinks import SinkRun, metric_names

try:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "tensorboard", "tensorboard") from error


def require_usable() -> None:
    """Files need nothing."""


class TensorboardSink:
    def __init__(self, run: SinkRun) -> None:
        self._writer = EventFileWriter(str(run.directory / "tensorboard"))

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metric_names(phase, metrics).items()
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_sink(run: SinkRun) -> TensorboardSink:
    return TensorboardSink(run)
