"""Tests of a software-engineering task that an agent tampers with, as root and as a plain user: none is paid,
and none is left unscored.

this test ──► examine_task, or a copy of the code that anybody may read run as nobody ──► findings
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from rllm.data.swe_rows import SWETask
from rllm.errors import ConfigError
from rllm.rewards import swe_grading, swe_tampering
from rllm.rewards.attacks import AttackVerdict
from rllm.rewards.swe_tampering import examine_task, swe_tamperings
from rllm.rewards.swe_world import SWEWorld

sys.path.insert(0, str(Path(__file__).parent))
from swe_projects import LIMITS, repository, row, usable_backend

REPOSITORY = Path(__file__).parents[2]
SYSTEM_PYTHON, NOBODY = "/usr/bin/python3", "65534"
DISTRIBUTIONS = ("numpy", "pytest", "pluggy", "iniconfig", "packaging", "pygments")
SOME = (
    "conftest that makes every test pass",
    "the source makes every report a good one",
    "the source writes a report and ends the run",
)
AS_NOBODY = """
import json, sys
from rllm.data.swe_rows import SWETask
from rllm.rewards.swe_tampering import examine_task
from rllm.rewards.swe_world import SWEWorld
from rllm.sandbox.types import Limits
row, backend, names = json.load(sys.stdin)
limits = Limits(wall_s=60, cpu_s=60, memory_mb=512, disk_mb=128, processes=128)
world = SWEWorld.of(SWETask.from_row(row), backend=backend, limits=limits)
findings = examine_task(world, names)
print(json.dumps([[each.name, each.verdict, each.reason] for each in findings]))
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A directory that any user may read and write in, with this library and pytest."""
    folder = Path(tempfile.mkdtemp(prefix="rllm-shared-"))
    code = folder / "code"
    shutil.copytree(REPOSITORY / "src" / "rllm", code / "rllm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in DISTRIBUTIONS:
        for file in distribution(name).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (code / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), code / file)
    (folder / "home").mkdir()
    source, commit = repository(folder)
    (folder / "row.json").write_text(json.dumps(row(source, base_commit=commit)))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder / "home").chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def task(shared: Path, monkeypatch: pytest.MonkeyPatch) -> SWETask:
    monkeypatch.setenv("RLLM_HOME", str(shared / "home" / "mine"))
    return SWETask.from_row(json.loads((shared / "row.json").read_text()))


def test_the_corpus_is_large_enough() -> None:
    assert len(swe_tamperings()) >= 90


def test_some_tamperings_are_worth_nothing_and_the_reference_is_paid(task: SWETask) -> None:
    world = SWEWorld.of(task, backend=usable_backend(), limits=LIMITS)
    findings = examine_task(world, SOME)
    assert [each for each in findings if each.verdict is not AttackVerdict.HELD] == []
    assert [each.score for each in findings] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert "must fail" in findings[3].reason
    with pytest.raises(ConfigError, match="no tampering 'other'"):
        examine_task(world, ["other"])


def test_tests_are_run_once_on_each_tree_and_twice_on_the_reference(
    task: SWETask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two leave nothing in the repository, the third a file that is taken back before tests run;
    with the last one the tests do not run to their end, twice."""
    patches: list[str] = []
    runs: list[swe_grading.TestRun] = []

    def run_tests(world: SWEWorld, patch: str, **options: Any) -> swe_grading.TestRun:
        patches.append(patch)
        runs.append(real_run_tests(world, patch, **options))
        return runs[-1]

    real_run_tests = swe_grading.run_tests
    monkeypatch.setattr(swe_grading, "run_tests", run_tests)
    world = SWEWorld.of(task, backend=usable_backend(), limits=LIMITS)
    names = ("the interpreter", "the installed pytest", "tox.ini", "the source ends the run")
    findings = examine_task(world, names)
    assert [each.score for each in findings] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    gold = world.repository.gold
    assert (patches[0], patches[-1]) == (gold, gold)
    assert len(patches) == len({*patches}) + 2 == 6
    assert runs[2] is runs[1], "whoever is graded by the same tree is graded by the same run"
    assert len({*map(id, runs)}) == 5


def test_what_mends_the_issue_and_breaks_another_test_is_worth_nothing(
    task: SWETask, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "sed -i 's/a - b/a + b/; s/2 [*] a/3 * a/' calc/__init__.py"
    monkeypatch.setattr(swe_tampering, "swe_tamperings", lambda: {"breaks": script})
    findings = examine_task(SWEWorld.of(task, backend=usable_backend(), limits=LIMITS))
    assert [each.score for each in findings] == [1.0, 0.0, 0.0, 1.0]
    assert "test_twice" in findings[2].reason


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bubblewrap", "unshare"])
def test_no_tampering_pays_or_goes_unscored(backend: str, task: SWETask) -> None:
    findings = examine_task(SWEWorld.of(task, backend=backend, limits=LIMITS))
    assert len(findings) == len(swe_tamperings()) + 3
    assert [each for each in findings if each.verdict is not AttackVerdict.HELD] == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bubblewrap", "unshare"])
def test_nor_for_a_plain_user(backend: str, shared: Path) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("this run is as a plain user anyway, or setpriv is missing")
    if sys.version_info[:2] != _system_python():
        pytest.skip("the system's Python, which a plain user can run, is of another version")
    words = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", SYSTEM_PYTHON, "-B", "-c"]
    done = subprocess.run(
        [*words, AS_NOBODY],
        input=json.dumps([json.loads((shared / "row.json").read_text()), backend, None]),
        env={
            "PYTHONPATH": str(shared / "code"),
            "PATH": os.environ["PATH"],
            "RLLM_HOME": str(shared / "home" / "nobody"),
        },
        cwd=shared,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    assert len(findings) == len(swe_tamperings()) + 3
    assert [each for each in findings if each[1] != AttackVerdict.HELD] == []


def _system_python() -> tuple[int, int]:
    if not os.access(SYSTEM_PYTHON, os.X_OK):
        return (0, 0)
    asking = "import sys; print(*sys.version_info[:2])"
    answer = subprocess.run([SYSTEM_PYTHON, "-c", asking], capture_output=True, text=True, check=True)
    major, minor = answer.stdout.split()
    return int(major), int(minor)


TOSSED = """\
import random

import pytest


@pytest.mark.parametrize("number", range(20))
def test_toss(number):
    assert random.SystemRandom().random() < 0.5
"""


def test_a_task_whose_tests_toss_a_coin_is_flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run in a million ends as the one before."""
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    source, commit = repository(tmp_path)
    tossed = [f"tests/test_add.py::test_toss[{number}]" for number in range(20)]
    fields = {"test_files": {"tests/test_add.py": TOSSED}, "FAIL_TO_PASS": tossed}
    task = SWETask.from_row(row(source, base_commit=commit, **fields))
    world = SWEWorld.of(task, backend=usable_backend(), limits=LIMITS)
    again = examine_task(world, ())[-1]
    assert again.verdict is AttackVerdict.BROKEN
    assert re.match(
        r"flaky: tests/test_add.py::test_toss\[\d+\] ended as (PASSED|FAILED) and then as", again.reason
    )
