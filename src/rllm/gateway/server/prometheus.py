"""The text format of Prometheus (version 0.0.4): labelled samples in, lines out."""

from collections.abc import Iterable, Mapping
from typing import Any

from rllm.gateway.server.counts import BUCKETS_S, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Samples = Iterable[tuple[Mapping[str, Any], float]]


def metric_text(name: str, kind: str, text: str, samples: Samples) -> str:
    """One metric with its help, `text`. `kind`: counter or gauge."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {float(value):.17g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def histogram_text(name: str, text: str, samples: Iterable[tuple[Mapping[str, Any], Histogram]]) -> str:
    """One histogram a label set, in buckets of seconds."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
    for labels, histogram in samples:
        so_far = 0
        for bound, count in zip((*BUCKETS_S, "+Inf"), histogram.counts, strict=True):
            so_far += count
            lines.append(f"{name}_bucket{_labels({**labels, 'le': bound})} {so_far}")
        lines += [
            f"{name}_sum{_labels(labels)} {histogram.total:.17g}",
            f"{name}_count{_labels(labels)} {so_far}",
        ]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, Any]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(str(value))}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
