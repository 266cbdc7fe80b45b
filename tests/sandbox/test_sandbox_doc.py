"""docs/sandbox.md runs: its Python as one program; its tables name what there is."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.sandbox import BACKENDS, Status


@pytest.fixture(scope="module")
def page() -> str:
    return (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text(encoding="utf-8")


def test_the_python_of_the_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, need: Callable[[str], str]
) -> None:
    need("bubblewrap")
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("ok 42", "[1, 2]", "6", "", "['out', 'src']", "b'HELLO\\n'", "[]", "b'HELLO\\n'"),
        r"b'hello\n' b'mine\n' ()",
    ]


def test_the_tables_name_every_backend_and_every_status(page: str) -> None:
    cells = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert cells == ["bubblewrap", "unshare", "docker", "subprocess", *Status]
    assert set(cells[:4]) == set(BACKENDS)
