"""What the soak of `rllm serve model` takes for growth."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import pytest
import serving_memory

ROUND, FULL_AFTER = 72, 456


def growth_of(kib_at: dict[int, float]) -> float:
    points = [(requests, round(kib)) for requests, kib in kib_at.items()]
    return serving_memory.summary_of(points, FULL_AFTER)["kib_a_request"]


def rounds(num_rounds: int) -> list[int]:
    return [ROUND * (number + 1) for number in range(num_rounds)]


def test_what_grows_with_every_request_is_growth() -> None:
    assert growth_of({at: 250_000 + 8.0 * at for at in rounds(24)}) == pytest.approx(8.0, rel=0.01)


def test_what_grows_in_small_steps_is_growth() -> None:
    """Memory is taken from the system by the mebibyte."""
    growth = growth_of({at: 250_000 + 8.0 * at // 1024 * 1024 for at in rounds(24)})
    assert growth == pytest.approx(8.0, rel=0.5)


@pytest.mark.parametrize("step_at", [600, 1_000, 1_300, 1_700])
def test_one_step_is_none(step_at: int) -> None:
    assert growth_of({at: 250_000 + (7_168 if at > step_at else 0) for at in rounds(24)}) < 1.0


def test_what_fills_caches_is_none() -> None:
    assert growth_of({at: 250_000 + 16.0 * min(at, FULL_AFTER) for at in rounds(24)}) < 1.0


def test_a_run_of_two_rounds_has_a_figure() -> None:
    assert growth_of(dict.fromkeys(rounds(2), 250_000.0)) == 0.0
