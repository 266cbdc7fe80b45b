"""docs/algorithms.md runs: its Python and its commands, in order; it names every choice there is."""

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.config.algorithm import AGGREGATIONS, CREDITS, LOSSES
from rllm.config.policies import ESTIMATORS

LAST_LINES = "import sys\nsys.argv = {words!r}\nfrom rllm.cli.main import main\ntry:\n    main()\n"
LAST_LINES += "except SystemExit as end:\n    assert not end.code, end.code\n"


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "algorithms.md").read_text()


def test_the_blocks_of_the_page_run_from_top_to_bottom(
    page: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    parts: list[str] = []
    for language, body in re.findall(r"^```(python|sh)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            parts.append(body)
        else:
            parts += [LAST_LINES.format(words=shlex.split(line)) for line in body.splitlines()]
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(parts))
    done = run_python(str(program), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists(), "every run of the page is a dry one"


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
