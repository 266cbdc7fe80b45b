"""The live view of a run.

    log(step, phase, metrics) ──► LiveView ──► terminal: a panel that is redrawn      ──► stderr
                                          └──► no terminal: a plain line every N steps, and every minute

stdout is for results, so nothing here writes to it. Metrics that the view knows, each of them optional:
`success`, `reward_mean`, `tokens_per_s`, `loss`, `step_s`, `total_steps` of the phase, `failed`
and `failed.KIND` (counts of this step; the view adds them up).
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rllm.tracking.base import Metric, ProgressSource, Tracker, Trackers
from rllm.tracking.pace import Reminder, StepPace
from rllm.tracking.screen import Screen
from rllm.tracking.sinks import as_tracker

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_PHASE = "train"
_LOOK_EVERY_S = 1.0
"""At an engine: to find the oldest among thousands of rollouts takes milliseconds."""
_OTHER = "other"
"""Failures that were counted without their kind."""
_TITLES = {
    "untrained": "measuring the untrained model",
    "warm_start": "warm start",
    "before": "measuring before training",
    "train": "training",
    "after": "measuring after training",
    "eval": "evaluating",
}


class LiveView:
    """A Tracker for the screen. Use it as a context manager; without one it prints plain lines."""

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "rllm train",
        plain_every: int = 10,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        elapsed_s: float = 0.0,
    ) -> None:
        """`elapsed_s`: of the command, before there was anything to see."""
        self._title = title
        self._plain_every = plain_every
        self._console = console or Screen(stderr=True)
        self._clock = clock
        self._before_s = elapsed_s
        self._started_s = clock() - elapsed_s
        self._phase = ""
        self._step = 0
        self._total_steps = total_steps
        self._total_train_steps = total_steps
        self._pace: StepPace | None = None
        """The pace of this phase from its first log on: a resumed run does not start at step 1."""
        self._advanced = False
        """Progress of a phase that logs once, at its end."""
        self._metrics: dict[str, Metric] = {}
        self._success: list[float] = []
        self._failed: Counter[str] = Counter()
        self._live: Live | None = None
        self._engine: ProgressSource | None = None
        self._looked_at_s = -_LOOK_EVERY_S
        self._rollouts = ""
        self._reminder = Reminder(self._remind, clock=clock)

    def __enter__(self) -> "LiveView":
        self._started_s = self._clock() - self._before_s
        if self._console.is_terminal:
            # stdout is for results: Rich would otherwise send what is printed there to this console.
            self._live = Live(
                console=self._console, get_renderable=self._panel, refresh_per_second=4, redirect_stdout=False
            )
            self._live.start()
        else:
            self._reminder.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def watch(self, engine: ProgressSource) -> None:
        """Show how many episodes `engine` has played, and its oldest rollout."""
        self._engine = engine

    def note(self, line: str) -> None:
        """A line that stays above the view."""
        self._console.print(Text(line, style="dim"), soft_wrap=True)

    def begin(self, phase: str) -> None:
        self._phase = phase
        self._step = 0
        self._metrics = {}
        self._pace = None
        self._advanced = False
        self._total_steps = self._total_train_steps if phase == _CURVE_PHASE else 0

    def advance(self, done: int, total: int) -> None:
        self._keep_pace(done)
        self._step, self._total_steps, self._advanced = done, total, True

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        new_phase = phase != self._phase or self._pace is None or self._advanced
        if phase != self._phase:
            self.begin(phase)
        if self._advanced:
            self._advanced, self._total_steps, self._pace = False, 0, None
        self._step = step + 1
        self._keep_pace(self._step)
        self._metrics = dict(metrics)
        self._total_steps = int(metrics.get("total_steps", self._total_steps))
        if phase == _CURVE_PHASE and "success" in metrics:
            self._success.append(float(metrics["success"]))
        self._count_failures(metrics)
        last = self._step == self._total_steps
        has_something = new_phase or self._step % self._plain_every == 0 or last or self._reminder.is_due()
        if self._live is None and has_something:
            self._reminder.note()
            self._console.print(self.line(), soft_wrap=True)

    def close(self) -> None:
        """Leave the last picture on the screen and give the terminal back."""
        self._reminder.__exit__()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self) -> str:
        """The state of the run in one line of plain text."""
        parts = [self._phase, self._progress(), *(f"{name} {value}" for name, value in self._numbers())]
        return "  ".join(part for part in parts if part)

    def rollouts(self) -> str:
        """Rollouts of the moment, in one line; empty while nobody does."""
        now_s = self._clock()
        if self._engine is not None and now_s - self._looked_at_s >= _LOOK_EVERY_S:
            self._looked_at_s = now_s
            self._rollouts = _summary(self._engine)
        return self._rollouts

    def _panel(self) -> RenderableType:
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(ratio=1)
        head.add_column(justify="right")
        head.add_row(
            Text(_TITLES.get(self._phase, self._phase or "starting"), style="bold"), self._progress()
        )
        parts: list[RenderableType] = [head]
        if self._total_steps:
            bar = ProgressBar(total=self._total_steps, completed=min(self._step, self._total_steps))
            parts.append(Padding(bar))  # a bare bar does not end its line
        parts.extend(self._number_rows(self._console.width - 4))
        if rollouts := self.rollouts():
            parts.append(Text(rollouts, style="dim", no_wrap=True, overflow="ellipsis"))
        if self._success:
            width = max(10, min(60, self._console.width - 24))
            parts.append(
                Text.assemble(("sampled success ", "dim"), (sparkline(self._success, width), "green"))
            )
        return Panel(Group(*parts), title=Text(self._title), title_align="left", border_style="dim")

    def _number_rows(self, width: int) -> list[Text]:
        """The numbers in as many rows as they need; a name is never parted from its value."""
        rows = [Text()]
        for name, value in self._numbers():
            cell = Text.assemble((f"{name} ", "dim"), (value, _STYLES.get(name, "")), "   ")
            if rows[-1].cell_len and rows[-1].cell_len + cell.cell_len > width:
                rows.append(Text())
            rows[-1].append_text(cell)
        return rows

    def _progress(self) -> str:
        if self._total_steps:
            return f"step {self._step}/{self._total_steps}"
        return ""

    def _numbers(self) -> list[tuple[str, str]]:
        numbers: list[tuple[str, str]] = []
        for key, name, form in _SHOWN:
            if key in self._metrics:
                numbers.append((name, form.format(float(self._metrics[key]))))
        if self._failed:
            kinds = [f"{kind} {count}" for kind, count in sorted(self._failed.items()) if kind != _OTHER]
            others = [f"{_OTHER} {self._failed[_OTHER]}"] if self._failed[_OTHER] else []
            numbers.append(("failed", ", ".join(kinds + others)))
        numbers.append(("elapsed", readable_seconds(self._clock() - self._started_s)))
        left_s = self._left_s()
        if left_s is not None:
            numbers.append(("left", readable_seconds(left_s)))
        return numbers

    def _count_failures(self, metrics: Mapping[str, Metric]) -> None:
        kinds = {
            name.removeprefix("failed."): int(value)
            for name, value in metrics.items()
            if name.startswith("failed.")
        }
        num_unnamed = int(metrics.get("failed", 0)) - sum(kinds.values())
        # Adding counters drops what is not above 0, so no kind is shown with a count of none.
        self._failed += Counter(kinds) + Counter({_OTHER: num_unnamed})

    def _left_s(self) -> float | None:
        return None if self._pace is None or not self._total_steps else self._pace.left_s(self._total_steps)

    def _keep_pace(self, done: int) -> None:
        if self._pace is None:
            self._pace = StepPace(self._clock)
        self._pace.step(done)

    def _remind(self) -> None:
        """A line where nothing was logged for a minute, as in a long evaluation."""
        if self._phase:
            rollouts = f"  ({text})" if (text := self.rollouts()) else ""
            self._console.print(f"{self.line()}{rollouts}", soft_wrap=True, markup=False)


@contextmanager
def on_screen(tracker: Tracker | None, total_steps: int, title: str) -> Iterator[Tracker]:
    """`tracker`, with a view of the run on the screen beside it, unless it is one itself.

    Who wants silence gives a LiveView of a `rich.console.Console(quiet=True)`.
    """
    if isinstance(tracker, LiveView):
        yield tracker
        return
    with LiveView(total_steps, title=title) as view:
        yield view if tracker is None else Trackers([as_tracker(tracker), view])


_SHOWN = (
    ("success", "success", "{:.1%}"),
    ("reward_mean", "reward", "{:.3f}"),
    ("reverse_kl", "reverse KL", "{:.4f}"),
    ("loss", "loss", "{:.4f}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ("step_s", "step takes", "{:.1f} s"),
    ("staleness_max", "staleness", "{:.0f}"),
    ("steps_under_way", "steps being sampled", "{:.0f}"),
    ("steps_waiting", "steps waiting", "{:.0f}"),
    ("waited_s", "the oldest waited", "{:.1f} s"),
    ("trainer_idle", "trainer idle", "{:.0%}"),
    ("sampler_idle", "sampler idle", "{:.0%}"),
)
_STYLES = {"success": "bold green", "failed": "bold red"}


def _summary(engine: ProgressSource) -> str:
    counts, live = engine.counts, engine.live()
    if not counts.in_flight:
        return ""
    oldest = f", the oldest {live[0]}" if live else ""
    return f"{counts.settled:,} episodes done, {counts.in_flight:,} in flight{oldest}"


def sparkline(rates: list[float], width: int) -> str:
    """Rates between 0 and 1 as bars of eight heights; more rates than `width` are averaged in equal runs."""
    if len(rates) > width:
        edges = [index * len(rates) // width for index in range(width + 1)]
        rates = [sum(rates[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    return "".join(_BARS[round(min(1.0, max(0.0, rate)) * (len(_BARS) - 1))] for rate in rates)


def readable_seconds(seconds: float) -> str:
    minutes, whole_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole_s:02d} s" if minutes else f"{whole_s} s"
