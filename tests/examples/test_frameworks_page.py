"""docs/frameworks.md shows code that runs: each block is in the example that it names, which is executed."""

import re
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "frameworks.md").read_text()
EXAMPLES = sorted(path.parent.name for path in (CHECKOUT / "examples").glob("*/agent.py"))

QUOTE = re.compile(r"^<!-- (?P<file>\S+) -->\n```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
QUOTES = [(match["file"], match["code"]) for match in QUOTE.finditer(PAGE)]


@pytest.mark.parametrize(("file", "code"), QUOTES, ids=[file for file, _ in QUOTES])
def test_the_code_on_the_page_is_in_the_example(file: str, code: str) -> None:
    assert f"\n{code}" in (CHECKOUT / file).read_text()


def test_every_block_of_python_says_which_example_it_is_from() -> None:
    assert len(QUOTES) == PAGE.count("```python")


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_on_the_page_and_has_a_readme(name: str) -> None:
    assert f"examples/{name}/agent.py" in {file for file, _ in QUOTES}
    readme = (CHECKOUT / "examples" / name / "README.md").read_text()
    assert f"python examples/{name}/agent.py" in readme


def test_the_readmes_install_what_the_dependency_groups_name() -> None:
    groups = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["dependency-groups"]
    assert groups
    for group in filter(lambda name: name.startswith("examples-"), groups):
        requirements = groups[group]
        name = group.removeprefix("examples-").replace("-", "_")
        readme = (CHECKOUT / "examples" / name / "README.md").read_text()
        assert " ".join(f"'{each}'" for each in requirements) in readme, name
