"""docs/dpo.md runs: its Python as one program; its tables name what there is."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from rllm.config.preference import SETTINGS, PreferenceConfig, PreferenceDataConfig


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "dpo.md").read_text()


def test_the_python_of_the_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)))
    done = run_python(str(program))
    assert done.returncode == 0, done.stderr
    assert "before {'loss': 0.69, 'margin': " in done.stdout
    assert "after {'loss': 0." in done.stdout
    assert "row 0: `chosen` and `rejected` are the same" in done.stdout


def test_the_page_names_every_loss_with_the_keys_that_it_knows(page: str) -> None:
    section = page.split("## The losses\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `") and "arxiv" in line]
    told = {cells[1].strip(" `"): set(re.findall(r"`(\w+)`", cells[4])) for cells in rows}
    assert told == SETTINGS


def test_every_key_of_the_page_is_one(page: str) -> None:
    known = {f"preference.{each.name}" for each in fields(PreferenceConfig)}
    known |= {f"data.{each.name}" for each in fields(PreferenceDataConfig)}
    assert set(re.findall(r"`((?:preference|data)\.\w+)", page)) <= known
