"""The figures of `algorithm_curves.py` as text and pictures: each variant beside the reference of its study,
paired by seed.

A difference is the mean over seeds of (variant - reference): both begin with the imitator of that seed and
are measured on the same tasks. Its interval is Student's, with one degree of freedom less than there are
seeds; where it covers 0 no difference is seen, whatever the estimate.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorithm_variants import (
    DEFAULT,
    IMITATION,
    MAIN,
    OURS,
    STUDIES,
    TRL,
    VARIANTS,
    kept_runs,
    reference_of,
    seeds_of,
    study_settings,
)

RESULTS = Path(__file__).resolve().parent / "results" / "algorithms.json"
# fmt: off
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)
# fmt: on
"""97.5 % quantiles of Student's t, from one degree of freedom on (Student 1908)."""
MARGIN = 5.0
"""Points that ours may lose against TRL, and that something may lose which is said to lose nothing."""
NO_STUDIES: dict[str, Any] = {"studies": {}}


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean over seeds; without bounds where there is one seed."""
    if len(values) < 2:
        return -math.inf, math.inf
    margin = T_95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
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
    parts += [
        f"**{label}: {study.task}.** Not run."
        for label, study in STUDIES.items()
        if label not in report["studies"]
    ]
    made = [
        run
        for study in report["studies"].values()
        for name, runs in study["runs"].items()
        if name != IMITATION
        for run in runs.values()
    ]
    dates, commits = sorted({each["date"] for each in made}), sorted({each["commit"] for each in made})
    note = (
        "Sampled success on validation tasks in percent, mean over seeds; differences in points beside the "
        "default or TRL, paired by seed, with 95 % intervals (Student), each by itself: of twenty "
        "comparisons of equals one is expected to look like a difference. Seconds are CPU seconds of the "
        f"training steps on one thread. Measured {' and '.join(dates)} ({', '.join(commits)})."
    )
    return "\n\n".join([*parts, note])


def _study(label: str, study: Mapping[str, Any]) -> str:
    runs, reference = study["runs"], reference_of(label)
    words = "the default" if reference == DEFAULT else "TRL"
    lines = [
        f"**{label}: {study['task']}, {study['steps']} steps.** {_start(runs)}{_stale(label, study)}",
        "",
        f"| | seeds | sampled | greedy | beside {words} | | seconds |",
        "|---|--:|--:|--:|--:|---|--:|",
        *(_row(name, runs, reference) for name in (*VARIANTS, TRL) if runs.get(name)),
    ]
    if runs.get(TRL) and runs.get(OURS):
        lines += ["", _beside_trl(runs)]
    claims = [_claim(name, runs) for name, each in VARIANTS.items() if each.claim and runs.get(name)]
    return "\n".join([*lines, *(["", *claims] if claims else []), *_missing(label, runs)])


def _stale(label: str, study: Mapping[str, Any]) -> str:
    """Which runs would now be others."""
    kept = kept_runs(label, study, study_settings(label, study["steps"]))
    stale = [name for name, runs in study["runs"].items() if runs.keys() != kept.get(name, {}).keys()]
    names = "all of it" if IMITATION in stale else ", ".join(stale)
    return f" **Stale**, because the configuration has changed since: {names}." if stale else ""


def _missing(label: str, runs: Mapping[str, Any]) -> list[str]:
    """What `make algorithms` has yet to run."""
    seeds_by_variant = seeds_of(label)
    never = [name for name in seeds_by_variant if not runs.get(name)]
    fewer = [
        f"{name} ({len(runs[name])} of {num_seeds} seeds)"
        for name, num_seeds in seeds_by_variant.items()
        if runs.get(name) and len(runs[name]) < num_seeds
    ]
    lines = [f"Not run: {'; '.join(never)}."] if never else []
    lines += [f"Run with fewer seeds than meant: {'; '.join(fewer)}."] if fewer else []
    return ["", " ".join(lines)] if lines else []


def _best_constant(runs: Mapping[str, Any]) -> tuple[str, float]:
    """The policy without skill that is paid most, and what it has; an empty name where nobody knows any."""
    imitator = next(iter(runs[IMITATION].values()))
    constants = {name: mean for name, mean in imitator["baselines"].items() if name != "optimum"}
    return max(constants.items(), key=lambda pair: pair[1], default=("", 0.0))


def _start(runs: Mapping[str, Any]) -> str:
    """What needs no reinforcement."""
    imitators = list(runs[IMITATION].values())
    best, mean = _best_constant(runs)
    constant = f"; `{best}` has {100 * mean:.0f} %" if best else ""
    sampled, greedy = (
        100 * statistics.mean(each[way] for each in imitators) for way in ("sampled", "greedy")
    )
    return f"The imitator has {sampled:.0f} % sampled, {greedy:.0f} % greedy{constant}."


def _row(name: str, runs: Mapping[str, Any], reference: str) -> str:
    mine = list(runs[name].values())
    sampled, greedy = (100 * statistics.mean(each[way] for each in mine) for way in ("sampled", "greedy"))
    seconds = statistics.mean(each["cpu_s"] for each in mine)
    beside, sentence = "", ""
    if name != reference and (pairs := differences(runs, name, reference)):
        interval = interval_of(pairs)
        beside, sentence = _shown(pairs), verdict(interval) if len(pairs) > 1 else ""
    return f"| {name} | {len(mine)} | {sampled:.1f} | {greedy:.1f} | {beside} | {sentence} | {seconds:.0f} |"


def _shown(values: Sequence[float]) -> str:
    low, high = interval_of(values)
    ends = "one seed" if math.isinf(low) else f"{low:+.1f} to {high:+.1f}"
    return f"{statistics.mean(values):+.1f} ({ends})"


def _beside_trl(runs: Mapping[str, Any]) -> str:
    pairs = differences(runs, OURS, TRL)
    seeds = [seed for seed in runs[OURS] if seed in runs[TRL]]
    ratios = [runs[TRL][seed]["cpu_s"] / runs[OURS][seed]["cpu_s"] for seed in seeds]
    theirs = 100 * statistics.mean(runs[TRL][seed]["sampled"] for seed in seeds)
    spread = f", {statistics.stdev(pairs):.0f} from seed to seed" if len(pairs) > 1 else ""
    word = "met" if interval_of(pairs)[0] >= -MARGIN else "**missed**"
    return (
        f"TRL's GRPOTrainer, same imitators, tasks, tokens, batches and rate, comes to {theirs:.1f} "
        f"({_seeds(len(seeds))}): ours with AdamW is {_shown(pairs)} points beside it{spread} (a lower end "
        f"of -{MARGIN:g} is asked for: {word}) and takes 1/{statistics.mean(ratios):.1f} of the CPU seconds."
    )


def _claim(name: str, runs: Mapping[str, Any]) -> str:
    variant, pairs = VARIANTS[name], differences(runs, name, DEFAULT)
    if not pairs:
        return f"- {name}: {variant.claim}. Not compared."
    return f"- {name}: {variant.claim}. {reproduced(variant.expects, interval_of(pairs))}: {_shown(pairs)}."


def reproduced(expects: str, interval: tuple[float, float]) -> str:
    """Whether a claim was, by the interval of the difference: that two are equal is shown by none that is
    wide."""
    low, high = interval
    if expects in ("better", "worse"):
        found = verdict(interval)
        return "Reproduced" if found == expects else f"Not reproduced, {found}"
    if expects == "no worse":
        low, high = -high, -low
    if high <= MARGIN:
        return "Reproduced"
    return "Not reproduced" if low > 0.0 else "Cannot be told from so few runs"


def draw_curves(report: Mapping[str, Any], path: Path, digest: str) -> None:
    """A panel for each study: success in training batches, mean over seeds with its interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    main = [TRL, OURS, *(name for name, each in VARIANTS.items() if each.seeds >= MAIN)]
    figure = Figure(figsize=(7.0 * len(report["studies"]), 5.0), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    for place, (label, study) in enumerate(report["studies"].items(), start=1):
        axes = figure.add_subplot(1, len(report["studies"]), place)
        for name, runs in study["runs"].items():
            if name in main:  # more lines cannot be told apart
                _curve(axes, name, [each["curve"] for each in runs.values()])
        for way, style in (("sampled", ":"), ("greedy", "--")):
            start = statistics.mean(each[way] for each in study["runs"][IMITATION].values())
            axes.axhline(start, color="#8a8a8a", linestyle=style, linewidth=1, label=f"imitator, {way}")
        best, mean = _best_constant(study["runs"])
        if best:
            axes.axhline(mean, color="#b5403f", linestyle="--", linewidth=1, label=best)
        axes.set_title(f"{label}: {study['task']}", loc="left", fontsize=11)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("step")
        axes.set_ylabel("success in training batches")
        axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Source": digest})


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _curve(axes: Any, name: str, curves: Sequence[Sequence[float]]) -> None:
    by_step = list(zip(*curves, strict=False))
    means = [statistics.mean(each) for each in by_step]
    ends = [interval_of(each) for each in by_step]
    steps = range(1, len(means) + 1)
    (line,) = axes.plot(steps, means, linewidth=1.5, label=f"{name}, {_seeds(len(curves))}")
    if len(curves) == 1:
        return
    axes.fill_between(
        steps,
        [low for low, _ in ends],
        [high for _, high in ends],
        color=line.get_color(),
        alpha=0.1,
        linewidth=0,
    )
