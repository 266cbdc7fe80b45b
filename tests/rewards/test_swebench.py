"""The rules of SWE-bench, and the grader of answers on a real repository in a sandbox without a container."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, RewardError, RllmError
from rllm.rewards.swe_grader import SWEGrader
from rllm.rewards.swebench import CaseStatus, Resolution, patch_of, verdict_of
from rllm.sandbox import Root, open_sandbox

P, F, S, X, E = CaseStatus.PASSED, CaseStatus.FAILED, CaseStatus.SKIPPED, CaseStatus.XFAIL, CaseStatus.ERROR


def test_an_issue_is_resolved_by_the_published_rules(subtests: pytest.Subtests) -> None:
    for statuses, fail_to_pass, pass_to_pass, resolution in [
        ({"a": P, "b": P}, ["a"], ["b"], Resolution.FULL),
        ({"a": X, "b": S}, ["a"], ["b"], Resolution.FULL),
        ({"a": S, "b": P}, ["a"], ["b"], Resolution.NO),
        ({"b": P}, ["a"], ["b"], Resolution.NO),
        ({"a": P}, ["a"], ["b"], Resolution.NO),
        ({"a": P, "b": P, "c": F}, ["a", "c"], ["b"], Resolution.PARTIAL),
        ({"a": P, "b": E}, ["a"], ["b"], Resolution.NO),
        ({"b": P}, [], ["b"], Resolution.FULL),
        ({"t[x y]": P}, ["t[x"], [], Resolution.FULL),
        ({"t[x y]": P, "t[x z]": F}, ["t[x"], [], Resolution.NO),
        ({"t[x]": P}, ["t"], [], Resolution.NO),
    ]:
        with subtests.test(
            statuses=statuses, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass, resolution=resolution
        ):
            assert verdict_of(statuses, fail_to_pass, pass_to_pass).resolution is resolution


def test_where_logs_name_failures_alone_the_rest_has_passed() -> None:
    assert verdict_of({}, ["a"], ["b"], fail_only=True).resolution is Resolution.FULL
    assert verdict_of({"b": F}, ["a"], ["b"], fail_only=True).resolution is Resolution.NO


def test_the_last_patch_of_an_answer_counts() -> None:
    one, two = "diff --git a/x b/x\n+1\n", "diff --git a/x b/x\n+2\n"
    assert patch_of(f"First\n```diff\n{one}```\nNo:\n```diff\n{two}```\n") == two
    assert patch_of(two) == two
    assert patch_of("```diff\nno patch\n```") is None
    assert patch_of("I would change x.") is None


def git(*words: str, cwd: Path) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def usable_backend() -> str:
    for name in ("bubblewrap", "unshare"):
        try:
            open_sandbox(name, root=Root(), packages=["pytest"]).close()
        except RllmError:
            continue
        return name
    pytest.skip("no sandbox here that has pytest")


@pytest.fixture(scope="module")
def issue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], SWEGrader]]:
    """A project with a bug: its row, and who grades patches of it in a sandbox of this machine."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    tmp_path = tmp_path_factory.mktemp("repositories")
    project = tmp_path / "org__project-1"
    project.mkdir()
    (project / "calc.py").write_text("def double(x):\n    return x + x + 1\n")
    (project / "test_calc.py").write_text("from calc import double\n\ndef test_type():\n    assert double\n")
    (project / "latest.py").symlink_to("calc.py")
    git("init", "-q", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "-qm", "one", cwd=project)
    (project / "conftest.py").write_text("# beside the repository, and not in it\n")
    test_patch = (
        "diff --git a/test_calc.py b/test_calc.py\n--- a/test_calc.py\n+++ b/test_calc.py\n@@ -2,3 +2,6 "
        "@@\n \n"
        " def test_type():\n     assert double\n+\n+def test_double():\n+    assert double(2) == 4\n"
    )
    row = {
        "instance_id": "org__project-1",
        "base_commit": git("rev-parse", "HEAD", cwd=project),
        "test_patch": test_patch,
        "FAIL_TO_PASS": '["test_calc.py::test_double"]',
        "PASS_TO_PASS": '["test_calc.py::test_type"]',
    }
    grader = SWEGrader(
        backend=usable_backend(),
        source=str(tmp_path / "{instance_id}"),
        timeout_s=30,
        memory_mb=512,
        disk_mb=64,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLM_HOME", str(tmp_path_factory.mktemp("home")))
        yield row, grader


def fix(line: str) -> str:
    return (
        "```diff\ndiff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def "
        "double(x):\n"
        f"-    return x + x + 1\n+    {line}\n```"
    )


def new_file(path: str, *lines: str) -> str:
    body = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{path} b/{path}\nnew file mode 100755\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n{body}"


def test_a_patch_that_resolves_the_issue_scores_one(issue: tuple[dict[str, Any], SWEGrader]) -> None:
    row, grader = issue
    grade = grader.grade(fix("return 2 * x"), row)
    assert (grade.score, grade.reason) == (1.0, "resolved: full")


FORGERY = (
    "import pytest",
    "@pytest.hookimpl(hookwrapper=True)",
    "def pytest_runtest_makereport(item, call):",
    '    (yield).get_result().outcome = "passed"',
)


@pytest.mark.parametrize(
    "planted",
    [
        new_file("conftest.py", *FORGERY),
        new_file("tests/conftest.py", *FORGERY)
        + new_file("pytest.ini", "[pytest]", "addopts = -p tests.conftest"),
        new_file("pyproject.toml", "[tool.pytest.ini_options]", 'addopts = "--collect-only"'),
        new_file(
            "pytest.py",
            "print('PASSED test_calc.py::test_double')",
            "print('PASSED test_calc.py::test_type')",
        ),
        new_file(".git/hooks/post-checkout", "#!/bin/sh", "echo 'double = lambda x: 2 * x' > calc.py"),
    ],
    ids=["conftest", "conftest of the tests", "settings", "a pytest of its own", "hook"],
)
def test_what_steers_the_tests_is_as_it_was(issue: tuple[dict[str, Any], SWEGrader], planted: str) -> None:
    row, grader = issue
    grade = grader.grade(f"```diff\n{planted}```", row)
    assert (grade.score, grade.is_correct) == (0.0, False)
    assert any(each in grade.reason for each in ("resolved: no", "reaches into .git")), grade.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (fix("return 3 * x"), "resolved: no"),
        (fix("raise SystemExit(0)"), "resolved: no"),
        (fix("return (").replace("double(x)", "double(x)"), "did not run|resolved: no"),
        (
            "```diff\ndiff --git a/gone.py b/gone.py\n--- a/gone.py\n+++ b/gone.py\n@@ -1 +1 @@\n-a\n+b\n```",
            "not apply",
        ),
        ("I would double it.", "no patch"),
        ("<think>" + fix("return 2 * x"), "unfinished"),
    ],
)
def test_any_other_patch_scores_nothing(
    issue: tuple[dict[str, Any], SWEGrader], answer: str, reason: str
) -> None:
    row, grader = issue
    grade = grader.grade(answer, row)
    assert (grade.score, grade.is_correct) == (0.0, False)
    assert any(each in grade.reason for each in reason.split("|")), grade.reason


