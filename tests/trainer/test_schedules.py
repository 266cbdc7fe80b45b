"""Learning rates and temperatures of each step, by numbers worked out by hand."""

import math

import pytest

from rllm.config.loader import load_config
from rllm.config.optimizer import OptimizerConfig
from rllm.trainer.schedules import cosine, learning_rate, learning_rate_at, linear, temperature

DIAGONAL = 0.5 * (1.0 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    ("fall", "final", "values"),
    [
        (linear, 0.0, [8.0]),
        (linear, 0.5, [8.0, 4.0]),
        (linear, 0.25, [8.0, 5.0, 2.0]),
        (linear, 0.0, [8.0, 6.0, 4.0, 2.0, 0.0]),
        (cosine, 0.0, [8.0]),
        (cosine, 0.5, [8.0, 4.0]),
        (cosine, 0.25, [8.0, 5.0, 2.0]),
        (cosine, 0.0, [8.0, 8.0 * DIAGONAL, 4.0, 8.0 * (1.0 - DIAGONAL), 0.0]),
    ],
)
def test_a_value_falls_from_the_first_step_to_its_last_fraction(
    fall: object, final: float, values: list[float]
) -> None:
    assert callable(fall)
    assert [fall(8.0, step, len(values), final) for step in range(len(values))] == pytest.approx(values)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("constant", [2.0, 4.0, 6.0, 6.0, 6.0]),
        ("linear", [2.0, 4.0, 3.0, 1.5, 0.0]),
        ("cosine", [2.0, 4.0, 3.0, 6.0 * (1.0 - DIAGONAL), 0.0]),
    ],
)
def test_a_rate_warms_up_to_the_place_of_its_schedule(schedule: str, values: list[float]) -> None:
    optimizer = OptimizerConfig(learning_rate=6.0, warmup_steps=2, schedule=schedule, final_lr_fraction=0.0)
    assert [learning_rate_at(optimizer, step, 5) for step in range(5)] == pytest.approx(values)
    halves = [learning_rate_at(optimizer, step, 5, 3.0) for step in range(5)]
    assert halves == pytest.approx([each / 2 for each in values])
    config = load_config(["steps=5"])
    config.optimizer = optimizer
    assert [learning_rate(config, step) for step in range(5)] == pytest.approx(values)


@pytest.mark.parametrize(("final", "values"), [(0.0, [0.8, 0.8, 0.8]), (0.2, [0.8, 0.5, 0.2])])
def test_a_temperature_stays_or_goes_to_its_last_value(final: float, values: list[float]) -> None:
    changes = ["steps=3", "rollout.temperature=0.8", f"rollout.final_temperature={final}"]
    config = load_config(changes)
    assert [temperature(config, step) for step in range(3)] == pytest.approx(values)
