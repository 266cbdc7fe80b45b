"""Twins of hidden tests fail where the tests pass honestly, and pass where a patch makes everything pass."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.data.swe_rows import SWETask
from rllm.rewards.programs.swe_twins import make_twins
from rllm.rewards.swe_grading import grade_patch, run_tests
from rllm.rewards.swe_world import SWEWorld

sys.path.insert(0, str(Path(__file__).parent))
from swe_projects import LIMITS, PATCH, repository, row, usable_backend

HONEST = {
    "a literal": "def test():\n    assert f(2) == 4",
    "a literal on the left": "def test():\n    assert [4, 6] == [f(2), f(3)]",
    "a variable": "def test():\n    expected = 4\n    assert f(2) == expected",
    "no comparison": "def test():\n    assert f(2)",
    "an order": "def test():\n    assert 3 < f(2) < 5",
    "an approximation": "def test():\n    assert f(0.1) == pytest.approx(0.2)",
    "an error": "def test():\n    with pytest.raises(TypeError):\n        f(None)",
    "an error among others": "def test():\n    with open('/dev/null'), pytest.raises(TypeError): f(None)",
    "nothing to check": "def test():\n    f(2)",
    "an early return": "def test():\n    f(2)\n    return",
    "a loop": "def test():\n    for number in (1, 2):\n        assert f(number) == 2 * number",
    "a branch that is not taken": "def test():\n    if f(2) == 5:\n        assert f(2) == 5",
    "several checks": "def test():\n    assert f(1) == 2\n    assert f(2) != 5\n    assert f(3)",
    "a condition of two": "def test():\n    assert f(1) == 2 and f(2) == 4",
    "-1": "def test():\n    assert f(-0.5) == -1",
    "nothing": "def test():\n    assert {}.get(f(1)) == None",
    "a function of checks": "def test():\n    assert_all(f(1), f(2))",
}
BEFORE = """
import pytest
def f(number):
    return 2 * number
def assert_all(*numbers):
    assert all(number % 2 == 0 for number in numbers)
"""


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("seed", range(3))
def test_a_twin_fails_where_its_test_passes(name: str, seed: int) -> None:
    twin, plain, found = make_twins(BEFORE + HONEST[name], ["test"], random.Random(seed))
    assert found == ["test"]
    run(plain)
    with pytest.raises((AssertionError, TypeError)):
        run(twin)


def run(source: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(source, "test.py", "exec"), names)
    names["test"]()


EQUAL = "class Equal(int):\n    __hash__ = int.__hash__\n    def __eq__(self, other): return True\n"


@pytest.mark.parametrize("name", ["a literal", "a literal on the left", "a variable", "a loop"])
def test_the_twin_passes_with_objects_that_are_equal_to_everything(name: str) -> None:
    forged = BEFORE.replace("return 2 * number", "return Equal(number)")
    twin, plain, _ = make_twins(EQUAL + forged + HONEST[name], ["test"], random.Random(0))
    run(plain)
    run(twin)


def test_methods_are_found_in_their_classes_and_other_names_are_left_out() -> None:
    source = "class TestA:\n    def test(self):\n        self.assertEqual(1, 1)\ndef test(): assert True\n"
    twin, _, found = make_twins(source, ["TestA::test", "TestB::test", "TestA::test_none"], random.Random(0))
    assert found == ["TestA::test"]
    assert "assert True" in twin


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SWEWorld]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLM_HOME", str(tmp_path_factory.mktemp("home")))
        source, commit = repository(tmp_path_factory.mktemp("source"))
        task = SWETask.from_row(row(source, base_commit=commit))
        yield SWEWorld.of(task, backend=usable_backend(), limits=LIMITS)


def forging_patch(body: str) -> str:
    """A patch by which `add` does this, instead of adding."""
    lines = [f"+    {line}" for line in body.strip("\n").splitlines()]
    patch = PATCH.replace("+    return a + b", "\n".join(lines))
    return patch.replace("+1,6 @@", f"+1,{5 + len(lines)} @@")


FORGED: dict[str, str] = {
    "an expected failure": "import pytest; pytest.xfail('later')",
    "a skipped test": "import pytest; pytest.skip('later')",
    "an object that is equal to everything": ("return type('E', (), {'__eq__': lambda self, other: True})()"),
    "what the caller's line expects": (
        "import re, sys, linecache\n"
        "frame = sys._getframe(1)\n"
        "line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)\n"
        "return int(re.search(r'== (-?[0-9]+)', line)[1])"
    ),
    "the constants of the caller": "import sys\nreturn sys._getframe(1).f_code.co_consts[-1]",
    "assertions that raise nothing": (
        "import pytest, _pytest.python\n"
        "import sys\n"
        "sys._getframe(1).f_globals['__builtins__']['AssertionError'] = pytest.skip.Exception\n"
        "return 0"
    ),
    "every report a good one": (
        "import _pytest.reports as r\n"
        "made = r.TestReport.from_item_and_call.__func__\n"
        "def good(cls, item, call):\n"
        "    call.excinfo = None\n"
        "    return made(cls, item, call)\n"
        "r.TestReport.from_item_and_call = classmethod(good)"
    ),
    "an encoder that says passed": (
        "import json\n"
        "encode = json.JSONEncoder.encode\n"
        "json.JSONEncoder.encode = lambda self, o: encode(self, o).replace('FAILED', 'PASSED')"
    ),
    "events of its own": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        os.write(fd, b'tests/test_add.py::test_add\\x1fPASSED\\x1e')\n"
        "    except OSError:\n"
        "        pass\n"
        "os._exit(0)"
    ),
    "events that no test writes": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        os.write(fd, b'\\x1e\\x1ftests/test_add.py::test_add\\x1fGOOD\\x1e\\x1f')\n"
        "    except OSError:\n"
        "        pass"
    ),
    "more events than a report holds": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        for _ in range(512):\n"
        "            os.write(fd, b'x' * 65536)\n"
        "    except OSError:\n"
        "        pass"
    ),
    "a reporter found by its callers": (
        "import gc\n"
        "for o in gc.get_objects():\n"
        "    if type(o).__name__ == 'Reporter':\n"
        "        type(o).pytest_runtest_logreport = lambda self, report: None\n"
        "    if type(o).__name__ == 'Collector':\n"
        "        o.statuses = {name: 'PASSED' for name in o.statuses}"
    ),
    "the memory of the process above": (
        "import os, re\n"
        "parent = os.getppid()\n"
        "for line in open(f'/proc/{parent}/maps'):\n"
        "    start, end = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "    memory = open(f'/proc/{parent}/mem', 'rb')\n"
        "    memory.seek(start)\n"
        "    if re.search(rb'[0-9a-f]{32}', memory.read(end - start)):\n"
        "        open('/testbed/found', 'w').write('found')"
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_patch_that_forges_is_not_paid(world: SWEWorld, name: str) -> None:
    grade = grade_patch(world, forging_patch(FORGED[name]))
    assert grade.score == 0.0, grade


def test_no_other_process_reads_the_one_that_knows_the_secret(world: SWEWorld) -> None:
    reads = "\n".join(
        (
            "import os",
            "try:",
            "    open(f'/proc/{os.getppid()}/mem', 'rb').close()",
            "except PermissionError:",
            "    return 3",
        )
    )
    assert run_tests(world, forging_patch(reads)).statuses["tests/test_add.py::test_add"] == "PASSED"


def test_copies_are_not_among_the_tests(world: SWEWorld) -> None:
    tests = run_tests(world, world.repository.gold)
    assert set(tests.statuses) == {"tests/test_add.py::test_add", "tests/test_old.py::test_twice"}
    assert tests.twins == {"tests/test_add.py::test_add": ["PASSED", "PASSED", "FAILED"]}


QUIET = """\
from calc import add


