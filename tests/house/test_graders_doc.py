"""docs/graders.md runs: its Python as one program that prints what the page says; its tables hold."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.rewards.graders import GRADERS, grader_named


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "graders.md").read_text()


def test_the_python_of_the_page_prints_what_stands_behind_it(
    page: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(blocks))
    done = run_python(str(program), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"^print\(.*\)  # (.*)$|^# (.*)$", "\n".join(blocks), re.MULTILINE)
    assert done.stdout.splitlines() == [behind or below for behind, below in promised]


def test_the_page_names_every_grader(page: str) -> None:
    table = page.split("## What counts")[0]
    named = {
        name
        for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert named == set(GRADERS)


def rows(page: str, title: str) -> list[list[str]]:
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert lines, f"the page has no table under {title!r}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_what_the_page_says_is_worth_nothing_is_worth_nothing(page: str) -> None:
    for answer, reason in rows(page, "What counts as the answer"):
        grade = grader_named("math").grade(answer.strip("`"), {"answer": "5"})
        assert (grade.score, grade.reason) == (0.0, reason.strip("`"))


def test_what_the_page_says_is_equal_is_equal_and_the_rest_is_not(page: str) -> None:
    math = grader_named("math")
    for cells in rows(page, "What is equal in mathematics"):
        for cell, score in zip(cells, (1.0, 0.0), strict=True):
            for pair in cell.split("; "):
                gold, *others = re.findall(r"`(.*?)`", pair.partition(" (")[0])
                for other in others:
                    assert math.grade(rf"\boxed{{{other}}}", {"answer": gold}).score == score, pair
