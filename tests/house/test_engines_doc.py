"""docs/engines.md runs: its Python as one program; its tables name what there is."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.engine import AgentExecutionEngine
from rllm.types.episode import Outcome, TerminationReason


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "engines.md").read_text()


def test_the_python_of_the_page_runs_from_top_to_bottom(page: str, run_page: Callable[[str], str]) -> None:
    told = run_page("\n\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)))
    assert "easy scored 1.0\nhole scored 0.0\n" in told
    assert len(re.findall(r"^(?:easy|hole):\d scored (?:True|False)$", told, re.MULTILINE)) == 8
    assert told.endswith("[]\n")


def first_cells(page: str, title: str) -> list[str]:
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [re.findall(r"`(\w+)", row)[0] for row in rows]


def test_the_page_names_every_outcome(page: str) -> None:
    assert first_cells(page, "What may go wrong, and what becomes of it") == list(Outcome)


def test_the_limits_of_the_page_are_arguments_and_every_reason_is_told(page: str) -> None:
    parameters = inspect.signature(AgentExecutionEngine).parameters
    assert set(first_cells(page, "Limits")) <= set(parameters)
    told = {TerminationReason(name) for name in re.findall(r"`(\w+)` \|$", page, re.MULTILINE)}
    assert told == {*TerminationReason} - {
        TerminationReason.ENV_DONE,
        TerminationReason.ERROR,
        TerminationReason.UNKNOWN,
    }
