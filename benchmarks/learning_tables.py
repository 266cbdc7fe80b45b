"""Every learning number and picture of README and docs, from benchmarks/results/learning.json.

    python benchmarks/learning_tables.py            rewrite the marked places and draw the pictures they show

    <!-- learning:begin table -->          all tasks
    <!-- learning:begin missed -->         which of them miss a floor, and which
    <!-- learning:begin table NAME -->     one task, seed by seed
    <!-- learning:begin line NAME -->      one task in half a sentence
    <!-- learning:begin curve NAME -->     its picture; `curve all` has every task
    <!-- learning:begin algorithms -->     algorithms side by side, from results/algorithms.json
    <!-- learning:begin pretrained -->     what a pretrained model learns, run by run
    <!-- learning:begin variants -->       the same with adapters and another model
    <!-- learning:begin beside -->         the same beside TRL
    <!-- learning:begin screened -->       what was tried for it
    ... <!-- learning:end -->

Nothing between the marks is written by hand. What was not measured, or with another configuration than the
one that ships, says so there; a test compares (`tests/benchmarks/test_learning.py`).
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorithm_tables import NO_STUDIES, draw_curves, text_of
from algorithm_tables import RESULTS as ALGORITHMS
from learning_blocks import ROOT, blocks, has_changed
from learning_floors import missed, missed_together, seconds_of
from pretrained_tables import pretrained_text

from rllm.files.atomic import write_atomic

RESULTS = ROOT / "benchmarks" / "results" / "learning.json"
PICTURES = ROOT / "docs" / "learning"
MARK = re.compile(r"<!-- learning:begin (\w+) ?([\w./-]*) -->(.*?)<!-- learning:end -->", re.DOTALL)
NOT_MEASURED = "not measured with this version"
COLORS = ("#1f6fb4", "#d1622b", "#3a923a")
COLUMNS = 4


def documents() -> list[Path]:
    """All that may hold marks."""
    return [
        ROOT / "README.md",
        *(
            path
            for part in ("docs", "examples", "benchmarks")
            for path in sorted((ROOT / part).rglob("*.md"))
        ),
    ]


def load_results(path: Path = RESULTS) -> dict[str, Any]:
    """Without tasks before the first measurement."""
    return json.loads(path.read_text()) if path.exists() else {"tasks": {}, "seeds": [], "split": "test"}


class Pages:
    """What the marked places hold, as a function of the results and of the settings that ship."""

    def __init__(
        self,
        results: Mapping[str, Any],
        shipped: Mapping[str, Mapping[str, Any]],
        algorithms: Mapping[str, Any] = NO_STUDIES,
    ) -> None:
        """`shipped`: block -> its settings now; what it was measured with stands in the results."""
        self.algorithms = algorithms
        self.tasks: dict[str, Any] = results["tasks"]
        self.seeds: list[int] = results["seeds"]
        self.stale = {
            name
            for name, each in self.tasks.items()
            if name not in shipped or has_changed(each["settings"], shipped[name])
        }
        self.digest = hashlib.sha256(json.dumps([results, algorithms], sort_keys=True).encode()).hexdigest()[
            :16
        ]

    def text(self, kind: str, name: str, page: Path) -> str:
        """Of one mark. Raises KeyError for one that means nothing."""
        return {
            "table": lambda: self._task_table(name) if name else self._table(),
            "missed": self._missed,
            "line": lambda: self._line(name),
            "curve": lambda: self._curve(name, page),
            "algorithms": lambda: self._algorithms(page),
            "pretrained": lambda: pretrained_text(kind, page),
            "screened": lambda: pretrained_text(kind, page),
            "variants": lambda: pretrained_text(kind, page),
            "beside": lambda: pretrained_text(kind, page),
        }[kind]()

    def is_measured(self, name: str) -> bool:
        return name in self.tasks and self.tasks[name]["skill"] is not None

    def _table(self) -> str:
        if not self.tasks:
            return f"**Learning: {NOT_MEASURED}** (`make learn` measures)."
        lines = [
            "| task | before, sampled | greedy | best without skill | trained, sampled | score | skill "
            "| distinct tasks | seconds | |",
            "|---|--:|--:|---|--:|--:|--:|--:|--:|---|",
            *(self._row(name) for name in self.tasks),
        ]
        return "\n".join([*lines, "", self._footnote(list(self.tasks))])

    def _row(self, name: str) -> str:
        task = self.tasks[name]
        runs = [each for each in task["runs"] if "failed" not in each]
        if not runs:
            return f"| {name} | {NOT_MEASURED} | | | | | | | | misses |"
        best = task["best_baseline"]
        verdict = "reaches every floor" if not missed(task) else "misses"
        cells = [
            _range([each["start"]["value"] for each in runs]),
            _range([each["start_greedy"]["value"] for each in runs]),
            f"{best} ({task['best_baseline_score']:.0f})" if best else "unknown",
            _range([each["trained"]["value"] for each in runs]),
            _with_interval(task["score"]),
            _with_interval(task["skill"]),
            f"{task['distinct']} of {task['tasks']}",
            _range([seconds_of(each) for each in runs]),
            verdict + (", **stale**: its configuration has changed since" if name in self.stale else ""),
        ]
        return f"| {name} | {' | '.join(cells)} |"

    def _task_table(self, name: str) -> str:
        if not self.is_measured(name):
            return f"**`{name}`: {NOT_MEASURED}.**"
        task = self.tasks[name]
        lines = [
            "| seed | before, sampled | before, greedy | trained, sampled | trained, greedy | score | skill "
            "| seconds |",
            "|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for run in task["runs"]:
            if "failed" in run:
                lines.append(f"| {run['seed']} | failed: {run['failed']} | | | | | | |")
                continue
            names = ("start", "start_greedy", "trained", "trained_greedy", "score", "skill")
            cells = [_with_interval(run[each]) for each in names]
            lines.append(f"| {run['seed']} | {' | '.join(cells)} | {seconds_of(run):.0f} |")
        return "\n".join([*lines, "", self._footnote([name])])

    def _footnote(self, names: Sequence[str]) -> str:
        """Where the figures are from."""
        mine = [self.tasks[name] for name in names]
        dates = {each["date"] for each in mine}
        versions = {f"rllm {each['rllm']} ({each['commit']})" for each in mine}
        stale = ", ".join(name for name in names if name in self.stale)
        remark = f" **Stale**: the configuration of {stale} has changed since." if stale else ""
        again = "".join(
            f" `{name}` was measured again after it was retuned: with an earlier configuration "
            f"({each['commit']}) its scores were {_listed([f'{score:.1f}' for score in each['scores']])}."
            for name in names
            for each in self.tasks[name].get("earlier", [])
        )
        return (
            f"In percent and points, with 95 % intervals over instances; seeds {_listed(self.seeds)}, run "
            f"once.{again} Measured {_listed(sorted(dates))} with {_listed(sorted(versions))}; "
            f"{sum(each['tried'] for each in mine)} settings had been tried on other seeds and tasks.{remark}"
        )

    def _missed(self) -> str:
        if not self.tasks:
            return f"Floors: {NOT_MEASURED}."
        lines = [f"- {name}: {'; '.join(why)}" for name, each in self.tasks.items() if (why := missed(each))]
        lines += [f"- all together: {why}" for why in missed_together(self.tasks)]
        return "\n".join(lines or ["No task misses a floor."])

    def _line(self, name: str) -> str:
        if not self.is_measured(name):
            return f"{NOT_MEASURED}"
        runs = [each for each in self.tasks[name]["runs"] if "failed" not in each]
        before, greedy, after = (
            _range([each[key]["value"] for each in runs]) for key in ("start", "start_greedy", "trained")
        )
        stale = " with an earlier configuration" if name in self.stale else ""
        return f"from {before} % sampled and {greedy} % greedy to {after} %{stale}"

    def _curve(self, name: str, page: Path) -> str:
        names = list(self.tasks) if name == "all" else [name]
        if not any(self.is_measured(each) for each in names):
            return f"*No picture: {NOT_MEASURED}.*"
        path = os.path.relpath(PICTURES / f"{name}.png", page.parent)
        what = "each task" if name == "all" else name
        return (
            f"![Success of {what} on validation tasks while training, a line a seed, with intervals]({path})"
        )

    def _algorithms(self, page: Path) -> str:
        text = text_of(self.algorithms)
        if not self.algorithms["studies"]:
            return text
        path = os.path.relpath(PICTURES / "algorithms.png", page.parent)
        return f"{text}\n\n![Success in training batches, mean over seeds with intervals]({path})"

    def pictures(self) -> dict[str, list[str]]:
        """Name of a picture -> the tasks in it, of those that any page shows."""
        curves = {
            match[2]
            for page in documents()
            for match in MARK.finditer(page.read_text())
            if match[1] == "curve"
        }
        tasks_of: dict[str, list[str]] = {}
        for name in sorted(curves):
            names = [each for each in (self.tasks if name == "all" else [name]) if self.is_measured(each)]
            if names:
                tasks_of[name] = names
        return tasks_of

    def rewritten(self, page: Path) -> str:
        """The page with its marked places filled in; a mark that ends its line has a paragraph of its own."""

        def fill(match: re.Match[str]) -> str:
            text = self.text(match[1], match[2], page)
            begin = match[0][: match[0].index("-->") + 3]
            space = "\n" if match[3].startswith("\n") else ""
            return f"{begin}{space}{text}{space}<!-- learning:end -->"

        return MARK.sub(fill, page.read_text())

    def draw(self, names: Sequence[str], path: Path) -> None:
        """One panel a task: validation success of each seed, and what the best policy without skill has."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns = min(COLUMNS, len(names))
        rows = -(-len(names) // columns)
        size = (4.0 * columns, 3.0 * rows) if len(names) > 1 else (9.0, 5.0)
        figure = Figure(figsize=size, dpi=90, layout="constrained")
        FigureCanvasAgg(figure)
        for place, name in enumerate(names, start=1):
            _panel(figure.add_subplot(rows, columns, place), name, self.tasks[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Source": self.digest})


def _panel(axes: Any, name: str, task: Mapping[str, Any]) -> None:
    for color, run in zip(COLORS, task["runs"], strict=False):
        if "failed" in run:
            continue
        steps = [0, *(point[0] for point in run["curve"])]
        start = run["start"]
        rates = [start["value"], *(100 * point[1] for point in run["curve"])]
        lows = [start["interval"][0], *(100 * point[2] for point in run["curve"])]
        highs = [start["interval"][1], *(100 * point[3] for point in run["curve"])]
        axes.plot(steps, rates, color=color, marker="o", markersize=3, label=f"seed {run['seed']}")
        axes.fill_between(steps, lows, highs, color=color, alpha=0.15, linewidth=0)
    if task["best_baseline"]:
        rate = 100 * task["baselines"][task["best_baseline"]]
        axes.axhline(rate, color="#8a8a8a", linestyle="--", linewidth=1, label=task["best_baseline"])
    axes.set_title(name, loc="left", fontsize=10)
    axes.set_ylim(-2, 102)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("success, %", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, loc="lower right", frameon=False)


def _range(values: Sequence[float]) -> str:
    low, high = round(min(values)), round(max(values))
    return f"{low}" if low == high else f"{low}–{high}"


def _with_interval(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "unknown"
    low, high = figure["interval"]
    return f"{figure['value']:.1f} ({low:.0f} to {high:.0f})"


def _listed(values: Sequence[object]) -> str:
    words = [str(each) for each in values]
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else "".join(words)


def shipped_pages() -> Pages:
    """Of the results in the repository."""
    study = json.loads(ALGORITHMS.read_text()) if ALGORITHMS.exists() else NO_STUDIES
    return Pages(load_results(), {name: block.settings for name, block in blocks().items()}, study)


def main() -> int:
    pages = shipped_pages()
    for page in documents():
        text = pages.rewritten(page)
        if text != page.read_text():
            write_atomic(page, text)
            print(f"{page.relative_to(ROOT)}: rewritten")
    for name, tasks in pages.pictures().items():
        pages.draw(tasks, PICTURES / f"{name}.png")
    if pages.algorithms["studies"]:
        draw_curves(pages.algorithms, PICTURES / "algorithms.png", pages.digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
