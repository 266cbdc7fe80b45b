"""The time that is left, and lines while nothing happens."""

import pytest

from rllm.tracking.pace import Reminder, StepPace


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_one_very_long_answer_changes_the_estimate_little() -> None:
    clock = Clock()
    pace = StepPace(clock)
    for done in range(20):
        pace.step(done)
        clock.now_s += 600.0 if done == 7 else 2.0
    left_s = pace.left_s(40)
    assert left_s == pytest.approx(42.0)


def test_steps_that_end_together_count_as_so_many() -> None:
    clock = Clock()
    pace = StepPace(clock)
    assert pace.left_s(10) is None
    pace.step(0)
    clock.now_s = 10.0
    pace.step(5)
    pace.step(5)
    assert pace.left_s(10) == pytest.approx(10.0)
    assert pace.left_s(5) == 0.0


def test_a_reminder_speaks_once_for_every_minute_of_silence() -> None:
    clock, lines = Clock(), list[float]()
    reminder = Reminder(lambda: lines.append(clock.now_s), every_s=60.0, clock=clock)
    for now_s in range(0, 200, 10):
        clock.now_s = float(now_s)
        if now_s == 50:
            reminder.note()
        reminder.look()
    assert lines == [110.0, 170.0]
