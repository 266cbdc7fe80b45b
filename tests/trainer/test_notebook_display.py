"""A result shows itself in a notebook: numbers with their intervals, and the curve."""

from base64 import b64encode
from pathlib import Path

from rllm.trainer.agent_trainer import TrainResult


def test_a_result_is_a_table_and_a_picture(tmp_path: Path) -> None:
    directory = tmp_path / "<b>run</b>"
    directory.mkdir(parents=True)
    summary = {
        "before": {"success": 0.25, "success_interval": [0.125, 0.5], "greedy": 0.5},
        "after": {"success": 0.75, "success_interval": [0.5, 0.875]},
        "wall_s": 3.0,
    }
    html = TrainResult(directory=directory, summary=summary)._repr_html_()
    assert "<tr><td>before</td><td>25.0% <small>[12.5%, 50.0%]</small></td><td>50.0%</td></tr>" in html
    assert "<tr><td>after</td><td>75.0% <small>[50.0%, 87.5%]</small></td><td>–</td></tr>" in html
    assert "&lt;b&gt;run&lt;/b&gt;" in html
    assert "<img" not in html
    (directory / "curve.png").write_bytes(b"png")
    shown = TrainResult(directory=directory, summary=summary)._repr_html_()
    assert f"base64,{b64encode(b'png').decode()}" in shown
