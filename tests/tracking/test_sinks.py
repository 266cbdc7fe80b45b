"""Sinks: what they are given, and that none of them stops or slows a run; real packages where they are."""

import importlib
import logging
import math
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rllm.config.loader import load_as
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError, MissingExtraError
from rllm.tracking import Metric
from rllm.tracking.sinks import BufferedSink, SinkRun, as_tracker, metric_names, open_sinks, require_sinks

LINES: list[tuple[int, str, dict[str, Metric]]] = [
    (0, "train", {"success": 0.25, "note": "text", "loss": math.nan}),
    (1, "train", {"success": 0.5, "kl.max": 0.125}),
    (0, "after", {"greedy": 0.75}),
]


class Flaky:
    """A sink that refuses the first calls."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.lines, self.is_closed = refusals, [], False

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise ConnectionError("the service is away")
        self.lines.append((step, phase, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


def give(sink: Any) -> None:
    for step, phase, metrics in LINES:
        sink.log(step, phase, metrics)
    sink.close()


def test_names_are_phase_and_metric_and_only_numbers_go_out() -> None:
    assert metric_names("train", LINES[0][2]) == {"train/success": 0.25}
    assert metric_names("after", {"kl.max": 1}) == {"after/kl.max": 1.0}


def test_what_a_service_refuses_is_sent_again_in_order() -> None:
    sink, waits = Flaky(refusals=3), []
    give(BufferedSink(lambda: sink, "flaky", sleep=waits.append))
    assert sink.lines == LINES
    assert sink.is_closed
    assert waits == [0.5, 2.0, 8.0]


def test_a_service_that_is_gone_is_said_once_and_costs_only_its_own_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Flaky(refusals=5)
    with caplog.at_level(logging.WARNING, "rllm.tracking.sinks"):
        give(BufferedSink(lambda: sink, "flaky", sleep=lambda wait_s: None))
    assert sink.lines == LINES[2:]
    assert [record.message for record in caplog.records] == [
        "flaky takes no numbers (ConnectionError: the service is away); the run goes on.",
        "flaky was not given 2 lines; metrics.jsonl has all of them.",
    ]


def test_a_sink_that_cannot_be_opened_or_hangs_holds_nobody_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Flaky:
        raise PermissionError("no such project")

    closed = BufferedSink(refuse, "closed", sleep=lambda wait_s: None)
    give(closed)
    assert "(PermissionError: no such project)" in caplog.text
    assert " 3 lines" in caplog.text
    assert closed.num_failed == 0, "no line was tried"
    monkeypatch.setattr("rllm.tracking.sinks.CLOSE_S", 0.05)
    monkeypatch.setattr("rllm.tracking.sinks.MAX_WAITING", 2)
    hangs = threading.Event()

    class Hanging(Flaky):
        def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
            hangs.wait()

    slow = BufferedSink(lambda: Hanging(0), "slow")
    for step in range(50):
        slow.log(step, "train", {"success": 1.0})
    slow.close()
    assert slow.num_dropped >= 47, "the oldest lines make room"
    hangs.set()


def test_log_alone_is_enough_for_an_object_of_ones_own() -> None:
    class Mine:
        def __init__(self) -> None:
            self.lines: list[Any] = []

        def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
            self.lines.append((step, phase, dict(metrics)))
            raise RuntimeError("a mistake of mine")

    mine = Mine()
    tracker = as_tracker(mine)
    tracker.begin("train")
    tracker.advance(1, 2)
    tracker.log(0, "train", {"loss": 1.0})
    tracker.close()
    assert mine.lines[0] == (0, "train", {"loss": 1.0})


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (["tensorbord"], r"`tracking.sinks`.*'tensorbord'.*'tensorboard'\?"),
        (["otel", "otel"], "name each of them once"),
    ],
)
def test_names_of_sinks_are_checked_while_the_configuration_loads(sinks: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_as(TrainConfig, {"tracking": {"sinks": sinks}})


@pytest.mark.parametrize(
    ("sink", "variable", "value", "message"),
    [
        ("otel", "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "rLLM sends http/protobuf"),
        ("otel", "OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "begins with http"),
        ("wandb", "WANDB_MODE", "ofline", "one of online, offline"),
        ("wandb", "WANDB_API_KEY", "", "nobody is logged in"),
        ("mlflow", "MLFLOW_TRACKING_URI", "", "set it to the address of"),
        ("mlflow", "MLFLOW_TRACKING_URI", "ftp://somewhere", "begins with one of file, http"),
    ],
)
def test_what_a_sink_cannot_work_with_is_refused_before_any_work(
    sink: str, variable: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry" if sink == "otel" else sink)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        require_sinks([sink])


@pytest.mark.parametrize("sink", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_names_its_extra(sink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{sink}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, sink, None)
    monkeypatch.delitem(sys.modules, f"rllm.tracking.{sink}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"rllm\[{sink}\]"):
        require_sinks([sink])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real packages on a busy machine take longer than a run would wait for them."""
    monkeypatch.setattr("rllm.tracking.sinks.CLOSE_S", 120.0)


def open_real(name: str, tmp_path: Path) -> BufferedSink:
    run = SinkRun(
        name="lake-seed0", directory=tmp_path, config={"seed": 0, "task": {"environment": "frozenlake"}}
    )
    require_sinks([name])
    (sink,) = open_sinks([name], run)
    return sink


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    give(open_real("tensorboard", tmp_path))
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["after/greedy", "train/kl.max", "train/success"]
    assert [(each.step, each.value) for each in events.Scalars("train/success")] == [(0, 0.25), (1, 0.5)]


def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = open_real("wandb", tmp_path)
    give(sink)
    assert sink.num_failed == 0
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    for _ in range(600):  # its own process writes on after `finish`
        if b"train/success" in kept.read_bytes():
            break
        threading.Event().wait(0.05)
    assert b"train/success" in kept.read_bytes()


def test_mlflow_has_every_value_and_a_resumed_run_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):
        sink = open_real("mlflow", tmp_path)
        give(sink)
        assert sink.num_failed == 0
    client = importlib.import_module("mlflow.tracking").MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("rllm").experiment_id])
    assert run.data.params["task.environment"] == "frozenlake"
    history = client.get_metric_history(run.info.run_id, "train/success")
    assert [(each.step, each.value) for each in history][:2] == [(0, 0.25), (1, 0.5)]


def test_trackio_keeps_a_run_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its directory when it is imported
    monkeypatch.delitem(sys.modules, "rllm.tracking.trackio", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    sink = open_real("trackio", tmp_path)
    give(sink)
    assert sink.num_failed == 0
    assert [path.name for path in (tmp_path / "trackio").glob("rllm.*")]
    assert capsys.readouterr().out == "", "stdout is for what a command was asked for"


def test_otel_sends_gauges_to_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    sink = open_real("otel", tmp_path)
    give(sink)
    server.shutdown()
    server.server_close()
    assert sink.num_failed == 0
    message = importlib.import_module("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    points = [
        (
            metric.name,
            {each.key: each.value.string_value for each in point.attributes}["phase"],
            point.as_double,
        )
        for body in received
        for resource in message.ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.gauge.data_points
    ]
    assert {
        ("rllm.success", "train", 0.25),
        ("rllm.success", "train", 0.5),
        ("rllm.greedy", "after", 0.75),
    } <= set(points)
