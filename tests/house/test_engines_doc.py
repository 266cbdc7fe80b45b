"""docs/engines.md runs: its Python as one program; its tables name what there is."""

import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.engine import AgentExecutionEngine
from rllm.types.episode import Outcome, TerminationReason


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "engines.md").read_text()


def test_the_python_of_the_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)))
    done = run_python(str(program))
    assert done.returncode == 0, done.stderr
    assert "easy scored 1.0\nhole scored 0.0\n" in done.stdout
    assert len(re.findall(r"^(?:easy|hole):\d scored (?:True|False)$", done.stdout, re.MULTILINE)) == 8
    assert done.stdout.endswith("[]\n")


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
