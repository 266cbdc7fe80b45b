"""Without any extra every line of the first pages works, or ends in one sentence that names the extra."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/tour.md", "docs/first_session.md", "docs/tutorial.md")
DEAD_SERVER = "rllm eval frozenlake --base-url http://127.0.0.1:9/v1 --model x"


def blocks(page: Path, language: str) -> list[str]:
    return [found["body"] for found in BLOCK.finditer(page.read_text()) if found["language"] == language]


def rllm_lines(checkout: Path) -> list[str]:
    """Every `rllm …` of the first pages, in their order."""
    shown = "".join(block for page in PAGES for block in blocks(checkout / page, "sh"))
    lines = [line.partition(" #")[0].rstrip(" &") for line in shown.splitlines()]
    return [line for line in lines if line.startswith("rllm ")]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    keep = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return keep | {"HOME": str(tmp_path), "RLLM_HOME": str(tmp_path / "home"), "COLUMNS": "80"}


# Each command in a child of one process that has imported what most of them need: a new Python takes longer.
TYPE_LINES = """
import json, os, sys
import gymnasium, numpy, rich.console, rich.progress, rich.table  # what a core has: once for all children
import rllm.cli.compare, rllm.cli.eval, rllm.cli.runs, rllm.cli.train
from rllm.cli.main import main
ends = []
for number, line in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"stdout-{number}", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(f"stderr-{number}", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv = line.split()
        main()
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
json.dump(ends, sys.stdout)
"""


def test_every_command_of_the_first_pages_works_or_names_the_extra_that_it_needs(
    core_python: Path, checkout: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(checkout / "examples")
    lines = [*rllm_lines(checkout), DEAD_SERVER]
    done = subprocess.run(
        [core_python, "-c", TYPE_LINES],
        input=json.dumps(lines),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    needs: dict[str, str] = {}
    for number, (line, code) in enumerate(zip(lines, json.loads(done.stdout), strict=True)):
        errors = (tmp_path / f"stderr-{number}").read_text()
        assert "Traceback" not in errors, f"{line}\n{errors}"
        assert code in (0, 2), f"{line}\n{errors}"
        if found := re.search(r"is not installed; run: pip install 'rllm\[(\w+)\]'", errors):
            needs[line] = found[1]
    assert needs[DEAD_SERVER] == "gateway"
    assert needs["rllm train frozenlake"] == "train"


def test_an_agent_is_played_with_a_script_without_any_extra(
    core_python: Path, checkout: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    program = "\n\n".join(blocks(checkout / "docs/engines.md", "python")[:2])
    done = subprocess.run(
        [core_python, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
