"""The figures of `algorithm_curves.py` as text and pictures: each variant beside the default, paired by seed.

A difference is the mean over seeds of (variant - default): both begin with the imitator of that seed and are
measured on the same tasks. Its interval is Student's, with one degree of freedom less than there are seeds;
where it covers 0 no difference is seen, whatever the estimate.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorithm_variants import DEFAULT, VARIANTS

RESULTS = Path(__file__).resolve().parent / "results" / "algorithms.json"
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""97.5 % quantiles of Student's t, by degrees of freedom (Student 1908)."""
MARGIN = -5.0
"""Points that ours may lose against TRL."""
TRL, OURS = "TRL, GRPO with AdamW", "AdamW"


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean over seeds; without bounds where there is one seed."""
    if len(values) < 2:
        return -math.inf, math.inf
    margin = T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - margin, statistics.mean(values) + margin


def differences(runs: Mapping[str, Any], name: str, other: str) -> list[float]:
    """Sampled success in points, for every seed that both have."""
    mine, theirs = runs.get(name, {}), runs.get(other, {})
    return [100.0 * (mine[seed]["sampled"] - theirs[seed]["sampled"]) for seed in mine if seed in theirs]


def verdict(interval: tuple[float, float]) -> str:
    if interval[0] > 0.0:
        return "better"
    return "worse" if interval[1] < 0.0 else "no difference seen"


def text_of(report: Mapping[str, Any]) -> str:
    """Markdown: a table for each study."""
    if not report["studies"]:
        return "**Algorithms side by side: not measured with this version** (`make algorithms` measures)."
    parts = [_study(label, each) for label, each in report["studies"].items()]
    note = (
        "Sampled success on validation tasks in percent, mean over seeds; differences in points beside the "
        "default, paired by seed, with 95 % intervals (Student). "
        f"Measured {report['date']} ({report['commit']})."
    )
    return "\n\n".join([*parts, note])


def _study(label: str, study: Mapping[str, Any]) -> str:
    runs = study["runs"]
    lines = [
        f"**{label}: {study['task']}, {study['steps']} steps.** {_start(runs)}",
        "",
        "| | seeds | sampled | greedy | beside the default | | seconds |",
        "|---|--:|--:|--:|--:|---|--:|",
        *(_row(name, runs) for name in runs if name not in ("imitation", TRL) and runs[name]),
    ]
    if runs.get(TRL):
        lines += ["", _beside_trl(runs)]
    claims = [_claim(name, runs) for name, each in VARIANTS.items() if each.claim and runs.get(name)]
    return "\n".join([*lines, *(["", *claims] if claims else [])])


def _best_constant(runs: Mapping[str, Any]) -> tuple[str, float]:
    """The policy without skill that is paid most, and what it has; an empty name where nobody knows any."""
    imitator = next(iter(runs["imitation"].values()))
    constants = {name: mean for name, mean in imitator["baselines"].items() if name != "optimum"}
    return max(constants.items(), key=lambda pair: pair[1], default=("", 0.0))


def _start(runs: Mapping[str, Any]) -> str:
    """What needs no reinforcement."""
    imitators = list(runs["imitation"].values())
    best, mean = _best_constant(runs)
    constant = f"; `{best}` has {100 * mean:.0f} %" if best else ""
    sampled, greedy = (
        100 * statistics.mean(each[way] for each in imitators) for way in ("sampled", "greedy")
    )
    return f"The imitator has {sampled:.0f} % sampled, {greedy:.0f} % greedy{constant}."


def _row(name: str, runs: Mapping[str, Any]) -> str:
    mine = list(runs[name].values())
    sampled, greedy = (100 * statistics.mean(each[way] for each in mine) for way in ("sampled", "greedy"))
    seconds = statistics.mean(each["seconds"] for each in mine)
    beside, sentence = "", ""
    if name != DEFAULT and (pairs := differences(runs, name, DEFAULT)):
        interval = interval_of(pairs)
        beside, sentence = _shown(pairs), verdict(interval)
    return f"| {name} | {len(mine)} | {sampled:.1f} | {greedy:.1f} | {beside} | {sentence} | {seconds:.0f} |"


def _shown(values: Sequence[float]) -> str:
    low, high = interval_of(values)
    ends = "one seed" if math.isinf(low) else f"{low:+.1f} to {high:+.1f}"
    return f"{statistics.mean(values):+.1f} ({ends})"


def _beside_trl(runs: Mapping[str, Any]) -> str:
    pairs = differences(runs, OURS, TRL)
    seeds = [seed for seed in runs[OURS] if seed in runs[TRL]]
    ratios = [runs[TRL][seed]["seconds"] / runs[OURS][seed]["seconds"] for seed in seeds]
    verdict = "met" if interval_of(pairs)[0] >= MARGIN else "**missed**"
    return (
        "TRL's GRPOTrainer, same imitators, tasks, tokens, batches and rate: ours is "
        f"{_shown(pairs)} points beside it (a lower end of {MARGIN:g} is asked for: {verdict}) and takes "
        f"1/{statistics.mean(ratios):.1f} of the seconds."
    )


def _claim(name: str, runs: Mapping[str, Any]) -> str:
    pairs = differences(runs, name, DEFAULT)
    sentence = verdict(interval_of(pairs)) if pairs else "not compared"
    return f"- {name}: {VARIANTS[name].claim}. Here: {sentence}{f', {_shown(pairs)}' if pairs else ''}."


def draw_curves(report: Mapping[str, Any], path: Path, digest: str) -> None:
    """A panel for each study: success in training batches, mean over seeds with its interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0 * len(report["studies"]), 5.0), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    for place, (label, study) in enumerate(report["studies"].items(), start=1):
        axes = figure.add_subplot(1, len(report["studies"]), place)
        for name, runs in study["runs"].items():
            if name != "imitation" and len(runs) > 3:  # the main ones: more lines cannot be told apart
                _curve(axes, name, [each["curve"] for each in runs.values()])
        for way, style in (("sampled", ":"), ("greedy", "--")):
            start = statistics.mean(each[way] for each in study["runs"]["imitation"].values())
            axes.axhline(start, color="#8a8a8a", linestyle=style, linewidth=1, label=f"imitator, {way}")
        best, mean = _best_constant(study["runs"])
        if best:
            axes.axhline(mean, color="#b5403f", linestyle="--", linewidth=1, label=best)
        axes.set_title(f"{label}: {study['task']}", loc="left", fontsize=11)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("step")
        axes.set_ylabel("success in training batches")
        axes.legend(fontsize=8, loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Source": digest})


def _curve(axes: Any, name: str, curves: Sequence[Sequence[float]]) -> None:
    by_step = list(zip(*curves, strict=False))
    means = [statistics.mean(each) for each in by_step]
    ends = [interval_of(each) for each in by_step]
    steps = range(1, len(means) + 1)
    (line,) = axes.plot(steps, means, linewidth=1.5, label=name)
    axes.fill_between(
        steps,
        [low for low, _ in ends],
        [high for _, high in ends],
        color=line.get_color(),
        alpha=0.1,
        linewidth=0,
    )
