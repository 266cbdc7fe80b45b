"""Tests that an agent tampers with, in every way of the corpus, as root and as a plain user: none is paid,
and none is left unscored.

this test ──► examine_tests, or a copy of the code that anybody may read run as nobody ──► findings
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rllm.errors import RllmError
from rllm.rewards.attacks import AttackVerdict
from rllm.rewards.tampering import PACKAGES, examine_tests, tamperings
from rllm.sandbox import open_sandbox
from rllm.sandbox.types import Root

REPOSITORY = Path(__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = "65534"
TAMPERINGS = tamperings()
OF_PYTEST = {name: script for name, script in TAMPERINGS.items() if "pytest" in script or "conftest" in name}
AS_NOBODY = """
import json, sys
from rllm.rewards.tampering import examine_tests
findings = examine_tests(sys.argv[1], json.load(sys.stdin))
print(json.dumps([[each.name, each.verdict, each.reason] for each in findings]))
"""


def needed(backend: str) -> str:
    try:
        open_sandbox(backend, root=Root()).close()
    except RllmError as error:
        pytest.skip(f"{backend}: {error}")
    return backend


def test_the_corpus_is_large_enough() -> None:
    assert len(TAMPERINGS) >= 25


@pytest.mark.parametrize(
    ("backend", "every"),
    [
        ("bubblewrap", 7),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("bubblewrap", "unshare", "docker")),
    ],
)
def test_no_tampering_pays_or_goes_unscored(backend: str, every: int) -> None:
    started = [name for name in TAMPERINGS if name.startswith("started by the tests")]
    assert len(started) >= 12
    tried = [name for name in TAMPERINGS if backend != "docker" or name not in started][::every]
    scripts = {name: TAMPERINGS[name] for name in tried}
    findings = examine_tests(needed(backend), scripts)
    assert len(findings) == len(scripts) + 1
    assert [each for each in findings if each.verdict is not AttackVerdict.HELD] == []


def test_a_program_in_a_hidden_folder_is_held_as_any_other() -> None:
    name = "started by the tests: a link to a program in a hidden folder"
    findings = examine_tests(needed("bubblewrap"), {name: TAMPERINGS[name]})
    assert [each.verdict for each in findings] == [AttackVerdict.HELD, AttackVerdict.HELD], findings


@pytest.mark.parametrize("backend", ["bubblewrap", pytest.param("unshare", marks=pytest.mark.slow)])
def test_nor_where_the_tests_run_pytest(backend: str) -> None:
    if find_spec("pytest") is None or sys.version_info[:2] != _system_python():
        pytest.skip("packages are shown to the system's Python, which is of another version here")
    findings = examine_tests(needed(backend), OF_PYTEST, packages=PACKAGES)
    assert len(findings) >= 4
    assert [each for each in findings if each.verdict is not AttackVerdict.HELD] == []


@pytest.fixture(scope="module")
def readable_code() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rllm-code-"))
    shutil.copytree(
        REPOSITORY / "src" / "rllm", folder / "rllm", ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("backend", "every"),
    [
        ("unshare", 12),
        pytest.param("unshare", 1, marks=pytest.mark.slow),
        pytest.param("bubblewrap", 1, marks=pytest.mark.slow),
    ],
)
def test_nor_for_a_plain_user(backend: str, every: int, readable_code: Path) -> None:
    needed(backend)
    if os.geteuid() != 0:
        pytest.skip("this run is as a plain user anyway")
    if shutil.which("setpriv") is None or _system_python() < (3, 11):
        pytest.skip("setpriv or a system Python of 3.11 that a plain user could run is missing")
    command = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", SYSTEM_PYTHON, "-B", "-c"]
    scripts = {name: TAMPERINGS[name] for name in list(TAMPERINGS)[::every]}
    done = subprocess.run(
        [*command, AS_NOBODY, backend],
        input=json.dumps(scripts),
        env={"PYTHONPATH": str(readable_code), "PATH": os.environ["PATH"]},
        cwd=readable_code,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    assert len(findings) == len(scripts) + 1
    assert [each for each in findings if each[1] != AttackVerdict.HELD] == []


def _system_python() -> tuple[int, int]:
    if not os.access(SYSTEM_PYTHON, os.X_OK):
        return (0, 0)
    asking = "import sys; print(*sys.version_info[:2])"
    major, minor = subprocess.run(
        [SYSTEM_PYTHON, "-c", asking], capture_output=True, text=True
    ).stdout.split()
    return int(major), int(minor)
