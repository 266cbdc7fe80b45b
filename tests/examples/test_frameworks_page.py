"""docs/frameworks.md shows code that runs: each block is in the example that it names, which is executed.

examples/README.md is an index of all examples.
"""

import re
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "frameworks.md").read_text()
INDEX = (CHECKOUT / "examples" / "README.md").read_text()
EXAMPLES = sorted(path.parent.name for path in (CHECKOUT / "examples").glob("*/agent.py"))

QUOTE = re.compile(r"^<!-- (?P<file>\S+) -->\n```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
QUOTES = [(match["file"], match["code"]) for match in QUOTE.finditer(PAGE)]


def test_the_code_on_the_page_is_in_the_example(subtests: pytest.Subtests) -> None:
    for file, code in QUOTES:
        with subtests.test(file=file, code=code):
            assert f"\n{code}" in (CHECKOUT / file).read_text()


def test_every_block_of_python_says_which_example_it_is_from() -> None:
    assert len(QUOTES) == PAGE.count("```python")


def test_every_example_is_on_the_page(subtests: pytest.Subtests) -> None:
    for name in EXAMPLES:
        with subtests.test(name=name):
            assert f"examples/{name}/agent.py" in {file for file, _ in QUOTES}


def test_every_example_is_in_the_index() -> None:
    folders = {path.name for path in (CHECKOUT / "examples").iterdir() if path.is_dir()}
    linked = {target.partition("/")[0] for target in re.findall(r"\]\(([^)]+)\)", INDEX)}
    assert {name for name in folders if not name.startswith(("_", "."))} <= linked


def test_the_index_installs_what_the_dependency_groups_name() -> None:
    groups = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["dependency-groups"]
    named = {
        group.removeprefix("examples-").replace("-", "_"): requirements
        for group, requirements in groups.items()
        if group.startswith("examples-")
    }
    assert len(named) == 9
    rows = dict(re.findall(r"^\| \[(\w+)\]\(\w+/agent\.py\) \| `([^`]+)`", INDEX, re.MULTILINE))
    assert {name: re.findall(r"'([^']+)'", rows[name]) for name in named} == named
