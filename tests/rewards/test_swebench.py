"""The rules of SWE-bench on logs of our own, and the grader on a real repository in a sandbox without a
container."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, RewardError
from rllm.rewards import swebench_grader as module
from rllm.rewards.swebench import END, START, Resolution, Status, ids_of, patch_of, statuses_of, verdict_of
from rllm.rewards.swebench_grader import APPLY, SweBenchGrader, eval_script_of
from rllm.sandbox.types import ExecResult
from rllm.sandbox.types import Status as ExecStatus


def log(*lines: str, code: int | None = None) -> str:
    end = [] if code is None else [f"EXIT_CODE={code}"]
    return "\n".join(["collected 5 items", f"+ : '{START}'", *lines, f"+ : '{END}'", *end])


def test_statuses_are_read_between_the_markers() -> None:
    found = statuses_of(
        "PASSED tests/a.py::before\n"
        + log(
            "PASSED tests/a.py::one",
            "FAILED tests/a.py::two - AssertionError: no",
            "SKIPPED [1] tests/a.py:3: later",
            "ERROR tests/a.py::three",
            "XFAIL tests/a.py::four",
            "noise",
            code=1,
        )
        + "\nPASSED tests/a.py::after"
    )
    assert found == {
        "tests/a.py::one": Status.PASSED,
        "tests/a.py::two": Status.FAILED,
        "[1]": Status.SKIPPED,
        "tests/a.py::three": Status.ERROR,
        "tests/a.py::four": Status.XFAIL,
    }


def test_a_failing_subtest_fails_its_test_though_pytest_says_passed() -> None:
    found = statuses_of(log("SUBFAILED(n=1) tests/a.py::one - no", "PASSED tests/a.py::one", code=1))
    assert found == {"tests/a.py::one": Status.FAILED}


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"{START}\nPASSED a",
        log("PASSED a", code=2),
    ],
)
def test_a_run_that_never_ended_is_no_log(text: str) -> None:
    assert statuses_of(text) is None


P, F, S, X, E = Status.PASSED, Status.FAILED, Status.SKIPPED, Status.XFAIL, Status.ERROR


@pytest.mark.parametrize(
    ("statuses", "fail_to_pass", "pass_to_pass", "resolution"),
    [
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
    ],
)
def test_an_issue_is_resolved_by_the_published_rules(
    statuses: dict[str, Status], fail_to_pass: list[str], pass_to_pass: list[str], resolution: Resolution
) -> None:
    assert verdict_of(statuses, fail_to_pass, pass_to_pass).resolution is resolution


def test_where_logs_name_failures_alone_the_rest_has_passed() -> None:
    assert verdict_of({}, ["a"], ["b"], fail_only=True).resolution is Resolution.FULL
    assert verdict_of({"b": F}, ["a"], ["b"], fail_only=True).resolution is Resolution.NO


def test_ids_are_lists_or_texts_that_are_lists() -> None:
    assert ids_of('["a", "b"]', "F") == ids_of(["a", "b"], "F") == ids_of("['a', 'b']", "F") == ["a", "b"]
    with pytest.raises(RewardError, match="`F` is 'a b'"):
        ids_of("a b", "F")


def test_the_last_patch_of_an_answer_counts() -> None:
    one, two = "diff --git a/x b/x\n+1\n", "diff --git a/x b/x\n+2\n"
    assert patch_of(f"First\n```diff\n{one}```\nNo:\n```diff\n{two}```\n") == two
    assert patch_of(two) == two
    assert patch_of("```diff\nno patch\n```") is None
    assert patch_of("I would change x.") is None


class LocalRepository:
    """A sandbox whose /testbed and /tmp are directories of a test: what the container would be."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands: list[str] = []

    def __enter__(self) -> "LocalRepository":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def write(self, path: str, data: str) -> None:
        (self.root / Path(path).name).write_text(self._here(data))

    def exec(self, command: Any, *, cwd: str = "", **_: Any) -> ExecResult:
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        self.commands.append(words[-1])
        words = [self._here(word) for word in words]
        done = subprocess.run(words, cwd=self.root / "testbed", capture_output=True, text=True, check=False)
        return ExecResult(
            status=ExecStatus.OK if done.returncode == 0 else ExecStatus.ERROR,
            exit_code=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            truncated=False,
            wall_s=0.0,
        )

    def _here(self, text: str) -> str:
        text = text.replace("python -m pytest", f"{sys.executable} -m pytest")
        return text.replace("/testbed", str(self.root / "testbed")).replace("/tmp/", f"{self.root}/")


