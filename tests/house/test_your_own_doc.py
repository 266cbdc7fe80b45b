"""docs/your_own.md runs: its Python and its commands, in order."""

import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from rllm.algorithms.advantages import Attempt
from rllm.algorithms.context import AlgorithmContext


def test_the_blocks_of_the_page_run_from_top_to_bottom(
    checkout: Path, run_page: Callable[[str], str], rllm: Callable[[list[str]], str]
) -> None:
    page = (checkout / "docs" / "your_own.md").read_text()
    for language, body in re.findall(r"^```(python|sh)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            run_page(body)
        else:
            for line in body.splitlines():
                rllm(shlex.split(line)[1:])


def test_the_page_says_all_that_may_be_seen(checkout: Path) -> None:
    page = (checkout / "docs" / "your_own.md").read_text()
    inner = {"states_K", "baseline"}  # of GiGPO and ReMax
    names = {each.name for kind in (Attempt, AlgorithmContext) for each in fields(kind)} - inner
    assert {name for name in names if f"`{name}`" not in page} == set()
