"""docs/dpo.md runs: its Python as one program; its tables name what there is."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from rllm.config.preference import SETTINGS, PreferenceConfig, PreferenceDataConfig


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "dpo.md").read_text()


def test_the_python_of_the_page_runs_from_top_to_bottom(page: str, run_page: Callable[[str], str]) -> None:
    told = run_page("\n\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)))
    assert "before {'loss': 0.69, 'margin': " in told
    assert "after {'loss': 0." in told
    assert "row 0: `chosen` and `rejected` are the same" in told


def test_the_page_names_every_loss_with_the_keys_that_it_knows(page: str) -> None:
    section = page.split("## The losses\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `") and "arxiv" in line]
    told = {cells[1].strip(" `"): set(re.findall(r"`(\w+)`", cells[4])) for cells in rows}
    assert told == SETTINGS


def test_every_key_of_the_page_is_one(page: str) -> None:
    known = {f"preference.{each.name}" for each in fields(PreferenceConfig)}
    known |= {f"data.{each.name}" for each in fields(PreferenceDataConfig)}
    assert set(re.findall(r"`((?:preference|data)\.\w+)", page)) <= known
