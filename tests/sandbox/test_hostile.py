"""Over sixty programs that want out, as root and as a plain user: each ends in time, none gets anything.

this test ──► a copy of the code that anybody may read ──► attack.py as another user ──► its report
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = "65534"
AT_LEAST = 40


@pytest.fixture(scope="module")
def readable_code() -> Iterator[Path]:
    """The package and these programs where every user can read them."""
    folder = Path(tempfile.mkdtemp(prefix="rllm-code-"))
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "src" / "rllm", folder / "rllm", ignore=unwanted)
    for name in ("attack.py", "hostile.py", "hostile.txt", "hostile_numpy.txt"):
        shutil.copy(Path(__file__).with_name(name), folder / name)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield folder
    shutil.rmtree(folder)


def _command_as(user: str) -> list[str]:
    """How to run Python as this test's user, or as nobody; skips where that cannot be."""
    if user == "own":
        return [sys.executable]
    if os.geteuid() != 0:
        pytest.skip("only root can be another user; this run is as a plain user anyway")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    new_enough = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not os.access(SYSTEM_PYTHON, os.X_OK) or subprocess.run([SYSTEM_PYTHON, "-c", new_enough]).returncode:
        pytest.skip("there is no system Python of 3.11 or newer that a plain user could run")
    return ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", SYSTEM_PYTHON]


def _install_numpy(folder: Path) -> None:
    """numpy where the attacked process finds it, for every user to read."""
    site = Path(str(distribution("numpy").locate_file("")))
    for entry in {
        Path(str(each)).parts[0] for each in distribution("numpy").files or () if ".." not in str(each)
    }:
        if not (folder / entry).exists():
            shutil.copytree(site / entry, folder / entry)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "way", "user"),
    [("bubblewrap", "runner", "own"), ("bubblewrap", "exec", "nobody"), ("unshare", "runner", "nobody")],
)
def test_nor_does_any_that_was_given_packages(
    backend: str, way: str, user: str, readable_code: Path, need: Callable[[str], str]
) -> None:
    need(backend)
    command = _command_as(user)
    _install_numpy(readable_code)
    report = _attacked([*command, "-B", "attack.py", backend, way, "numpy"], readable_code)
    assert report["damage"] == []
    assert report["wrong"] == {}
    assert report["programs"] >= AT_LEAST + 10


@pytest.mark.parametrize(
    ("backend", "way", "user"),
    [
        ("bubblewrap", "runner", "own"),
        ("unshare", "exec", "nobody"),
        pytest.param("bubblewrap", "runner", "nobody", marks=pytest.mark.slow),
        pytest.param("bubblewrap", "exec", "own", marks=pytest.mark.slow),
        pytest.param("bubblewrap", "exec", "nobody", marks=pytest.mark.slow),
        pytest.param("unshare", "runner", "own", marks=pytest.mark.slow),
        pytest.param("unshare", "runner", "nobody", marks=pytest.mark.slow),
        pytest.param("unshare", "exec", "own", marks=pytest.mark.slow),
    ],
)
def test_no_program_gets_out_stays_or_learns(
    backend: str, way: str, user: str, readable_code: Path, need: Callable[[str], str]
) -> None:
    need(backend)
    report = _attacked([*_command_as(user), "-B", "attack.py", backend, way], readable_code)
    assert report["damage"] == []
    assert report["wrong"] == {}
    assert report["programs"] >= AT_LEAST


def _attacked(command: list[str], folder: Path) -> dict[str, Any]:
    """The report of attack.py."""
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
