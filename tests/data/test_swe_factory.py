"""The factory on a project of a few lines, through its front door, in real sandboxes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rllm.cli.main import rllm
from rllm.data.swe_environment import package_environment
from rllm.data.swe_factory import Progress, Settings, build
from rllm.data.swe_factory.bench import BenchJob, BenchLimits, TestBench
from rllm.data.swe_factory.project import project_of
from rllm.data.swe_factory.requirements import requirements_of
from rllm.data.swe_factory.sources import open_source
from rllm.data.swe_factory.splits import splits_of
from rllm.data.swe_factory.statement import statement
from rllm.data.swe_rows import SWETask, read_swe_rows
from rllm.errors import ConfigError

pytestmark = pytest.mark.usefixtures("bubblewrap")

SOURCE = '''\
def clamp(value, low=0, high=10):
    """Value between low and high."""
    if value < low:   # too small
        return low
    if value > high:
        return high
    return value


def total(numbers, start=0):
    result = start
    for number in numbers:
        if number is None:
            continue
        result += number
    return result


def windows(items, size):
    for place in range(len(items) - size + 1):
        yield items[place : place + size]


def never_called(x):
    return x + 1
'''
TESTS = """\
import unittest
import pytest
import pkg.tools as tools

STATE = []


class TestClamp(unittest.TestCase):
    def test_low(self):
        self.assertEqual(tools.clamp(-1), 0)

    def test_high(self):
        self.assertEqual(tools.clamp(11), 10)

    def test_inside(self):
        self.assertEqual(tools.clamp(5, 2, 8), 5)


def test_total():
    assert tools.total([1, None, 2]) == 3


def test_windows():
    assert list(tools.windows([1, 2, 3], 2)) == [[1, 2], [2, 3]]


def test_broken():
    assert tools.total([1]) == 5


def test_of_order_first():
    STATE.append(1)


def test_of_order_second():
    assert STATE


@pytest.mark.skip
def test_skipped():
    assert False
