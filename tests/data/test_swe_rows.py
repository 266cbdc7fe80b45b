"""Rows of software-engineering tasks: every published form becomes one SWETask, and a broken row is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from rllm.data.swe_rows import SWETask, form_of, holds_swe_rows, read_swe_rows
from rllm.errors import ConfigError

CLASSIC: dict[str, Any] = {
    "instance_id": "astropy__astropy-12907",
    "repo": "astropy/astropy",
    "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
    "patch": "diff --git a/a.py b/a.py\n",
    "test_patch": "diff --git a/test_a.py b/test_a.py\n",
    "problem_statement": "separability_matrix is wrong",
    "hints_text": "",
    "created_at": "2022-03-03T15:14:54Z",
    "version": "4.3",
    "FAIL_TO_PASS": '["test_a.py::test_b[x]"]',
    "PASS_TO_PASS": '["test_a.py::test_c"]',
    "environment_setup_commit": "298ccb478e6bf092953bca67a3d29dc6c35f6752",
}
SMITH: dict[str, Any] = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "patch": "diff --git a/o.py b/o.py\n",
    "FAIL_TO_PASS": ["tests/test_o.py::test_a"],
    "PASS_TO_PASS": [],
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "problem_statement": "Something fails",
}
R2E: dict[str, Any] = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:1c1c0ea",
    "commit_hash": "1c1c0ea353041c8814a6131c3a92978dc2373e52",
    "parsed_commit_content": json.dumps({"old_commit_hash": "abc123", "file_diffs": []}),
    "execution_result_content": json.dumps(
        {"test_file_names": ["test_1.py"], "test_file_codes": ["def test(): pass\n"]}
    ),
    "expected_output_json": json.dumps({"TestA.test_b": "PASSED", "TestA.test_c": "FAILED"}),
    "problem_statement": "It hangs",
}
MULTI: dict[str, Any] = {
    "org": "cli",
    "repo": "cli",
    "number": 10388,
    "base": {"label": "cli:trunk", "ref": "trunk", "sha": "9a6e2f3"},
    "resolved_issues": [{"number": 1, "title": "gh breaks", "body": "on Tuesdays"}],
    "fix_patch": "diff --git a/x.go b/x.go\n",
    "test_patch": "",
    "f2p_tests": {"TestX": {"run": "FAIL", "test": "FAIL", "fix": "PASS"}},
    "p2p_tests": {"name": ["TestY"], "fix": ["PASS"]},
}


@pytest.mark.parametrize(
    ("row", "form", "commit", "failing"),
    [
        (CLASSIC, "swe-bench", "d16bfe05a744909de4b27f5875fe0d4ed41ce607", ("test_a.py::test_b[x]",)),
        (SMITH, "swe-smith", "", ("tests/test_o.py::test_a",)),
        (R2E, "r2e-gym", "abc123", ("TestA.test_b",)),
        (MULTI, "multi-swe", "9a6e2f3", ("TestX",)),
        (
            {k: v for k, v in CLASSIC.items() if not k.isupper()} | {"fail_to_pass": "['t.py::a']"},
            "swe-bench-pro",
            CLASSIC["base_commit"],
            ("t.py::a",),
        ),
    ],
)
def test_every_published_form_is_told_apart_by_its_fields(
    row: dict[str, Any], form: str, commit: str, failing: tuple[str, ...]
) -> None:
    task = SWETask.from_row(row)
    assert (form_of(row), task.form, task.base_commit, task.fail_to_pass) == (form, form, commit, failing)
    assert SWETask.from_row(json.loads(json.dumps(task.to_row()))) == task


def test_a_bug_patch_is_no_solution_and_the_tests_of_r2e_are_files() -> None:
    assert SWETask.from_row(SMITH).bug_patch
    assert not SWETask.from_row(SMITH).patch
    assert SWETask.from_row(R2E).test_files == {"r2e_tests/test_1.py": "def test(): pass\n"}
    assert SWETask.from_row(R2E).image == "namanjain12/aiohttp_final:1c1c0ea"
    assert "on Tuesdays" in SWETask.from_row(MULTI).problem_statement


def test_a_broken_row_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for change, message in [
        ({"base_commit": ""}, "no `base_commit`"),
        ({"base_commit": "--upload-pack=touch /tmp/x"}, "no commit's name"),
        ({"base_commit": None, "source": "x.bundle"}, "no `base_commit`"),
        ({"FAIL_TO_PASS": "[", "PASS_TO_PASS": []}, "`FAIL_TO_PASS`"),
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": []}, "names no test"),
        ({"FAIL_TO_PASS": [1]}, "`FAIL_TO_PASS`"),
        ({"problem_statement": " "}, "`problem_statement`"),
        ({"patch": 3}, "`patch`"),
        ({"test_files": {"../x.py": ""}}, r"\.\./x\.py"),
        ({"test_files": {".git/hooks/x": ""}}, "inside the repository"),
        ({"test_files": "{"}, "`test_files`"),
        ({"install": "pip install x"}, "`install`"),
    ]:
        with subtests.test(change=change, message=message):
            with pytest.raises(ConfigError, match=message) as caught:
                SWETask.from_row(CLASSIC | change)
            assert "astropy__astropy-12907" in str(caught.value)


def test_sources_are_relative_to_the_file_of_rows(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    row = CLASSIC | {"source": "tree", "base_commit": ""}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = [SWETask.from_row(each) for each in read_swe_rows(tmp_path)]
    assert task.source == str(tmp_path / "tree")
    assert not task.is_git_source
    assert holds_swe_rows(tmp_path)
    assert holds_swe_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 2)
    with pytest.raises(ConfigError, match="two rows"):
        read_swe_rows(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"question": "2+2", "answer": "4"}\n')
    assert not holds_swe_rows(tmp_path / "other.jsonl")
    assert not holds_swe_rows(tmp_path / "none")


@pytest.mark.parametrize(
    "command",
    ["python -m pytest -p 'no:x y'", ["python", "-m", "pytest", "-p", "no:x y"]],
    ids=["text", "words"],
)
def test_a_test_command_is_a_text_or_its_words(command: Any) -> None:
    task = SWETask.from_row({**CLASSIC, "test_command": command})
    assert task.test_command == ("python", "-m", "pytest", "-p", "no:x y")
    assert SWETask.from_row(task.to_row()) == task


def test_a_test_command_that_no_shell_reads_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="No closing quotation"):
        SWETask.from_row({**CLASSIC, "test_command": "pytest 'x"})
