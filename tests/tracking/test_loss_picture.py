"""The picture of a run that learns from rows, however far it has got."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rllm.tracking.picture import XAxis, draw_loss_curve

BEFORE = {"phase": "before", "step": 0, "time_s": 0.5, "loss": 6.0}
TRAIN = [{"phase": "train", "step": step, "time_s": 1.0 + step, "loss": 5.0 - step} for step in range(4)]
BETWEEN = [*TRAIN[:2], {**TRAIN[2], "heldout_loss": 3.5}, TRAIN[3]]
AFTER = {"phase": "after", "step": 0, "time_s": 6.0, "loss": 2.0}


@pytest.mark.parametrize("x_axis", ["seconds", "steps"])
@pytest.mark.parametrize(
    "metrics",
    [[], [BEFORE], TRAIN, [BEFORE, *BETWEEN, AFTER], [{**BEFORE, "loss": 1e-9}, AFTER]],
    ids=["nothing", "before", "training", "whole", "no update"],
)
def test_a_picture_is_drawn_of_whatever_was_measured(
    metrics: Sequence[dict[str, Any]], x_axis: XAxis, tmp_path: Path
) -> None:
    draw_loss_curve(metrics, tmp_path / "curve.png", x_axis=x_axis, title="rllm sft")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
