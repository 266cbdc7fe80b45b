"""The counts of workers for Prometheus: runtimes in, text out."""

from collections.abc import Callable, Collection
from typing import Any

from rllm.contracts.contract import RunStatus
from rllm.gateway.server.prometheus import Samples, histogram_text, metric_text
from rllm.worker.runtime import WorkerRuntime

_PREFIX = "rllm_worker_"


def prometheus_text(workers: Collection[WorkerRuntime]) -> str:
    """Everything since the start of the process, by worker."""

    def metric(name: str, kind: str, text: str, value: Callable[[WorkerRuntime], float]) -> str:
        samples = [(_labels(each), value(each)) for each in workers]
        return metric_text(f"{_PREFIX}{name}", kind, text, samples)

    def counter(name: str, text: str) -> str:
        return metric(f"{name}_total", "counter", text, lambda each: each.counts[name])

    requests: Samples = [
        (_labels(each) | {"status": str(status)}, each.counts[status])
        for each in workers
        for status in RunStatus
    ]
    tokens: Samples = [
        (_labels(each) | {"kind": kind}, each.counts[f"{kind}_tokens"])
        for each in workers
        for kind in ("prompt", "completion")
    ]
    durations = [(_labels(each), each.durations) for each in workers]
    return "".join(
        (
            metric_text(f"{_PREFIX}requests_total", "counter", "Requests that were answered.", requests),
            counter("attempts", "Attempts that were begun."),
            counter("joined", "Requests that joined a run under way."),
            counter("replayed", "Requests that were answered from the store."),
            metric(
                "refused_total",
                "counter",
                "Requests for which there was no room.",
                lambda each: each.admission.num_refused,
            ),
            counter("model_calls", "Model calls of attempts that ended."),
            metric_text(f"{_PREFIX}tokens_total", "counter", "Tokens of those calls.", tokens),
            metric("cost_total", "counter", "Their cost, where prices are set.", lambda each: each.cost),
            metric("running", "gauge", "Runs that have room.", lambda each: each.admission.num_running),
            metric("waiting", "gauge", "Runs that wait for room.", lambda each: each.admission.num_waiting),
            histogram_text(f"{_PREFIX}run_seconds", "From a run's request to its answer.", durations),
        )
    )


def _labels(worker: WorkerRuntime) -> dict[str, Any]:
    return {"worker": worker.contract.id}
