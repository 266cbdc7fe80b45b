"""docs/papers.md: every name that selects an algorithm has a row, and every row an algorithm."""

import re
from pathlib import Path
from typing import Any

import pytest

from rllm.algorithms.aggregation import AGGREGATIONS
from rllm.algorithms.checks import CheckVerdict, check_estimator
from rllm.algorithms.correction import LEVELS, MODES
from rllm.algorithms.estimators import ESTIMATORS
from rllm.algorithms.kl import KL_KINDS
from rllm.algorithms.loss_checks import check_loss
from rllm.algorithms.surrogates import SURROGATES
from rllm.config import algorithm
from rllm.config.preference import SETTINGS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "papers.md").read_text()
ROWS = re.findall(
    r"^\| `([^`]+)` \| `([a-z_.]+) = \"([^\"]+)\"`.*? \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE
)
"""(name, key, value, paper, where ours differs) of the rows that a key with a name selects."""

REGISTRIES = {
    "algorithm.estimator": set(ESTIMATORS),
    "algorithm.credit": set(algorithm.CREDITS),
    "algorithm.loss": set(SURROGATES),
    "algorithm.aggregation": {*AGGREGATIONS, "constant"},
    "algorithm.kl_kind": set(KL_KINDS),
    "algorithm.correction": set(MODES),
    "algorithm.correction_level": set(LEVELS),
    "preference.loss": set(SETTINGS),
}


def test_every_registered_name_has_its_row_and_every_row_its_name(subtests: pytest.Subtests) -> None:
    for key in REGISTRIES:
        with subtests.test(key=key):
            assert {name for name, of, _, _, _ in ROWS if of == key} == REGISTRIES[key]


def test_a_row_selects_what_it_names_and_cites_somebody() -> None:
    for name, _, value, paper, differs in ROWS:
        assert name == value
        assert re.search(r"\b(19|20)\d\d\b|verl's|published rLLM", paper), f"{name} cites nobody: {paper}"
        assert differs


def test_every_estimator_says_what_becomes_of_groups_that_tie() -> None:
    words = {True: "`count` or `drop`", False: "none tie"}
    for name, key, _, _, rest in ROWS:
        if key == "algorithm.estimator":
            expected = (
                words[ESTIMATORS[name].compares_attempts] if name != "gpg" else "dropped, by its own factor"
            )
            assert rest.endswith(f"| {expected}"), name


def test_links_lead_to_the_papers_that_they_show() -> None:
    links = re.findall(r"\[arXiv:([\d.]+)\]\(https://arxiv.org/abs/([\d.]+)\)", PAGE)
    assert len(links) > 40
    assert all(shown == target for shown, target in links)
    assert len(links) == PAGE.count("arXiv:"), "a paper is named without its link"


def test_the_algorithms_that_the_page_shows_are_sound() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/papers.md", "exec"), names)
    checks = [*check_loss(names["my_loss"]), *check_estimator(names["my_advantages"])]
    assert [each.name for each in checks if each.verdict is CheckVerdict.FAILED] == []
