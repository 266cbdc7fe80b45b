"""docs/algorithms.md runs: its Python and its commands, in order; it names every choice there is."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.config.algorithm import AGGREGATIONS, CREDITS, LOSSES
from rllm.config.policies import ESTIMATORS


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "algorithms.md").read_text()


def test_the_blocks_of_the_page_run_from_top_to_bottom(
    page: str, run_page: Callable[[str], str], rllm: Callable[[list[str]], str]
) -> None:
    for language, body in re.findall(r"^```(python|sh)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            run_page(body)
        else:
            for line in body.splitlines():
                rllm(shlex.split(line)[1:])
    assert not Path("runs").exists(), "every run of the page is a dry one"


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("algorithm.estimator", set(ESTIMATORS)),
        ("algorithm.loss", set(LOSSES)),
        ("algorithm.aggregation", set(AGGREGATIONS)),
        ("algorithm.credit", set(CREDITS)),
    ],
)
def test_the_page_names_every_choice(page: str, key: str, choices: set[str]) -> None:
    (row,) = [line for line in page.splitlines() if line.startswith("| ") and f"| `{key}`" in line]
    assert set(re.findall(r"`([a-z0-9_]+)`", row.split("|")[3])) == choices
