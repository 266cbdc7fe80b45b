"""The look of results: stdout for what was asked, stderr for what is going on meanwhile."""

import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding, PaddingDimensions
from rich.table import Table
from rich.text import Text

from rllm.cli.command import elapsed_s, fold
from rllm.tracking.console import readable_seconds
from rllm.tracking.screen import Screen

PIPED_WIDTH = 140
"""Columns where there is no terminal to ask: nobody wants a table folded to 80 in a file."""


def out() -> Screen:
    """stdout: results."""
    return _console(stderr=False)


def err() -> Screen:
    """stderr: progress and remarks."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Screen:
    console = Screen(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def print_sentence(console: Console, sentence: str | Text, style: str = "") -> None:
    """Print prose, folded between words on a terminal; in a file a sentence is one line."""
    text = sentence if isinstance(sentence, Text) else Text(sentence, style=style)
    if console.is_terminal or "COLUMNS" in os.environ:
        text.plain = fold(text.plain, console.width)
    console.print(text, soft_wrap=True)


_SAME = 1e-6
"""Difference of a mean reward from a success rate that is rounding."""
PROSE_WIDTH = 24
"""Width of a column of sentences, before another column gives way to it."""


class FittingTable:
    """An open table whose columns have priorities: where the screen is too narrow, whole columns are left
    out, and named below it. What is shown is never cut, so a name can be typed as it stands."""

    def __init__(
        self, columns: Sequence[str], right: Collection[str], prose: Collection[str], spare: Sequence[str]
    ) -> None:
        self.padding: PaddingDimensions = (0, 1)
        self._columns, self._right, self._prose = list(columns), right, prose
        self._spare = [columns.index(name) for name in spare]
        """Those that may go, the last one first."""
        self._rows: list[tuple[tuple[str | Text, ...], bool]] = []

    def add_row(self, *cells: str | Text, end_section: bool = False) -> None:
        self._rows.append((cells, end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        places, spare = list(range(len(self._columns))), list(self._spare)
        while self._width(places, console, options) > options.max_width and spare:
            places.remove(spare.pop())
        yield self._table(places, is_folded=self._width(places, console, options) > options.max_width)
        if more := [name for place, name in enumerate(self._columns) if place not in places and name]:
            yield Text(f"On a wider screen: {', '.join(more)}.", style="dim")

    def _width(self, places: list[int], console: Console, options: ConsoleOptions) -> int:
        """Columns of the screen that the table takes at least, with nothing folded but sentences."""
        plain_table = self._table(places, prose_width=PROSE_WIDTH)
        return Measurement.get(console, options.update(max_width=10_000), plain_table).maximum

    def _table(self, places: list[int], *, is_folded: bool = False, prose_width: int | None = None) -> Table:
        plain_table = Table(box=SIMPLE, header_style="dim", pad_edge=False, padding=self.padding)
        for place in places:
            name = self._columns[place]
            is_prose = name in self._prose
            plain_table.add_column(
                name,
                justify="right" if name in self._right else "left",
                no_wrap=not (is_prose or is_folded),
                overflow="fold",
                max_width=prose_width if is_prose else None,
            )
        for cells, end_section in self._rows:
            plain_table.add_row(*(cells[place] for place in places), end_section=end_section)
        return plain_table


def table(
    *columns: str,
    right: Collection[str] = (),
    prose: Collection[str] = (),
    spare: Sequence[str] | None = None,
) -> FittingTable:
    """An open table; the columns named in `right` hold numbers, those in `prose` sentences.

    `spare`: columns that may be left out, the last one first; by default all but the first one, those of
    sentences after the others.
    """
    if spare is None:
        spare = [name for name in columns[1:] if name in prose]
        spare += [name for name in columns[1:] if name not in prose]
    return FittingTable(columns, right, prose, spare)


def rate(value: float | None) -> Text:
    """A success rate as a percentage, coloured by how good it is."""
    if value is None:
        return Text("–", style="dim")
    style = "green" if value >= 0.9 else "yellow" if value >= 0.35 else "red"
    return Text(f"{value:.1%}", style=style)


def rate_with_interval(value: float | None, interval: Sequence[float] | None) -> Text:
    """`93.4 %` and its 95 % interval, both in percent."""
    text = rate(value)
    if value is not None and interval:
        text.append(f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]", style="dim")
    return text


def score_with_interval(value: float | None, interval: Sequence[float] | None) -> Text:
    """`91.2` and its 95 % interval: 0 is what chance comes to, 100 the optimum."""
    text = Text("–", style="dim") if value is None else Text(f"{value:.1f}")
    if interval:
        text.append(f" [{interval[0]:.1f}, {interval[1]:.1f}]", style="dim")
    return text


def is_partial(mean_reward: float | None, success: float | None) -> bool:
    """Whether rewards say more than success does."""
    return mean_reward is not None and abs(mean_reward - (success or 0.0)) > _SAME


def mean_return(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def success_table(reports: Mapping[str, Mapping[str, Any] | None]) -> FittingTable:
    """Label -> a report of summary.json: sampled and greedy success side by side, the sampled return where it
    is another number, and the sampled score where chance and the optimum are known."""
    has_scores = any("score" in (report or {}) for report in reports.values())
    has_returns = any(
        is_partial(report.get("return"), report.get("success")) for report in reports.values() if report
    )
    reports_table = table(
        "",
        "sampled",
        "greedy",
        *(("return",) if has_returns else ()),
        *(("score, of 100",) if has_scores else ()),
    )
    reports_table.padding = (0, 1, 0, 0)  # three columns with intervals fit a shell of 80 columns
    for label, report in reports.items():
        measures = report or {}
        reports_table.add_row(
            label,
            rate_with_interval(measures.get("success"), measures.get("success_interval")),
            rate_with_interval(measures.get("greedy"), measures.get("greedy_interval")),
            *((mean_return(measures.get("return")),) if has_returns else ()),
            *(
                (score_with_interval(measures.get("score"), measures.get("score_interval")),)
                if has_scores
                else ()
            ),
        )
    return reports_table


def facts(rows: Iterable[tuple[str, str | Text]]) -> Padding:
    """Names and values, one pair a line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, value if isinstance(value, Text) else Text(value))
    return Padding(grid, (0, 0, 0, 2), expand=False)


def took(work_s: float, details: str) -> Text:
    """The time since the command was typed, and that of all work on the run, which `runs show` has as well:
    a resumed run was worked on before, and starting a process is no work on it."""
    return Text.assemble(
        f"Took {readable_seconds(elapsed_s())}; work on the run {readable_seconds(work_s)}",
        (f" ({details})", "dim"),
    )


def phase_list(phase_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {readable_seconds(spent_s)}" for name, spent_s in phase_s.items())


def print_next(console: Screen, commands: Iterable[tuple[Sequence[str], str]]) -> None:
    """Print the commands to type next: (words, their effect). Lines are never folded, so that they can be
    copied.

    Purposes stand under each other, but for those of commands that leave no room for one.
    """
    lines = [(shlex.join(words), purpose) for words, purpose in commands]
    fits = [len(line) for line, purpose in lines if len(line) + len(purpose) + 4 <= console.width]
    width = max(fits, default=0)
    console.print("\nNext:")
    for line, purpose in lines:
        text = Text.assemble("  ", (f"{line:<{width}}", "bold"), "  ", (purpose, "dim"))
        console.print(text, soft_wrap=True)