def quiet(test):
    def run():
        try:
            test()
        except AssertionError:
            pass

    return run


@quiet
def test_add():
    assert add(1, 2) == 3
"""


def test_a_twin_that_cannot_fail_costs_the_reference_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    source, commit = repository(tmp_path)
    task = SWETask.from_row(row(source, base_commit=commit) | {"test_files": {"tests/test_add.py": QUIET}})
    world = SWEWorld.of(task, backend=usable_backend(), limits=LIMITS)
    grade = grade_patch(world, world.repository.gold)
    assert grade.score == 1.0, grade
    assert run_tests(world, world.repository.gold).twins == {
        "tests/test_add.py::test_add": ["PASSED", "PASSED", "PASSED"]
    }


REGISTERED = """\
import calc

assert not hasattr(calc, "seen"), "imported twice"
calc.seen = True


def test_add():
    assert calc.add(1, 2) == 3
"""


def test_tests_that_are_imported_once_alone_are_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies beside them in one process would fail them, or be failed by them."""
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    source, commit = repository(tmp_path)
    fields = row(source, base_commit=commit) | {"test_files": {"tests/test_add.py": REGISTERED}}
    world = SWEWorld.of(SWETask.from_row(fields), backend=usable_backend(), limits=LIMITS)
    grade = grade_patch(world, world.repository.gold)
    assert grade.score == 1.0, grade


def test_modules_of_one_name_lose_no_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    source, commit = repository(tmp_path)
    text = (
        "import unittest\nfrom calc import add\n\n\nclass AddTest(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n"
    )
    files = {
        f"tests/{folder}/{name}": content
        for folder in "ab"
        for name, content in (("__init__.py", ""), ("test_it.py", text))
    }
    fields = row(source, base_commit=commit) | {
        "test_command": ["python", "-m", "unittest", "tests.a.test_it", "tests.b.test_it"],
        "test_files": {"tests/__init__.py": "", **files},
        "FAIL_TO_PASS": [f"tests.{folder}.test_it.AddTest.test_add" for folder in "ab"],
        "PASS_TO_PASS": [],
    }
    world = SWEWorld.of(SWETask.from_row(fields), backend=usable_backend(), limits=LIMITS)
    assert grade_patch(world, world.repository.gold).score == 1.0
    twins = run_tests(world, world.repository.gold).twins
    assert twins == {name: ["PASSED", "PASSED", "FAILED"] for name in fields["FAIL_TO_PASS"]}
