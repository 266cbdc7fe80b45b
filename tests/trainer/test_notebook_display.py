"""A result shows itself in a notebook: numbers with their intervals, and the curve."""

from base64 import b64encode
from pathlib import Path

from rllm.data.dataset import Dataset
from rllm.eval.comparison import compare
from rllm.eval.results import Result
from rllm.trainer.result import TrainResult
from rllm.types.episode import Outcome
from rllm.types.task import EpisodeId


def test_a_result_is_a_table_and_a_picture(tmp_path: Path) -> None:
    directory = tmp_path / "<b>run</b>"
    directory.mkdir(parents=True)
    summary = {
        "before": {"success": 0.25, "success_interval": [0.125, 0.5], "greedy": 0.5},
        "after": {"success": 0.75, "success_interval": [0.5, 0.875]},
        "wall_s": 3.0,
    }
    html = TrainResult(directory=directory, summary=summary)._repr_html_()
    assert "<tr><td>before</td><td>25.0% [12.5, 50.0]</td><td>50.0%</td></tr>" in html
    assert "<tr><td>after</td><td>75.0% [50.0, 87.5]</td><td>–</td></tr>" in html
    assert "&lt;b&gt;run&lt;/b&gt;" in html
    assert "<img" not in html
    (directory / "curve.png").write_bytes(b"png")
    shown = TrainResult(directory=directory, summary=summary)._repr_html_()
    assert f"base64,{b64encode(b'png').decode()}" in shown


def test_a_supervised_result_shows_its_losses(tmp_path: Path) -> None:
    summary = {"before": {"loss": 2.5, "tokens": 7}, "after": {"loss": 1.25, "tokens": 7}}
    html = TrainResult(directory=tmp_path, summary=summary)._repr_html_()
    assert "<tr><th></th><th>loss</th><th>tokens</th></tr>" in html
    assert "<tr><td>after</td><td>1.25</td><td>7</td></tr>" in html


def test_rows_and_comparisons_are_tables_of_text() -> None:
    rows = Dataset([{"question": f"<img src={n}>", "answer": "x" * 300} for n in range(7)], name="sums")
    html = rows._repr_html_()
    assert "7 rows" in html
    assert html.count("<tr>") == 6
    assert "&lt;img src=0&gt;" in html
    assert "x" * 201 not in html
    first, second = (
        [
            Result(
                episode=EpisodeId(task_id=f"task-{number}"),
                outcome=Outcome.SCORED,
                is_correct=right,
                reward=float(right),
            )
            for number, right in enumerate(each)
        ]
        for each in ((False, False, True), (True, True, True))
    )
    assert "<td>33.3%</td><td>100.0%</td><td>+66.7 [" in compare(first, second)._repr_html_()