def git(*words: str, cwd: Path) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def issue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], LocalRepository]:
    """A project with a bug, and its row."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    project = tmp_path / "testbed"
    project.mkdir()
    (project / "calc.py").write_text("def double(x):\n    return x + x + 1\n")
    (project / "test_calc.py").write_text("from calc import double\n\ndef test_type():\n    assert double\n")
    git("init", "-q", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "-qm", "one", cwd=project)
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
    repository = LocalRepository(tmp_path)
    monkeypatch.setattr(module, "require_backend", lambda name: None)
    monkeypatch.setattr(module, "open_sandbox", lambda *_, **__: repository)
    return row, repository


def fix(line: str) -> str:
    return (
        "```diff\ndiff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def "
        "double(x):\n"
        f"-    return x + x + 1\n+    {line}\n```"
    )


def test_a_patch_that_resolves_the_issue_scores_one(issue: tuple[dict[str, Any], LocalRepository]) -> None:
    row, repository = issue
    grade = SweBenchGrader().grade(fix("return 2 * x"), row)
    assert (grade.score, grade.reason) == (1.0, "resolved: full")
    assert repository.commands[1] == APPLY[0].format(patch="/tmp/model.patch")


def test_a_project_that_nobody_can_write_to_is_no_fault_of_the_patch(
    issue: tuple[dict[str, Any], LocalRepository], monkeypatch: pytest.MonkeyPatch
) -> None:
    row, repository = issue
    run = repository.exec
    monkeypatch.setattr(
        repository, "exec", lambda command, **how: run("false" if command == "test -w ." else command, **how)
    )
    with pytest.raises(RewardError, match="cannot write to /testbed"):
        SweBenchGrader().grade(fix("return 2 * x"), row)


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
    issue: tuple[dict[str, Any], LocalRepository], answer: str, reason: str
) -> None:
    grade = SweBenchGrader().grade(answer, issue[0])
    assert (grade.score, grade.is_correct) == (0.0, False)
    assert any(each in grade.reason for each in reason.split("|")), grade.reason


def test_tests_that_the_patch_rewrote_are_put_back(issue: tuple[dict[str, Any], LocalRepository]) -> None:
    planted = (
        "```diff\ndiff --git a/test_calc.py b/test_calc.py\n--- a/test_calc.py\n+++ b/test_calc.py\n@@ "
        "-1,4 +1,4 @@\n"
        "-from calc import double\n+double = lambda x: 4\n \n def test_type():\n     assert double\n```"
    )
    assert SweBenchGrader().grade(planted, issue[0]).score == 0.0


def test_a_row_without_python_tests_needs_its_own_script() -> None:
    row = {"instance_id": "x", "base_commit": "0", "test_patch": "diff --git a/a.js b/a.js\n"}
    with pytest.raises(RewardError, match="brings no `eval_script`"):
        eval_script_of(row, "/testbed")
    assert eval_script_of({**row, "eval_script": "run me"}, "/testbed") == "run me"


def test_without_containers_the_error_says_so() -> None:
    row = {
        "instance_id": "a__b-1",
        "base_commit": "0",
        "test_patch": "diff --git a/t.py b/t.py\n",
        "FAIL_TO_PASS": "[]",
        "PASS_TO_PASS": "[]",
    }
    with pytest.raises(ConfigError, match="none-such"):
        SweBenchGrader(backend="none-such").grade(fix("return 1"), row)
