"""The Python of docs/workflows.md runs as it stands: its blocks, from top to bottom, are one program."""

import re
from pathlib import Path

from rllm.types.episode import TerminationReason

PAGE = Path(__file__).resolve().parents[2] / "docs" / "workflows.md"
BLOCK = re.compile(r"^```python\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_python_of_the_page_runs_from_top_to_bottom() -> None:
    blocks = [match["body"] for match in BLOCK.finditer(PAGE.read_text())]
    assert len(blocks) >= 8
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/workflows.md, block {number}", "exec"), namespace)


def test_the_page_shows_every_pattern_that_it_promises() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    wanted = ["Solvers and a judge", "Self-refinement", "Debate", "Planner and executors", "Tree search"]
    assert [heading for heading in headings if heading in wanted] == wanted


def test_the_reasons_that_the_page_names_are_reasons() -> None:
    (named,) = re.findall(r"truncated, reason `(\w+)`", PAGE.read_text())
    assert TerminationReason(named) is TerminationReason.TIMEOUT