def test_tests_that_the_patch_rewrote_are_put_back(issue: tuple[dict[str, Any], SWEGrader]) -> None:
    planted = (
        "```diff\ndiff --git a/test_calc.py b/test_calc.py\n--- a/test_calc.py\n+++ b/test_calc.py\n@@ "
        "-1,4 +1,4 @@\n"
        "-from calc import double\n+double = lambda x: 4\n \n def test_type():\n     assert double\n```"
    )
    row, grader = issue
    assert grader.grade(planted, row).score == 0.0


def test_without_containers_the_error_says_so() -> None:
    row = {
        "instance_id": "a__b-1",
        "base_commit": "0000000",
        "FAIL_TO_PASS": '["t"]',
        "PASS_TO_PASS": "[]",
    }
    with pytest.raises(ConfigError, match="none-such"):
        SWEGrader(backend="none-such").grade(fix("return 1"), row)


def test_a_local_sandbox_needs_the_project_here(issue: tuple[dict[str, Any], SWEGrader]) -> None:
    row, grader = issue
    with pytest.raises(ConfigError, match="org__project-1 has no `source`"):
        SWEGrader(backend=grader.backend).grade(fix("return 2 * x"), row)
    with pytest.raises(ConfigError, match="docker takes an `image`"):
        SWEGrader(backend="docker", source="/repositories")
    with pytest.raises(ConfigError, match="`image` is for docker"):
        SWEGrader(image="python:3.11")


def test_a_row_that_is_none_is_no_fault_of_the_answer(issue: tuple[dict[str, Any], SWEGrader]) -> None:
    row, grader = issue
    with pytest.raises(RewardError, match="`FAIL_TO_PASS`"):
        grader.grade(fix("return 2 * x"), {**row, "FAIL_TO_PASS": None})
    with pytest.raises(RewardError, match=r"`FAIL_TO_PASS` is 'a b'; .*list"):
        grader.grade(fix("return 2 * x"), {**row, "FAIL_TO_PASS": "a b"})
