"""Hidden tests of real runners other than pytest, in real sandboxes: unittest, and Node's own."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rllm.data.swe_rows import SWETask
from rllm.environments.swe.swe import SWEEnv
from rllm.errors import ConfigError
from rllm.rewards.swe_grading import grade_patch, run_tests
from rllm.rewards.swe_visible import run_visible_tests
from rllm.rewards.swe_world import SWEWorld

sys.path.insert(0, str(Path(__file__).parent))
from swe_projects import LIMITS, PATCH, project, row, usable_backend

UNITTEST = '''\
import unittest
from calc import add


class AddTest(unittest.TestCase):
    def test_add(self):
        """Adding adds."""
        self.assertEqual(add(1, 2), 3)

    def test_parts(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertEqual(add(number, 1), number + 1)

    def test_fails(self):
        self.fail()

    @unittest.expectedFailure
    def test_someday(self):
        self.fail()
'''
SUM = "exports.add = (a, b) => a - b;\n"
NODE = """\
const { describe, it } = require('node:test');
const assert = require('node:assert');
const { add } = require('../sum.js');

describe('add', () => it('adds', () => assert.strictEqual(add(1, 2), 3)));
"""
NODE_PATCH = """\
diff --git a/sum.js b/sum.js
--- a/sum.js
+++ b/sum.js
@@ -1 +1 @@
-exports.add = (a, b) => a - b;
+exports.add = (a, b) => a + b;
"""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def world(source: Path, **fields: Any) -> SWEWorld:
    task = SWETask.from_row(row(source) | fields)
    return SWEWorld.of(task, backend=usable_backend(), limits=replace(LIMITS, memory_mb=1024))


@pytest.fixture(scope="module")
def python_world(tmp_path_factory: pytest.TempPathFactory) -> SWEWorld:
    """Ids as published rows have them: dotted, with the class in brackets, the first line of a docstring."""
    return world(
        project(tmp_path_factory.mktemp("python")),
        test_command=["python", "-m", "unittest", "tests.test_add"],
        test_files={"tests/test_add.py": UNITTEST},
        FAIL_TO_PASS=["tests.test_add.AddTest.test_add", "Adding adds.", "test_add (tests.test_add.AddTest)"],
        PASS_TO_PASS=["test_someday (tests.test_add.AddTest.test_someday)"],
    )


def test_unittest_is_graded_by_every_name_of_a_test(python_world: SWEWorld) -> None:
    grade = grade_patch(python_world, PATCH)
    assert (grade.score, grade.reason) == (1.0, "resolved: full"), grade.metadata
    assert set(grade.metadata["fail_to_pass"].values()) == {"PASSED"}
    assert set(grade.metadata["pass_to_pass"].values()) == {"XFAIL"}
    assert run_tests(python_world, PATCH).statuses["tests.test_add.AddTest.test_fails"] == "FAILED"


def test_a_failing_subtest_fails_its_test(python_world: SWEWorld) -> None:
    assert run_tests(python_world, PATCH).statuses["tests.test_add.AddTest.test_parts"] == "PASSED"
    wrong = run_tests(python_world, PATCH.replace("a + b", "a + b if a < 2 else 0"))
    assert wrong.statuses["tests.test_add.AddTest.test_parts"] == "FAILED"
    by_pytest = world(
        Path(python_world.task.source),
        test_files={"tests/test_add.py": UNITTEST},
        FAIL_TO_PASS=["tests/test_add.py::AddTest::test_parts"],
    )
    grade = grade_patch(by_pytest, PATCH.replace("a + b", "a + b if a < 2 else 0"))
    assert grade.metadata["fail_to_pass"] == {"tests/test_add.py::AddTest::test_parts": "FAILED"}


PRINTS = "print('test_add (tests.test_add.AddTest) ... ok')"
PASSES = "import unittest; unittest.TestCase.run = lambda self, result=None: result.addSuccess(self)"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"{PRINTS}; return 0", "resolved: no"),
        (f"{PRINTS}; __import__('os')._exit(0)", "the tests did not run to their end"),
        (f"exec({PASSES!r}); return 0", "one that must fail did not"),
    ],
)
def test_what_a_patch_prints_or_does_to_unittest_earns_nothing(
    python_world: SWEWorld, body: str, reason: str
) -> None:
    grade = grade_patch(python_world, PATCH.replace("return a + b", body))
    assert grade.score == 0.0
    assert reason in grade.reason or "resolved: no" in grade.reason


@pytest.fixture(scope="module")
def node_world(tmp_path_factory: pytest.TempPathFactory) -> SWEWorld:
    if not (shutil.which("node") or "").startswith("/usr/"):
        pytest.skip("sandboxes here have no node")
    source = tmp_path_factory.mktemp("node") / "sum"
    source.mkdir()
    (source / "sum.js").write_text(SUM)
    return world(
        source,
        patch=NODE_PATCH,
        test_command=["node", "--test"],
        test_files={"test/add.test.js": NODE},
        FAIL_TO_PASS=["add > adds"],
        PASS_TO_PASS=[],
    )


def test_tests_of_node_are_graded(node_world: SWEWorld) -> None:
    grade = grade_patch(node_world, node_world.repository.gold)
    assert (grade.score, grade.reason) == (1.0, "resolved: full"), grade.metadata
    assert grade.metadata["fail_to_pass"] == {"add > adds": "PASSED"}


def line(text: str) -> str:
    return NODE_PATCH.replace("exports.add = (a, b) => a + b;", text)


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (line("exports.add = (a, b) => a;"), "resolved: no"),
        (line("console.log('1..1\\\\nok 1 - adds'); process.exit(0);"), "resolved: no"),
        (line("exports.add = ("), "resolved: no"),
        (line("require('node:test').it = () => {}; process.kill(process.ppid);"), "did not run to their end"),
        (
            "diff --git a/test/add.test.js b/test/add.test.js\nnew file mode 100644\n--- /dev/null\n"
            "+++ b/test/add.test.js\n@@ -0,0 +1 @@\n+exports.nothing = 1;\n",
            "resolved: no",
        ),
    ],
    ids=["wrong", "prints", "no program", "kills its runner", "rewrites the test"],
)
def test_a_patch_that_mends_nothing_earns_nothing_of_node(
    node_world: SWEWorld, patch: str, reason: str
) -> None:
    grade = grade_patch(node_world, patch)
    assert grade.score == 0.0
    assert reason in grade.reason


def test_an_unknown_runner_is_refused_before_any_world_is_made(tmp_path: Path) -> None:
    entry = row(project(tmp_path), test_command=["npm", "test"])
    with pytest.raises(ConfigError, match="calc__calc-1: its `test_command` is 'npm test'"):
        SWEEnv(entry=entry)


MANAGE = """\
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""


