import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rllm.errors import MissingExtraError
from rllm.tracking import draw_comparison, draw_learning_curve


def _run(num_steps: int = 30) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = [
        {"phase": "untrained", "step": 0, "time_s": 1.0, "success": 0.0},
        {"phase": "before", "step": 0, "time_s": 4.0, "success": 0.2},
    ]
    for step in range(1, num_steps + 1):
        line: dict[str, object] = {
            "phase": "train",
            "step": step,
            "time_s": 4.0 + step,
            "success": step / num_steps,
        }
        if step % 10 == 0:
            line |= {"heldout_success": 0.5, "heldout_success_low": 0.4, "heldout_success_high": 0.6}
            line |= {"heldout_greedy": 0.6}
        lines.append(line)
    return lines


SUMMARY = {
    "untrained": {"success": 0.01, "success_interval": [0.0, 0.03]},
    "before": {"success": 0.2, "success_interval": [0.1, 0.3], "greedy": 0.2, "greedy_interval": None},
    "after": {
        "success": 0.95,
        "success_interval": [0.9, 0.99],
        "greedy": 0.96,
        "greedy_interval": [0.9, 0.99],
    },
}


def _size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("x_axis", ["seconds", "steps"])
@pytest.mark.parametrize("summary", [None, {}, SUMMARY])
def test_a_learning_curve_is_a_png_of_1000_by_600(tmp_path: Path, x_axis, summary) -> None:
    draw_learning_curve(_run(), summary, tmp_path / "curve.png", x_axis=x_axis)
    assert _size(tmp_path / "curve.png") == (1000, 600)
    assert [each.name for each in tmp_path.iterdir()] == ["curve.png"]


def test_a_comparison_may_show_the_mean_where_all_runs_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: dict[str, tuple[list[float], list[float]]] = {}
    plot = Axes.plot

    def remember(axes: Axes, xs: list[float], ys: list[float], **options: object) -> object:
        drawn[str(options.get("label"))] = (xs, ys)
        return plot(axes, xs, ys, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Axes, "plot", remember)
    curves = {"seed 0": _run(30), "seed 1": _run(20)}
    summaries = {"seed 0": SUMMARY, "seed 1": {"before": {"success": 0.4}, "after": {"success": 0.55}}}
    place = tmp_path / "seeds.png"
    draw_comparison(curves, place, summaries=summaries, x_axis="steps", mean_label="mean")
    assert _size(place) == (1000, 600)
    xs, means = drawn["mean (52% at the end)"]
    assert xs == [0.0, 10.0, 20.0]
    assert means == pytest.approx([0.3, 0.5, 0.525])


def test_a_run_that_has_hardly_begun_can_be_drawn(tmp_path: Path) -> None:
    draw_learning_curve([], None, tmp_path / "nothing.png")
    draw_learning_curve(_run(0), None, tmp_path / "untrained.png")
    draw_learning_curve(_run(1), SUMMARY, tmp_path / "one.png")
    assert _size(tmp_path / "one.png") == (1000, 600)


def test_several_runs_are_drawn_on_one_picture(tmp_path: Path) -> None:
    without_heldout = [{"phase": "train", "step": 1, "time_s": 1.0, "success": 0.5}]
    curves = {"seed 0": _run(), "seed 1": _run(20), "seed 2": without_heldout}
    draw_comparison(curves, tmp_path / "comparison.png")
    assert _size(tmp_path / "comparison.png") == (1000, 600)


@pytest.mark.parametrize("x_axis", ["seconds", "steps"])
def test_the_curves_of_several_runs_begin_before_training(
    tmp_path: Path, x_axis, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr("rllm.tracking.picture._save", lambda _, axes, __: drawn.append(axes))
    curves, summaries = {"seed 0": _run()}, {"seed 0": SUMMARY}
    draw_comparison(curves, tmp_path / "x.png", summaries=summaries, x_axis=x_axis, title="Success on lakes")
    (points,) = drawn[0].containers
    xs, rates = points[0].get_data()
    assert (xs[0], rates[0]) == (4.0 if x_axis == "seconds" else 0.0, 0.2)
    assert drawn[0].get_title(loc="left") == "Success on lakes"


def test_a_missing_matplotlib_is_answered_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rllm\[train\]'"):
        draw_learning_curve([], None, tmp_path / "curve.png")


def test_importing_the_room_does_not_import_matplotlib() -> None:
    program = (
        "import sys\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "import rllm.tracking\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, *sys.path], check=True)
