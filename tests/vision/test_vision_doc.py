"""docs/vision.md runs: its Python as one program; its limits are those of the code."""

import json
import re
from pathlib import Path

import pytest

from rllm.models.vision.pillow import MAX_PIXELS
from rllm.rendering.images import MAX_BYTES, MAX_PER_MESSAGE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "vision.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def _run(blocks: list[str]) -> None:
    exec("\n\n".join(blocks), {"__name__": "page"})


@pytest.mark.slow
def test_the_python_of_the_page_runs_from_top_to_bottom_and_its_agent_learns_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _run(BLOCKS)
    summary = json.loads((tmp_path / "looks" / "summary.json").read_text())
    assert summary["untrained"]["greedy"] == 0.0
    assert min(summary["after"]["success"], summary["after"]["greedy"]) >= 0.9
    assert capsys.readouterr().out.endswith("data:image/png;base64,\n4 tokens show the picture\nLeft\n")


def test_what_the_page_does_without_training_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _run([block for block in BLOCKS if "trainer" not in block and "looks" not in block])
    assert capsys.readouterr().out == "Left\n"
    assert (tmp_path / "eyes" / "processor_config.json").is_file()


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    assert (
        f"at most {MAX_BYTES >> 20} MiB and {MAX_PIXELS:,} pixels each, {MAX_PER_MESSAGE} to a message"
        in PAGE
    )
