"""What the tests of the house share: where the checkout is, and a fresh Python that sees it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def run_python(checkout: Path) -> RunPython:
    """Runs this Python with the given arguments in a new process that imports `rllm` from the checkout."""

    def run(*arguments: str, cwd: Path = checkout) -> subprocess.CompletedProcess[str]:
        paths = [str(checkout / "src"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "COLUMNS": "110",
        }
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return run
