"""Where a run's numbers go: a file, the screen, a picture."""

from rllm.tracking.base import Metric, Tracker, Trackers
from rllm.tracking.console import LiveView
from rllm.tracking.jsonl import JsonlTracker, read_metrics, truncate_after
from rllm.tracking.picture import draw_comparison, draw_learning_curve

__all__ = [
    "JsonlTracker",
    "LiveView",
    "Metric",
    "Tracker",
    "Trackers",
    "draw_comparison",
    "draw_learning_curve",
    "read_metrics",
    "truncate_after",
]
