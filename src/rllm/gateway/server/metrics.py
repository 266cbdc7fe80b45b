"""The gateway's counts for people, scripts and Prometheus: Counts and Policy.health in, text and JSON out."""

from collections.abc import Mapping
from typing import Any

from rllm.gateway.server.counts import Counts, Histogram
from rllm.gateway.server.prometheus import Samples, histogram_text, metric_text

_PREFIX = "rllm_gateway_"


def prometheus_text(
    counts: Counts, policy: Mapping[str, Any], *, in_flight: int, sessions: int, uptime_s: float
) -> str:
    """Everything in the text format of Prometheus."""
    parts = [
        _metric(
            "calls_accepted_total", "counter", "Model calls that were accepted.", _one(counts.num_accepted)
        ),
        _metric(
            "calls_recorded_total",
            "counter",
            "Calls in the ledger.",
            _by("status", counts.recorded_by_status),
        ),
        _metric(
            "calls_errored_total", "counter", "Calls without an answer.", _by("code", counts.errors_by_code)
        ),
        _metric("calls_in_flight", "gauge", "Calls on their way.", _one(in_flight)),
        _metric(
            "retries_total", "counter", "Retries answered with an earlier call.", _one(counts.num_retries)
        ),
        _metric(
            "undelivered_total",
            "counter",
            "Recorded answers whose clients were gone.",
            _one(counts.num_undelivered),
        ),
        _metric("tokens_total", "counter", "Tokens of recorded calls.", _by("kind", counts.tokens)),
        _metric("responses_total", "counter", "HTTP responses.", _by("status", counts.responses)),
        _histogram("call_seconds", "From a call's request to its answer.", counts.latency),
        _histogram("first_token_seconds", "From a call's request to its first token.", counts.first_token),
        _metric("sessions_in_memory", "gauge", "Sessions in memory.", _one(sessions)),
        _metric("uptime_seconds", "gauge", "Since the gateway was started.", _one(uptime_s)),
        _metric(
            "policy_healthy", "gauge", "1 when calls can be answered.", _one(policy.get("healthy", True))
        ),
        _metric("policy_queued", "gauge", "Calls waiting for the engine.", _one(policy.get("queued", 0))),
        _metric(
            "policy_version",
            "gauge",
            "Policy versions that are served.",
            [({"engine": number}, each) for number, each in enumerate(_versions(policy))],
        ),
    ]
    return "".join(parts)


def health(
    counts: Counts,
    policy: Mapping[str, Any],
    *,
    writable: bool,
    in_flight: int,
    sessions: int,
    uptime_s: float,
    now: float,
) -> dict[str, Any]:
    """The body of GET /health. Holds no secret: it is answered to everybody."""
    num_ended, num_errored = counts.recent(now)
    return {
        "status": "ok" if writable and policy.get("healthy", True) else "unhealthy",
        "ledger": {"writable": writable},
        "uptime_s": round(uptime_s, 3),
        "in_flight": in_flight,
        "queued": policy.get("queued", 0),
        "policy_versions": _versions(policy),
        "sessions_in_memory": sessions,
        "calls": {
            "accepted": counts.num_accepted,
            "recorded": counts.recorded_by_status.total(),
            "errored": counts.errors_by_code.total(),
            "retried": counts.num_retries,
        },
        "last_minute": {
            "ended": num_ended,
            "errored": num_errored,
            "error_rate": num_errored / num_ended if num_ended else 0.0,
        },
        "policy": dict(policy),
    }


def _versions(policy: Mapping[str, Any]) -> list[int]:
    return [each for each in policy.get("policy_versions", ()) if isinstance(each, int)]


def _metric(name: str, kind: str, text: str, samples: Samples) -> str:
    return metric_text(f"{_PREFIX}{name}", kind, text, samples)


def _histogram(name: str, text: str, histogram: Histogram) -> str:
    return histogram_text(f"{_PREFIX}{name}", text, [({}, histogram)])


def _one(value: float) -> Samples:
    return [({}, value)]


def _by(label: str, counts: Mapping[Any, int]) -> Samples:
    return [({label: name}, count) for name, count in counts.items()]
