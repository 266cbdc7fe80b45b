# pyright: reportMissingImports=false
"""Numbers to MLflow, by its own variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

import os
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from rllm.errors import ConfigError, MissingExtraError
from rllm.tracking.base import Metric
from rllm.tracking.sinks import SinkRun, metric_names

try:
    from mlflow.entities import Metric as MlflowMetric
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "mlflow", "mlflow") from error

PROTOCOLS = ("file", "http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
_DIRECTORY = "rllm.directory"
MAX_PARAM_CHARS = 500


def require_usable() -> None:
    """Raises ConfigError where no address is set, or one that MLflow does not know."""
    address = os.environ.get("MLFLOW_TRACKING_URI", "")
    is_file = urlsplit(address).scheme in ("", "file")
    if not address or (is_file and not os.environ.get("MLFLOW_ALLOW_FILE_STORE")):
        raise ConfigError(
            f"`tracking.sinks` has mlflow, and MLFLOW_TRACKING_URI is {address!r}; set it to the address of "
            "a server, such as http://127.0.0.1:5000, or to file:///DIRECTORY with "
            "MLFLOW_ALLOW_FILE_STORE=true."
        )
    if not is_file and urlsplit(address).scheme.partition("+")[0] not in PROTOCOLS:
        raise ConfigError(
            f"MLFLOW_TRACKING_URI is {address!r}; it begins with one of {', '.join(PROTOCOLS)}."
        )


class MlflowSink:
    def __init__(self, run: SinkRun) -> None:
        self._client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rllm")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        directory = str(run.directory.absolute())
        quoted_path = directory.replace("\\", "\\\\").replace("'", "\\'")
        # The same run directory is the same run there, so that one that is resumed goes on.
        mine = self._client.search_runs(
            [experiment_id], f"tags.`{_DIRECTORY}` = '{quoted_path}'", max_results=1
        )
        if mine:
            self._id = mine[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            new_run = self._client.create_run(experiment_id, tags={_DIRECTORY: directory}, run_name=run.name)
            self._id = new_run.info.run_id
            settings = [Param(key, str(value)[:MAX_PARAM_CHARS]) for key, value in _flat(run.config).items()]
            # MLflow takes at most 100 parameters a request.
            for start in range(0, len(settings), 100):
                self._client.log_batch(self._id, params=settings[start : start + 100])

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        now = int(1000 * time.time())
        values = [
            MlflowMetric(name, value, now, step) for name, value in metric_names(phase, metrics).items()
        ]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def open_sink(run: SinkRun) -> MlflowSink:
    return MlflowSink(run)