@pytest.mark.slow
def test_tests_of_django_are_graded(tmp_path: Path) -> None:
    """Django comes from pip's index, so this needs one."""
    source = project(tmp_path)
    (source / "manage.py").write_text(MANAGE)
    (source / "settings.py").write_text("SECRET_KEY = 'x'\nUSE_TZ = True\n")
    (source / "tests" / "__init__.py").write_text("")
    made = world(
        source,
        install=["pip install django==4.2.16"],
        test_command=["python", "manage.py", "test", "tests"],
        test_files={
            "tests/test_add.py": UNITTEST.replace("unittest.TestCase", "SimpleTestCase").replace(
                "import unittest\n", "import unittest\nfrom django.test import SimpleTestCase\n"
            )
        },
        FAIL_TO_PASS=["test_add (tests.test_add.AddTest)"],
        PASS_TO_PASS=[],
    )
    grade = grade_patch(made, PATCH)
    assert (grade.score, grade.reason) == (1.0, "resolved: full"), grade.metadata
    assert run_tests(made, PATCH).statuses["tests.test_add.AddTest.test_fails"] == "FAILED"
    visible = run_visible_tests(made, PATCH)
    assert (visible.passed, visible.failed, visible.fault) == (0, 0, ""), "its other test is a function"
    wrong = grade_patch(made, PATCH.replace("a + b", f"a - b  # {PRINTS}"))
    assert wrong.metadata["fail_to_pass"] == {"test_add (tests.test_add.AddTest)": "FAILED"}