"""
FILES = {
    "pkg/__init__.py": "",
    "pkg/tools.py": SOURCE,
    "tests/test_tools.py": TESTS,
    "tests/test_other.py": "import not_there\n",
}


def project(folder: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A build that was stopped after its first task, and went on."""
    folder = tmp_path_factory.mktemp("factory")
    source = project(folder / "tiny")

    class Stopped(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.num_kept:
            raise Stopped

    with pytest.raises(Stopped):
        build([str(source)], folder / "out", Settings(max_tasks=4), workers=2, on_progress=stop)
    journal = next((folder / "out").glob(".build/*/journal.jsonl"))
    with journal.open("a") as stream:
        stream.write('{"key": "cut o')
    return folder, build([str(source)], folder / "out", Settings(max_tasks=4))


def test_tests_that_fail_depend_on_order_or_are_skipped_are_no_tests_of_a_task(
    made: tuple[Path, dict[str, Any]],
) -> None:
    folder, manifest = made
    (source,) = manifest["sources"]
    assert source["tests"] == {
        "passing": 6,
        "failing": 1,
        "flaky": 1,
        "skipped": 1,
        "files_not_importable": 1,
    }
    assert "not_there" in source["not_importable"]["tests/test_other.py"]
    named = {each for row in rows(folder) for each in (*row["FAIL_TO_PASS"], *row["PASS_TO_PASS"])}
    assert named == {
        f"tests/test_tools.py::{name}"
        for name in (
            *("TestClamp::test_low", "TestClamp::test_high", "TestClamp::test_inside"),
            *("test_total", "test_windows", "test_of_order_first"),
        )
    }


def test_no_run_sees_what_was_compiled_for_the_bug_of_another(tmp_path: Path) -> None:
    """Also not in a process that a test starts, which may write compiled files; bugs are of one length."""
    test = """
import subprocess, sys
from pkg import tools
def test_here():
    assert tools.f(3) == 4
def test_there():
    code = "from pkg import tools; print(tools.f(3))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "4\\n"
"""
    source = {"pkg/__init__.py": "", "pkg/tools.py": "def f(x):\n    return x + 1\n", "tests/test_f.py": test}
    opened = open_source(str(project(tmp_path / "project", source)), tmp_path / "work")
    about = project_of(opened)
    environment = package_environment(requirements_of(about, ()).install, name="f", backend="bubblewrap")

    def job(name: str, expression: str) -> BenchJob:
        files: dict[str, str | None] = (
            {"pkg/tools.py": f"def f(x):\n    return {expression}\n"} if expression else {}
        )
        return BenchJob(name=name, files=files, cpu_s=20, memory_mb=512)

    jobs = [job("1", ""), job("2", "x - 1"), job("3", "1 + x"), job("4", "x * 1"), job("5", "")]
    with TestBench(opened.tree, about, environment, "bubblewrap", BenchLimits()) as bench:
        ends = [sorted(each.outcomes.values()) for each in bench.run(jobs)]
    right, wrong = ["passed", "passed"], ["failed", "failed"]
    assert ends == [right, wrong, right, wrong, right]


class ShortJob(BenchJob):
    wall_s = 2.5


CROWDED = """\
import os, subprocess, sys, time

def test_that_needs_a_processor():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(5):
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
    end = time.process_time() + 0.8
    while time.process_time() < end:
        pass
"""


def test_a_run_on_a_crowded_machine_is_no_timeout(tmp_path: Path) -> None:
    """The tests have a sixth of a processor, and need more seconds than they may take."""
    asleep: dict[str, str | None] = {
        "test_crowded.py": "import time\n\ndef test_that_sleeps():\n    time.sleep(60)\n"
    }
    source = {"pkg/__init__.py": "", "test_crowded.py": CROWDED}
    opened = open_source(str(project(tmp_path / "project", source)), tmp_path / "work")
    about = project_of(opened)
    environment = package_environment(requirements_of(about, ()).install, name="f", backend="bubblewrap")
    jobs = [
        ShortJob(name="crowded", cpu_s=20, memory_mb=512),
        ShortJob(name="asleep", files=asleep, cpu_s=20, memory_mb=512),
    ]
    with TestBench(opened.tree, about, environment, "bubblewrap", BenchLimits()) as bench:
        crowded, sleeping = bench.run(jobs)
    assert crowded.outcomes == {"test_crowded.py::test_that_needs_a_processor": "passed"}, crowded
    assert sleeping.why == "timeout"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/tasks.jsonl").read_text().splitlines()]


def test_every_count_adds_up(made: tuple[Path, dict[str, Any]]) -> None:
    folder, manifest = made
    (source,) = manifest["sources"]
    assert source["candidates"] == source["tried"] + source["not_tried"]
    assert source["tried"] == source["kept"] + sum(source["dropped"].values())
    assert source["dropped"]["not_covered"] == 1
    assert manifest["tasks"] == source["kept"] == sum(manifest["splits"].values()) == len(rows(folder)) == 4
    assert not (folder / "out/.build").exists()


def test_splits_share_no_function_and_are_directories_of_rows(made: tuple[Path, dict[str, Any]]) -> None:
    folder, manifest = made
    functions: dict[str, str] = {}
    for row in rows(folder):
        for each in row["functions"]:
            assert functions.setdefault(each, row["split"]) == row["split"]
    assert len(functions) == 3
    assert sorted(manifest["splits"].values()) == [1, 1, 2]
    for split, count in manifest["splits"].items():
        tasks = [SWETask.from_row(each) for each in read_swe_rows(folder / "out" / split)]
        assert len(tasks) == count
        assert all(Path(task.source).is_file() and task.is_git_source for task in tasks)


def test_the_named_tests_fail_with_the_bug_and_pass_with_the_gold_patch(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = made
    row = rows(folder)[0]
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(folder / "out" / row["source"]), str(clone))
    git(clone, "checkout", "-q", row["base_commit"])
    assert {each: (clone / each).read_text() for each in FILES} == FILES
    git(clone, "merge-base", "--is-ancestor", row["base_commit"], "HEAD")  # a fetch asks for HEAD
    git(clone, "apply", "-", stdin=row["bug_patch"])
    assert not passes(clone, row["FAIL_TO_PASS"])
    git(clone, "apply", "-", stdin=row["patch"])
    assert passes(clone, row["FAIL_TO_PASS"] + row["PASS_TO_PASS"])


def git(at: Path, *words: str, stdin: str = "") -> None:
    subprocess.run(["git", *words], cwd=at, input=stdin, text=True, check=True, capture_output=True)


def passes(at: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=at, env=environment, capture_output=True, check=False).returncode == 0


def test_a_statement_shows_the_behaviour_and_no_line_of_a_test(made: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = made
    lines = [each.strip() for each in TESTS.splitlines() if len(each.strip()) >= 12]
    for row in rows(folder):
        text = row["problem_statement"]
        assert text.startswith("# `pkg.tools.")
        assert "Expected: " in text
        assert "Actual: " in text
        assert not [each for each in lines if each in text]
        assert not any(each.rpartition("::")[2] in text for each in row["FAIL_TO_PASS"])


@pytest.mark.slow
def test_the_same_seed_makes_the_same_bytes_however_it_was_interrupted(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, manifest = made
    again = build([str(folder / "tiny")], tmp_path / "out", Settings(max_tasks=4), workers=2)
    assert again == manifest
    for name in manifest["files"]:
        assert (tmp_path / "out" / name).read_bytes() == (folder / "out" / name).read_bytes()


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_how_long_tests_took(tmp_path: Path) -> None:
    """More tests fail than a statement shows, and each of them takes another time in every run."""
    test = "import random, time\nfrom pkg import tools\nDRAWN = random.SystemRandom()\n" + "".join(
        f"def test_{number}():\n    until = time.process_time() + DRAWN.random() / 50\n"
        f"    while time.process_time() < until: pass\n    assert tools.f({number}) == {number + 1}\n"
        for number in range(8)
    )
    source = {"pkg/__init__.py": "", "pkg/tools.py": "def f(x):\n    return x + 1\n", "tests/test_f.py": test}
    folder = project(tmp_path / "project", source)
    for out in ("a", "b"):
        build([str(folder)], tmp_path / out, Settings(max_tasks=1))
    assert (tmp_path / "a" / "tasks.jsonl").read_bytes() == (tmp_path / "b" / "tasks.jsonl").read_bytes()


def test_a_directory_of_another_build_is_refused_and_the_same_command_says_what_is_there(
    made: tuple[Path, dict[str, Any]],
) -> None:
    folder, manifest = made
    words = ["dataset", "build", "swe", str(folder / "tiny"), "--out", str(folder / "out"), "--max-tasks"]
    done = CliRunner().invoke(rllm, [*words, "4", "--json"])
    assert json.loads(done.stdout)["sources"] == manifest["sources"]
    assert "4 tasks in " in CliRunner().invoke(rllm, [*words, "4"]).stdout
    other = CliRunner().invoke(rllm, [*words, "7"])
    assert other.exit_code == 2
    assert "another build" in other.output


def test_a_project_is_that_of_its_own_repository_inside_a_hook_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        git(project(tmp_path / name, {"pkg.py": f"NAME = {name!r}\n"}), "init", "-q")
        git(tmp_path / name, "add", "-A")
        git(tmp_path / name, "-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "-q", "-m", name)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / ".git" / "index"))
    opened = open_source(str(tmp_path / "one"), tmp_path / "work")
    assert (opened.tree / "pkg.py").read_text() == "NAME = 'one'\n"


def test_a_fix_in_the_history_is_taken_back_and_uncommitted_files_are_not_looked_at(tmp_path: Path) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    clone = tmp_path / "history"
    wrong = SOURCE.replace("return high\n", "return low\n")
    git(project(clone, {"pkg.py": wrong}), "init", "-q")
    git(clone, "add", "-A")
    git(clone, *identity, "commit", "-q", "-m", "first")
    test = "import pkg\n\ndef test_high():\n    assert pkg.clamp(11) == 10\n    assert pkg.clamp(5) == 5\n"
    project(clone, {"pkg.py": SOURCE, "test_pkg.py": test})
    git(clone, "add", "-A")
    git(clone, *identity, "commit", "-q", "-m", "second")
    project(clone, {"pkg.py": "broken(", "test_new.py": "def test_it(): pass\n"})
    manifest = build([str(clone)], tmp_path / "out", Settings(max_tasks=1))
    (row,) = [json.loads(line) for line in (tmp_path / "out/tasks.jsonl").read_text().splitlines()]
    assert (row["operator"], row["functions"]) == ("reverted_commit", ["pkg.py:clamp"])
    assert row["FAIL_TO_PASS"] == ["test_pkg.py::test_high"]
    assert "+        return low" in row["bug_patch"]
    assert row["problem_statement"] == (
        "# `pkg.clamp` gives a wrong result\n\n```\nclamp(value=11)\n```\n\nExpected: `10`\n\nActual: `0`\n"
    )
    assert (manifest["sources"][0]["kind"], manifest["sources"][0]["tests"]["passing"]) == ("git", 1)


@pytest.mark.slow
def test_a_build_that_is_killed_goes_on_and_leaves_nothing_running(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, manifest = made
    words = [
        "dataset",
        "build",
        "swe",
        str(folder / "tiny"),
        "--out",
        str(tmp_path / "out"),
        "--max-tasks",
        "4",
    ]
    process = subprocess.Popen([sys.executable, "-m", "rllm", *words], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not list(tmp_path.glob("out/.build/0/journal.jsonl")):
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (tmp_path / "out/manifest.json").exists()
    assert build([str(folder / "tiny")], tmp_path / "out", Settings(max_tasks=4)) == manifest
    assert not [each for each in running_commands() if str(tmp_path) in each]


@pytest.mark.slow
def test_a_published_sdist_gives_tasks_that_its_own_grader_finds_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    words = ["dataset", "build", "swe", "pypi:inflection==0.5.1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(rllm, [*words, "--max-tasks", "3"])
    if "cannot be had" in done.output:
        pytest.skip("pip has no index to fetch from")
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (manifest["tasks"], manifest["sources"][0]["tests"]["passing"]) == (3, 455)
    graded = CliRunner().invoke(rllm, ["doctor", "tasks", str(tmp_path / "out/train"), "--no-tampering"])
    assert graded.exit_code == 0, graded.output


def running_commands() -> list[str]:
    paths = Path("/proc").glob("[0-9]*/cmdline")
    return [path.read_bytes().decode(errors="replace") for path in paths if path.exists()]


BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "no path": (lambda home: str(home / "nowhere"), "is no project"),
    "no modules": (lambda home: str(project(home / "p", {"readme.txt": "x"})), "has no Python modules"),
    "no tests": (lambda home: str(project(home / "p", {"a/b.py": "x = 1\n"})), "has no tests"),
    "no version": (lambda home: "pypi:toolz", "names no release"),
    "broken toml": (
        lambda home: str(project(home / "p", {**FILES, "pyproject.toml": "[x"})),
        "pyproject.toml cannot be read",
    ),
    "no archive": (lambda home: str(project(home, {"p-1.tar.gz": "x"}) / "p-1.tar.gz"), "cannot be unpacked"),
    "written into itself": (lambda home: str(project(home, FILES)), "choose an --out beside it"),
    "a pipe": (lambda home: with_pipe(home / "p"), "is a named pipe"),
    "an option of pip": (
        lambda home: str(project(home / "p", {**FILES, "PKG-INFO": "Requires-Dist: --index-url=x\n"})),
        "is no name with a version",
    ),
    "an address": (
        lambda home: str(project(home / "p", {**FILES, "PKG-INFO": "Requires-Dist: a @ https://b/a.whl\n"})),
        "is no name with a version",
    ),
    "a module that is a link": (lambda home: with_link(home / "p"), "has no Python modules"),
    "no commit": (lambda home: empty_repository(home / "p"), "has no commit yet"),
    "lfs": (
        lambda home: str(
            project(home / "p", {**FILES, "d.bin": "version https://git-lfs.github.com/spec/v1\noid x\n"})
        ),
        "pointer of Git LFS",
    ),
}


def with_pipe(folder: Path) -> str:
    os.mkfifo(project(folder) / "pipe")
    return str(folder)


def with_link(folder: Path) -> str:
    project(folder, {"test_a.py": "def test_a(): pass\n"})
    (folder / "a.py").symlink_to("/etc/passwd")
    return str(folder)


def empty_repository(folder: Path) -> str:
    git(project(folder), "init", "-q")
    return str(folder)


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_is_no_project_with_tests_is_an_error_before_any_work(name: str, tmp_path: Path) -> None:
    address, message = BAD[name]
    done: Result = CliRunner().invoke(
        rllm, ["dataset", "build", "swe", address(tmp_path), "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_two_sources_of_one_name_are_refused_before_any_work(tmp_path: Path) -> None:
    first, second = project(tmp_path / "a/p"), project(tmp_path / "b/p")
    with pytest.raises(ConfigError, match="named p"):
        build([str(first), str(second)], tmp_path / "out", Settings())


def test_a_project_without_a_passing_test_says_why(tmp_path: Path) -> None:
    source = project(tmp_path / "p", {"a.py": "x = 1\n", "test_a.py": "import missing_thing\n"})
    with pytest.raises(ConfigError, match=r"missing_thing.*--with"):
        build([str(source)], tmp_path / "out", Settings())


def test_a_test_runner_that_gives_up_is_quoted(tmp_path: Path) -> None:
    source = project(tmp_path / "p", {**FILES, "pytest.ini": "[pytest]\nrequired_plugins = pytest-nothere\n"})
    with pytest.raises(ConfigError, match=r"pytest: USAGE_ERROR: .*pytest-nothere"):
        build([str(source)], tmp_path / "out", Settings())


def test_splits_hold_functions_and_their_copies_together() -> None:
    functions = {f"t{n}": [f"f{n // 2}"] for n in range(40)}
    functions["t39"] = ["f19", "f0"]
    splits = splits_of(functions, seed=3)
    assert all(splits[f"t{n}"] == splits[f"t{n + 1}"] for n in range(0, 40, 2))
    assert splits["t39"] == splits["t0"]
    assert {*splits.values()} == {"train", "validation", "test"}
    assert sum(each == "train" for each in splits.values()) >= 20
    assert splits == splits_of(dict(reversed(functions.items())), seed=3)
    assert any(splits != splits_of(functions, seed) for seed in range(3))


def test_nothing_is_said_rather_than_a_line_of_the_test() -> None:
    failure = {
        "kind": "ValueError",
        "where": "elsewhere",
        "line": "ValueError: size of 3 is odd",
        "comparison": None,
    }
    said = {"failures": {"t": failure}, "plain": {}, "with_bug": {}, "paths": [""]}
    assert "size of 3 is odd" in statement(**said, test_texts=["x = 1\n"])
    assert statement(**said, test_texts=["    raise_it(\n    ValueError: size of 3 is odd\n"]) == ""


def call(function: str, arguments: list[list[str]], **ending: Any) -> dict[str, Any]:
    return {"file": "src/pkg/a.py", "line": 1, "function": function, "arguments": arguments, **ending}


def test_calls_are_written_as_one_types_them_and_come_before_how_tests_failed() -> None:
    arguments = [["self", "Box(1)"], ["x", "2"], ["*rest", "(3,)"], ["**more", "{'a': 4}"]]
    compared = {"kind": "AssertionError", "where": "test", "line": "", "comparison": ["==", "1", "2"]}
    text = statement(
        {"t1": compared, "t2": compared},
        {"t1": [call("Box.__call__", arguments, returns="5")], "t2": [call("f", [], returns="1")]},
        {
            "t1": [call("Box.__call__", arguments, raises="ValueError: no")],
            "t2": [call("f", [], returns="1")],
        },
        paths=["src"],
        test_texts=[],
    )
    assert text == (
        "# `pkg.a.Box` raises ValueError\n\n```\nBox(1)(x=2, *(3,), **{'a': 4})\n```\n\nExpected: `5`\n\n"
        "Actual: raises `ValueError: no`\n\nA value is `1`; it should be equal to `2`.\n\n"
        "Before it `pkg.a.f` was called.\n"
    )
