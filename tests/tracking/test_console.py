import io
import sys

import pytest
from rich.console import Console

from rllm.engine import EpisodeCounts, LiveRollout
from rllm.tracking.console import LiveView, readable_seconds, sparkline
from rllm.types.episode import Outcome
from rllm.types.task import EpisodeId


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_one_plain_line_is_printed_every_few_steps() -> None:
    console, clock = _console(terminal=False), _Clock()
    with LiveView(25, plain_every=10, console=console, clock=clock) as view:
        view.log(0, "untrained", {"success": 0.01})
        for step in range(25):
            clock.now_s += 2.0
            view.log(step, "train", {"success": (step + 1) / 25, "reward_mean": 0.5})
    lines = _text(console).splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["untrained", "success 1.0%"],
        ["train", "step 1/25"],
        ["train", "step 10/25"],
        ["train", "step 20/25"],
        ["train", "step 25/25"],
    ]
    assert lines[2].endswith("elapsed 20 s  left 30 s")


def test_a_phase_that_measures_shows_how_far_it_is_and_then_its_numbers() -> None:
    console, clock = _console(terminal=False), _Clock()
    view = LiveView(25, console=console, clock=clock)
    view.begin("before")
    view.advance(0, 512)
    clock.now_s = 4.0
    view.advance(128, 512)
    assert "step 128/512" in view.line()
    assert view.line().endswith("left 12 s")
    view.log(0, "before", {"success": 0.5})
    assert _text(console).startswith("before  success 50.0%  elapsed 4 s")


def test_failures_are_added_up_by_kind() -> None:
    view = LiveView(10, console=_console(terminal=False), clock=_Clock())
    view.log(1, "train", {"failed": 3, "failed.timeout": 2})
    view.log(2, "train", {"failed": 1, "failed.error": 1})
    assert "failed error 1, timeout 2, other 1" in view.line()


def test_the_time_left_of_a_resumed_run_comes_from_its_own_steps() -> None:
    clock = _Clock()
    view = LiveView(60, console=_console(terminal=False), clock=clock)
    view.log(49, "train", {})
    assert "left" not in view.line()
    clock.now_s = 3.0
    view.log(50, "train", {})
    assert view.line().endswith("left 27 s")


def test_a_phase_may_bring_its_own_number_of_steps() -> None:
    view = LiveView(60, console=_console(terminal=False), clock=_Clock())
    view.log(4, "warm_start", {"total_steps": 40})
    assert "step 5/40" in view.line()
    view.log(0, "train", {})
    assert "step 1/60" in view.line()


def test_a_terminal_shows_the_panel_with_its_curve_and_stdout_stays_free(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = _console(terminal=True)
    with LiveView(2, console=console, clock=_Clock()) as view:
        stdout = sys.stdout
        view.log(0, "train", {"success": 0.0, "tokens_per_s": 1234.0})
        view.log(1, "train", {"success": 1.0, "tokens_per_s": 1234.0})
        print('{"result": 1}')
        assert sys.stdout is stdout
    assert capsys.readouterr().out == '{"result": 1}\n'
    for expected in ("training", "step 2/2", "success 100.0%", "tokens/s 1,234", "▁█"):
        assert expected in _text(console)


def test_the_view_writes_to_stderr_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(1) as view:
        view.log(0, "train", {"success": 1.0})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "train  step 1/1  success 100.0%" in captured.err


def test_a_long_curve_is_averaged_into_its_width() -> None:
    assert sparkline([0.0, 1.0], 10) == "▁█"
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"
    assert sparkline([-1.0, 2.0], 4) == "▁█"
    assert len(sparkline([0.5] * 61, 60)) == 60


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (7384, "2 h 03 min")]
)
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text


class _Engine:
    """Two rollouts, of which one hangs."""

    def __init__(self) -> None:
        self.counts = EpisodeCounts(submitted=1_200, in_flight=1_200)
        self.counts.settle(Outcome.SCORED, 1_198)
        self.looks = 0

    def live(self) -> list[LiveRollout]:
        self.looks += 1
        lakes = (("lake-7", 41.0, 3, "environment.step"), ("lake-9", 0.2, 1, "model"))
        return [
            LiveRollout(episode=EpisodeId(task_id=name), age_s=age_s, turn=turn, waits_for=what)
            for name, age_s, turn, what in lakes
        ]


def test_episodes_done_and_the_oldest_rollout_are_shown_and_looked_up_once_a_second() -> None:
    console, clock, engine = _console(terminal=True), _Clock(), _Engine()
    with LiveView(10, console=console, clock=clock) as view:
        assert view.rollouts() == ""
        view.watch(engine)
        said = view.rollouts()
        assert said == (
            "1,198 episodes done, 2 in flight, the oldest lake-7:0, 41.0 s old, in turn 3, "
            "waits for environment.step"
        )
        assert (view.rollouts(), engine.looks) == (said, 1)
        engine.counts.settle(Outcome.TRUNCATED, 2)
        clock.now_s = 1.0
        assert view.rollouts() == ""
        view.log(0, "train", {"success": 0.5})
    assert "1,198 episodes done" not in _text(console)
