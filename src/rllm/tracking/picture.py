"""Learning curves as PNG pictures.

    metrics lines + summary ──► draw_learning_curve ──► curve.png         one run
    {name: metrics lines}   ──► draw_comparison     ──► comparison.png    several seeds or settings
    metrics lines           ──► draw_loss_curve     ──► curve.png         a supervised run

The only file that imports matplotlib, and only while it draws.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from rllm.errors import MissingExtraError
from rllm.files.atomic import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

XAxis = Literal["seconds", "steps"]

_SAMPLED, _GREEDY, _UNTRAINED, _INK = "#1f6fb4", "#d1622b", "#8a8a8a", "#333333"
_RUN_COLORS = ("#1f6fb4", "#d1622b", "#3a923a", "#8c5fb0", "#b5403f", "#7a6a58", "#cf6fb0", "#3fa7b0")
_LABEL_HEIGHT = 0.045
"""The height of one line of text, as a success rate."""
_AXES = (0.1, 0.12, 0.83, 0.8)
"""Left, bottom, width and height, as parts of the picture. A layout that fits itself to the texts takes twice
the time, and every run draws a picture."""
_LEGEND_ROW = 0.04
"""The height of one row of the legend below the axes, as a part of the picture."""


@dataclass(kw_only=True, slots=True)
class _Points:
    """Held-out success rates with their intervals, in the order of x."""

    x: list[float] = field(default_factory=list[float])
    rate: list[float] = field(default_factory=list[float])
    low: list[float] = field(default_factory=list[float])
    high: list[float] = field(default_factory=list[float])

    def add(self, x: float, rate: float, low: float | None, high: float | None) -> None:
        self.x.append(x)
        self.rate.append(rate)
        self.low.append(rate if low is None else low)
        self.high.append(rate if high is None else high)


def draw_learning_curve(
    metrics: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any] | None,
    path: Path,
    *,
    x_axis: XAxis = "seconds",
    title: str = "Learning curve",
) -> None:
    """Success of one run: each training batch as a thin line, held-out measurements as points with intervals.

    `metrics` are the lines of metrics.jsonl. Lines of phase `train` may carry `success`, `heldout_success`,
    `heldout_greedy` and `…_low`, `…_high` of each; `summary` may hold `untrained`, `before` and `after`, each
    with `success`, `success_interval`, `greedy` and `greedy_interval`, and `tasks` with the `title` of what
    was measured on.
    """
    figure, axes = _new_figure(title, x_axis)
    train = [line for line in metrics if line["phase"] == "train"]
    batches = [line for line in train if "success" in line]
    if batches:
        axes.plot(
            [_x(line, x_axis) for line in batches],
            [line["success"] for line in batches],
            color=_SAMPLED,
            alpha=0.4,
            linewidth=1.0,
            label="training batch, sampled",
        )
    else:
        axes.text(0.5, 0.5, "no training step yet", transform=axes.transAxes, ha="center", color=_UNTRAINED)
        axes.set_xticks([])
    untrained_report = (summary or {}).get("untrained")
    if untrained_report and untrained_report.get("success") is not None:
        axes.axhline(
            untrained_report["success"],
            color=_UNTRAINED,
            linestyle=(0, (4, 3)),
            linewidth=1.2,
            label=f"untrained model, sampled ({untrained_report['success']:.0%})",
        )
    ends: list[tuple[float, float, str]] = []
    tasks = (summary or {}).get("tasks", {}).get("title", "held-out tasks")
    for key, of_summary, color, marker, label in (
        ("heldout_success", "success", _SAMPLED, "o", f"{tasks}, sampled"),
        ("heldout_greedy", "greedy", _GREEDY, "s", f"{tasks}, greedy"),
    ):
        points = _heldout_points(metrics, summary, key, of_summary, x_axis)
        if points.x:
            _draw_points(axes, points, color, marker, label)
            ends.append((points.rate[-1], points.x[-1], color))
    _label_ends(axes, ends)
    _save(figure, axes, path)


def draw_comparison(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    path: Path,
    *,
    summaries: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
    x_axis: XAxis = "seconds",
    title: str = "Runs compared",
    mean_label: str = "",
) -> None:
    """Several runs in one picture: batches as thin lines, held-out sampled success as points, from before
    training on where `summaries` say what it was. With a `mean_label` also the mean of these points, where
    all runs were measured."""
    figure, axes = _new_figure(title, x_axis)
    points_of_runs: list[_Points] = []
    for index, (name, metrics) in enumerate(curves.items()):
        color = _RUN_COLORS[index % len(_RUN_COLORS)]
        batches = [line for line in metrics if line["phase"] == "train" and "success" in line]
        points = _heldout_points(metrics, summaries.get(name), "heldout_success", "success", x_axis)
        axes.plot(
            [_x(line, x_axis) for line in batches],
            [line["success"] for line in batches],
            color=color,
            alpha=0.35 if points.x else 0.9,
            linewidth=1.0,
            label=None if points.x else name,
        )
        if points.x:
            _draw_points(axes, points, color, "o", f"{name} ({points.rate[-1]:.0%} at the end)")
        points_of_runs.append(points)
    if mean_label:
        _draw_mean(axes, points_of_runs, mean_label)
    _save(figure, axes, path)


def draw_loss_curve(
    metrics: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    x_axis: XAxis = "steps",
    title: str = "Loss",
    unit: str = "loss",
    measured_on: str = "held-out rows",
) -> None:
    """Loss of one supervised run: each update as a thin line, measurements as points.

    Lines of phase `train` carry `loss` and may carry `heldout_loss`; those of `before` and `after` carry
    `loss`.
    """
    figure, axes = _new_figure(title, x_axis, unit=unit)
    train = [line for line in metrics if line["phase"] == "train"]
    if updates := [line for line in train if "loss" in line]:
        axes.plot(
            [_x(line, x_axis) for line in updates],
            [line["loss"] for line in updates],
            color=_SAMPLED,
            alpha=0.5,
            linewidth=1.0,
            label="each update",
        )
    first_x, last_x = _span(metrics, x_axis)
    places = {"before": first_x, "after": last_x}
    heldout = [
        (places.get(line["phase"], _x(line, x_axis)), line[key])
        for line in metrics
        for key in ("heldout_loss" if line["phase"] == "train" else "loss",)
        if key in line
    ]
    if heldout:
        xs, losses = zip(*heldout, strict=True)
        axes.plot(  # dotted: between two measurements nothing is known
            xs, losses, color=_GREEDY, marker="s", markersize=6, linestyle=":", label=measured_on
        )
        axes.annotate(
            f"{losses[-1]:.3f}",
            (xs[-1], losses[-1]),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=_GREEDY,
            fontsize=12,
            fontweight="bold",
            annotation_clip=False,
        )
    _save(figure, axes, path)


def _new_figure(title: str, x_axis: XAxis, *, unit: str = "success rate") -> tuple["Figure", "Axes"]:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "train") from error
    figure = Figure(figsize=(10, 6), dpi=100)
    axes = figure.add_axes(_AXES)
    axes.set_title(title, loc="left", fontsize=15, color=_INK, pad=12, y=1.0)
    axes.set_xlabel("seconds" if x_axis == "seconds" else "training step", fontsize=12, color=_INK)
    axes.set_ylabel(unit, fontsize=12, color=_INK)
    if unit == "success rate":
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=11, length=0, pad=6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    return figure, axes


def _draw_points(axes: "Axes", points: _Points, color: str, marker: str, label: str) -> None:
    # Rounding may put the end of an interval on the wrong side, and matplotlib refuses negative lengths.
    below = [max(0.0, rate - low) for rate, low in zip(points.rate, points.low, strict=True)]
    above = [max(0.0, high - rate) for rate, high in zip(points.rate, points.high, strict=True)]
    axes.errorbar(
        points.x,
        points.rate,
        yerr=[below, above],
        color=color,
        marker=marker,
        markersize=6,
        linewidth=2.0,
        elinewidth=1.2,
        capsize=3,
        label=label,
        zorder=3,
    )


def _draw_mean(axes: "Axes", points_of_runs: Sequence[_Points], label: str) -> None:
    """Draw the mean at each x at which all runs have a point."""
    rates_of_runs = [dict(zip(points.x, points.rate, strict=True)) for points in points_of_runs]
    xs = sorted(set[float].intersection(*(set(rates) for rates in rates_of_runs)))
    if not xs:
        return
    means = [fmean(rates[x] for rates in rates_of_runs) for x in xs]
    label = f"{label} ({means[-1]:.0%} at the end)"
    axes.plot(xs, means, color=_INK, marker="D", markersize=6, linewidth=3.5, label=label, zorder=4)


def _label_ends(axes: "Axes", ends: list[tuple[float, float, str]]) -> None:
    """Write the last value of each curve beside it; values that are close are moved apart."""
    lowest_free = 0.0
    for rate, x, color in sorted(ends):
        height = max(rate, lowest_free)
        lowest_free = height + _LABEL_HEIGHT
        axes.annotate(
            f"{rate:.0%}",
            (x, height),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=12,
            fontweight="bold",
            annotation_clip=False,
        )


def _heldout_points(
    metrics: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any] | None,
    key: str,
    of_summary: str,
    x_axis: XAxis,
) -> _Points:
    """Measured before training (at its start), between training steps, and after it (at its end)."""
    points = _Points()
    first_x, last_x = _span(metrics, x_axis)
    _add_summary(points, summary, "before", of_summary, first_x)
    measured_after = ((summary or {}).get("after") or {}).get(of_summary) is not None
    for line in metrics:
        # At the end, `after` is the measurement that counts: one at the same place would be drawn over it.
        if line["phase"] == "train" and key in line and not (measured_after and _x(line, x_axis) == last_x):
            points.add(_x(line, x_axis), line[key], line.get(f"{key}_low"), line.get(f"{key}_high"))
    _add_summary(points, summary, "after", of_summary, last_x)
    return points


def _add_summary(points: _Points, summary: Mapping[str, Any] | None, when: str, name: str, x: float) -> None:
    report = (summary or {}).get(when) or {}
    if report.get(name) is None:
        return
    low, high = report.get(f"{name}_interval") or (None, None)
    points.add(x, report[name], low, high)


def _span(metrics: Sequence[Mapping[str, Any]], x_axis: XAxis) -> tuple[float, float]:
    """Where training begins and ends on the x axis."""
    train = [_x(line, x_axis) for line in metrics if line["phase"] == "train"]
    if not train:
        return 0.0, 0.0
    before = [_x(line, x_axis) for line in metrics if line["phase"] == "before"]
    first_x = before[-1] if x_axis == "seconds" and before else 0.0
    return first_x, train[-1]


def _x(line: Mapping[str, Any], x_axis: XAxis) -> float:
    return float(line["time_s"] if x_axis == "seconds" else line["step"])


def _save(figure: "Figure", axes: "Axes", path: Path) -> None:
    axes.margins(x=0.04)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        ncols = 2 if len(handles) == 4 else 3  # four would make a row wider than the picture
        left, bottom, width, height = _AXES
        legend_height = _LEGEND_ROW * math.ceil(len(handles) / ncols)
        axes.set_position((left, bottom + legend_height, width, height - legend_height))
        figure.legend(
            handles,
            labels,
            loc="lower center",
            ncols=ncols,
            frameon=False,
            fontsize=11,
            labelcolor=_INK,
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)  # `savefig` draws twice
    write_atomic(path, png.getvalue())
