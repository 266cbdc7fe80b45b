"""Numbers as gauges of OpenTelemetry, by OTLP over HTTP to where OTEL_EXPORTER_OTLP_ENDPOINT says.

A gauge is named `rllm.METRIC` and has the attributes `phase` and `run`; `rllm.step` says which step it is of.
"""

import logging
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from rllm.errors import ConfigError, MissingExtraError
from rllm.tracking.base import Metric
from rllm.tracking.sinks import SinkRun, metric_names

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.metrics import Instrument
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
except ModuleNotFoundError as error:
    raise MissingExtraError("opentelemetry", "otel") from error

PROTOCOL = "http/protobuf"


def require_usable() -> None:
    """Raises ConfigError for a protocol that is not OTLP over HTTP, or an address without one."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol not in (None, "", PROTOCOL):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; rLLM sends {PROTOCOL}.")
    for name in ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        address = os.environ.get(name, "")
        if address and urlsplit(address).scheme not in ("http", "https"):
            raise ConfigError(f"{name} is {address!r}; it begins with http:// or https://.")


class OtelSink:
    def __init__(self, run: SinkRun) -> None:
        # What is refused is said once, by the queue before this; it would be said here at every try.
        logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)
        resource = Resource.create().merge(
            Resource({SERVICE_NAME: "rllm"}).merge(OTELResourceDetector().detect())
        )
        # Never by itself within the life of a run: `log` sends each line, and hears whether it was taken.
        self._reader = PeriodicExportingMetricReader(OTLPMetricExporter(), export_interval_millis=2**31)
        self._provider = MeterProvider([self._reader], resource=resource)
        self._meter = self._provider.get_meter("rllm.tracking")
        self._gauges: dict[str, Instrument] = {}
        self._run = run.name

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        """Each line is sent by itself: a gauge keeps only its last value."""
        attributes = {"phase": phase, "run": self._run}
        for name, value in {**metric_names(phase, metrics), f"{phase}/step": float(step)}.items():
            metric = f"rllm.{name.removeprefix(phase + '/')}"
            if metric not in self._gauges:
                self._gauges[metric] = self._meter.create_gauge(metric)
            self._gauges[metric].set(value, attributes)  # pyright: ignore[reportAttributeAccessIssue]
        if not self._provider.force_flush():
            raise ConnectionError("the collector did not take them")

    def close(self) -> None:
        self._provider.shutdown()


def open_sink(run: SinkRun) -> OtelSink:
    return OtelSink(run)
