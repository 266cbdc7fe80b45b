"""Hidden tests of real runners other than pytest, in real sandboxes: unittest, and Node's own."""

import shutil
import subprocess
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
from swe_projects import LIMITS, PATCH, forging_line, project, row, usable_backend

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


def test_tests_of_unittest_have_twins_and_what_is_equal_to_everything_is_not_paid(
    python_world: SWEWorld,
) -> None:
    twins = run_tests(python_world, PATCH).twins
    assert twins["tests.test_add.AddTest.test_add"] == ["PASSED", "PASSED", "FAILED"]
    equal = "return type('E', (int,), {'__eq__': lambda s, o: True})(1)"
    grade = grade_patch(python_world, PATCH.replace("return a + b", equal))
    assert (grade.score, grade.reason[:8]) == (0.0, "the twin"), grade


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


def test_no_caller_of_a_patch_has_a_variable_that_seals_a_report_of_unittest(python_world: SWEWorld) -> None:
    forging = forging_line([*python_world.task.fail_to_pass, *python_world.task.pass_to_pass])
    grade = grade_patch(python_world, PATCH.replace("return a + b", forging))
    assert (grade.score, set(grade.metadata["fail_to_pass"].values())) == (0.0, {"FAILED"})


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
    assert (visible.num_passed, visible.num_failed, visible.fault) == (0, 0, ""), (
        "its other test is a function"
    )
    wrong = grade_patch(made, PATCH.replace("a + b", f"a - b  # {PRINTS}"))
    assert wrong.metadata["fail_to_pass"] == {"test_add (tests.test_add.AddTest)": "FAILED"}


def bug_fix(path: str, buggy: str) -> str:
    """A patch of a file of one line, in which a minus becomes a plus."""
    changed = f"-{buggy}+{buggy.replace('a - b', 'a + b')}"
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n{changed}"


CARGO_TOML = '[package]\nname = "sum"\nversion = "0.1.0"\nedition = "2021"\n'
JEST_TEST = "describe('add', () => test('adds', () => expect(add(1, 2)).toBe(3)));\n"
OTHERS: dict[str, dict[str, Any]] = {
    "jest": {
        "source": ("sum.js", SUM),
        "files": {"test/other.test.js": "test('other', () => {});\n"},
        "npm": "jest@29.7.0",
        "command": ["npx", "jest"],
        "test": ("test/add.test.js", f"const {{ add }} = require('../sum.js');\n{JEST_TEST}"),
        "name": "test/add.test.js > add > adds",
    },
    "vitest": {
        "source": ("sum.mjs", "export const add = (a, b) => a - b;\n"),
        "files": {"test/other.test.js": "import { test } from 'vitest';\ntest('other', () => {});\n"},
        "npm": "vitest@2.1.9",
        "command": ["npx", "vitest", "run"],
        "test": (
            "test/add.test.js",
            "import { describe, expect, test } from 'vitest';\nimport { add } from '../sum.mjs';\n"
            + JEST_TEST,
        ),
        "name": "test/add.test.js > add > adds",
    },
    "go": {
        "source": ("sum.go", "package sum; func Add(a, b int) int { return a - b }\n"),
        "files": {
            "go.mod": "module example.com/sum\n\ngo 1.19\n",
            "other_test.go": 'package sum\n\nimport "testing"\n\nfunc TestOther(t *testing.T) {}\n',
        },
        "command": ["go", "test", "./..."],
        "test": (
            "sum_test.go",
            'package sum\n\nimport "testing"\n\n'
            "func TestAdd(t *testing.T) {\n\tif Add(1, 2) != 3 {\n\t\tt.Fail()\n\t}\n}\n",
        ),
        "name": "example.com/sum/TestAdd",
    },
    "cargo": {
        "source": ("src/lib.rs", "pub fn add(a: i64, b: i64) -> i64 { a - b }\n"),
        "files": {"Cargo.toml": CARGO_TOML, "tests/other.rs": "#[test]\nfn other() {}\n"},
        "command": ["cargo", "test"],
        "test": ("tests/add.rs", "#[test]\nfn adds() { assert_eq!(sum::add(1, 2), 3); }\n"),
        "name": "adds",
    },
}
"""Runners whose programs are of this machine, or of npm's registry."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_tests_of_other_languages_are_graded(name: str, tmp_path: Path) -> None:
    """The hidden ones, and of a selection those that the author of a patch could see."""
    about = OTHERS[name]
    program = "npm" if "npm" in about else name
    if not (shutil.which(program, path="/usr/bin") or ""):
        pytest.skip(f"sandboxes here have no {program}")
    source, (path, text) = tmp_path / "sum", about["source"]
    for file, content in {path: text, **about["files"]}.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(content)
    if "npm" in about:
        (source / "package.json").write_text('{"name": "sum", "version": "1.0.0"}\n')
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline"]
        subprocess.run(
            ["npm", "install", *options, about["npm"]], cwd=source, check=True, capture_output=True
        )
    test_path, test = about["test"]
    fields = row(source) | {
        "patch": bug_fix(path, text),
        "test_command": about["command"],
        "test_files": {test_path: test},
        "FAIL_TO_PASS": [about["name"]],
        "PASS_TO_PASS": [],
    }
    limits = replace(LIMITS, memory_mb=4096, disk_mb=1024, processes=512)
    made = SWEWorld.of(SWETask.from_row(fields), backend=usable_backend(), limits=limits)
    grade = grade_patch(made, made.repository.gold)
    assert (grade.score, grade.reason) == (1.0, "resolved: full"), grade.metadata
    wrong = grade_patch(made, made.repository.gold.replace("a + b", "a * b"))
    assert wrong.metadata["fail_to_pass"] == {about["name"]: "FAILED"}, wrong.metadata
    visible = run_visible_tests(made, made.repository.gold)
    assert (visible.num_passed, visible.num_failed, visible.fault) == (1, 0, "")
