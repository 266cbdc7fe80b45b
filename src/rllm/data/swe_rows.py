"""Rows of software-engineering tasks ⇄ SWETask: an issue, a repository at a commit, and tests that say
whether the issue is mended.

    rows.jsonl ──read_swe_rows──► [{…, "source": "/absolute"}] ──SWETask.from_row──► SWETask ──to_row──► a row

The published forms are told apart by their fields:

| form | fields that say so | what is different |
|---|---|---|
| SWE-bench, -Lite, -Verified, -Multilingual, SWE-Gym, SWE-rebench | `base_commit`, `FAIL_TO_PASS` | nothing |
| SWE-bench Pro | `base_commit`, `fail_to_pass` | the tests' names are in small letters |
| SWE-smith | `image_name`, no `base_commit` | `patch` makes the bug, so the gold patch is its reverse |
| R2E-Gym | `repo_name`, `parsed_commit_content` | the commit and the tests are in two JSON texts |
| Multi-SWE-bench, -RL | `org`, `number`, `fix_patch` | the commit is `base.sha`, the issue a list |

Beside the published fields a row says where the repository is and how it is made to run (`source`, `install`,
`test_command`, `test_files`, `python`). Nothing here opens the repository.
"""

import ast
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rllm.data.rows import FORMATS, read_rows
from rllm.errors import ConfigError

ROWS_FILE = "rows.jsonl"
"""The file of a directory of tasks with one row a task; relative paths in it are relative to it."""
SPLITS = ("train", "validation", "test")
"""Folders of a directory that the task factory wrote."""
EVAL_TYPES = ("pass_and_fail", "fail_only")
DEFAULT_TEST_COMMAND = ("python", "-m", "pytest")
ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
"""The endings of the names of sdists and other archives of one tree."""
BUNDLE = ".bundle"
_COMMIT = re.compile(r"[0-9a-fA-F]{4,64}")
_URLS = ("https://", "http://", "git://", "ssh://", "file://", "git@")


@dataclass(kw_only=True, slots=True, frozen=True)
class SWETask:
    """The content of a row."""

    instance_id: str
    repo: str = ""
    """`org/name`, as published; a name, not a place."""
    base_commit: str = ""
    """Empty where the source is an archive or a directory without git: there is only one state of it."""
    problem_statement: str
    hints_text: str = ""
    version: str = ""
    patch: str = ""
    """The reference solution as a diff; empty where there is none, or where `bug_patch` reversed is it."""
    bug_patch: str = ""
    """A diff that makes the bug; applied to `base_commit` before an agent comes."""
    test_patch: str = ""
    """A diff that brings the hidden tests; applied before they run, never in the agent's world."""
    test_files: dict[str, str] = field(default_factory=dict[str, str])
    """Hidden tests as path in the repository -> content, put in place of what is there."""
    fail_to_pass: tuple[str, ...] = ()
    """Ids of tests that fail before the issue is mended and pass after it."""
    pass_to_pass: tuple[str, ...] = ()
    """Ids of tests that pass before and after it."""
    source: str = ""
    """A local clone, a git bundle, an archive (sdist) or a directory, absolute, or the URL of a git
    repository."""
    install: tuple[str, ...] = ()
    """Shell commands, run in the repository, that make its environment; none for a project of the standard
    library alone."""
    test_command: tuple[str, ...] = DEFAULT_TEST_COMMAND
    """Words; the tests to run and where to report are added at their end."""
    python: str = ""
    """Version of the interpreter, as in `3.11`; empty takes this machine's."""
    eval_type: str = "pass_and_fail"
    """`fail_only` where logs name the tests that fail and no others."""
    image: str = ""
    """The container image that was published for the row."""
    form: str = "swe-bench"
    """Which of the published forms the row had."""

    @property
    def is_git_source(self) -> bool:
        """Whether the source has commits to choose from."""
        if self.source.startswith(_URLS) or self.source.endswith(BUNDLE):
            return True
        path = Path(self.source)
        return (path / ".git").exists() or ((path / "HEAD").is_file() and (path / "objects").is_dir())

    @property
    def is_url(self) -> bool:
        return self.source.startswith(_URLS)

    @classmethod
    def from_row(cls, row: Mapping[str, Any], *, folder: Path | None = None) -> "SWETask":
        """Read a row of any form. Relative paths are taken from `folder`.

        Raises ConfigError that names the row and the field: one that is missing, has another type, or is no
        list of tests; a row without `base_commit` whose source has more than one state.
        """
        where = _name(row)
        form, fields = _common_fields(row, where)
        task = cls(
            instance_id=_text(fields, "instance_id", where),
            repo=_text(fields, "repo", where, optional=True),
            base_commit=_text(fields, "base_commit", where, optional=True),
            problem_statement=_text(fields, "problem_statement", where),
            hints_text=_text(fields, "hints_text", where, optional=True),
            version=_text(fields, "version", where, optional=True),
            patch=_text(fields, "patch", where, optional=True),
            bug_patch=_text(fields, "bug_patch", where, optional=True),
            test_patch=_text(fields, "test_patch", where, optional=True),
            test_files=_files(fields.get("test_files"), where),
            fail_to_pass=_texts(fields.get("FAIL_TO_PASS"), "FAIL_TO_PASS", where),
            pass_to_pass=_texts(fields.get("PASS_TO_PASS"), "PASS_TO_PASS", where),
            source=_place(_text(fields, "source", where, optional=True), folder),
            install=_texts(fields.get("install"), "install", where),
            test_command=_words(fields.get("test_command"), where) or DEFAULT_TEST_COMMAND,
            python=_text(fields, "python", where, optional=True),
            eval_type=_text(fields, "eval_type", where, optional=True) or EVAL_TYPES[0],
            image=_text(fields, "image", where, optional=True),
            form=form,
        )
        if task.eval_type not in EVAL_TYPES:
            raise ConfigError(
                f"{where}: `eval_type` is {task.eval_type!r:.80}; it is {' or '.join(EVAL_TYPES)}."
            )
        if task.base_commit and not _COMMIT.fullmatch(task.base_commit):
            raise ConfigError(
                f"{where}: `base_commit` is {task.base_commit!r:.80}, which is no commit's name: write it in "
                "hexadecimal."
            )
        if not (task.fail_to_pass or task.pass_to_pass):
            raise ConfigError(
                f"{where} names no test in `FAIL_TO_PASS` nor in `PASS_TO_PASS`; nothing could say whether "
                "the issue is mended."
            )
        if not task.base_commit and (not task.source or task.is_git_source) and form != "swe-smith":
            raise ConfigError(
                f"{where} has no `base_commit`; give the commit that the agent starts from, or a `source` "
                "that has only one state (a directory without git, an sdist)."
            )
        return task

    def to_row(self) -> dict[str, Any]:
        """A row that `from_row` reads as this task; empty fields are left out."""
        row = {name: value for name, value in asdict(self).items() if value or name == "problem_statement"}
        row["FAIL_TO_PASS"] = list(row.pop("fail_to_pass", ()))
        row["PASS_TO_PASS"] = list(row.pop("pass_to_pass", ()))
        for name in ("install", "test_command"):
            if name in row:
                row[name] = list(row[name])
        for name, usual in (("form", "swe-bench"), ("eval_type", EVAL_TYPES[0])):
            if row[name] == usual:
                del row[name]
        return row


def read_swe_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, or of the ROWS_FILE of a directory, with absolute sources.

    Raises ConfigError for what is no such file, for a row that is no task, and for two of one name.
    """
    rows_path = path / ROWS_FILE if path.is_dir() else path
    if not rows_path.is_file():
        raise ConfigError(f"There is no {rows_path}; give a directory with {ROWS_FILE}, or a file of rows.")
    rows: dict[str, dict[str, Any]] = {}
    for row in read_rows(rows_path):
        task = SWETask.from_row(row, folder=rows_path.parent.resolve())
        if task.instance_id in rows:
            raise ConfigError(
                f"{rows_path} has two rows named {task.instance_id}; each name may be there once."
            )
        rows[task.instance_id] = task.to_row()
    return list(rows.values())


def swe_splits(path: Path) -> dict[str, Path]:
    """Split -> the file or directory with its rows.

    `rllm dataset build swe` makes a folder for each split. A single file, or a directory with ROWS_FILE, has
    one set of rows: who trains on it is measured on it, and reports say so.
    """
    if path.is_dir() and not (path / ROWS_FILE).is_file():
        return {split: path / split for split in SPLITS if (path / split / ROWS_FILE).is_file()}
    return {"train": path, "test": path}


def holds_swe_rows(path: Path) -> bool:
    """Whether `path` is a file of such rows, a directory with ROWS_FILE, or one with a folder for each split.
    Raises nothing."""
    rows_path = next(iter(swe_splits(path).values()), path)
    rows_path = rows_path / ROWS_FILE if rows_path.is_dir() else rows_path
    if not rows_path.is_file() or not rows_path.name.endswith(FORMATS):
        return False
    try:
        first = read_rows(rows_path)[0]
    except (ConfigError, OSError):
        return False
    return form_of(first) is not None


def form_of(row: Mapping[str, Any]) -> str | None:
    """Which published form a row has; None for what is no software-engineering task."""
    if "form" in row:
        return str(row["form"])
    if "fix_patch" in row and "org" in row and "number" in row:
        return "multi-swe"
    if "parsed_commit_content" in row and ("repo_name" in row or "docker_image" in row):
        return "r2e-gym"
    if "problem_statement" not in row:
        return None
    if "fail_to_pass" in row and "FAIL_TO_PASS" not in row:
        return "swe-bench-pro"
    if "FAIL_TO_PASS" not in row and "PASS_TO_PASS" not in row:
        return None
    return "swe-smith" if "image_name" in row and not row.get("base_commit") else "swe-bench"


def _common_fields(row: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """The form of a row, and its fields under the names of SWE-bench."""
    form = form_of(row)
    if form is None:
        raise ConfigError(
            f"{where} is no row of SWE-bench, SWE-Gym, SWE-smith, R2E-Gym or Multi-SWE: it needs "
            f"`problem_statement` and `FAIL_TO_PASS`, and has {', '.join(sorted(map(str, row))[:8])}."
        )
    fields = dict(row)
    fields.setdefault("image", row.get("docker_image") or row.get("image_name") or row.get("dockerhub_tag"))
    if "form" in row or form == "swe-bench":
        return form, fields
    if form == "swe-bench-pro":
        fields["FAIL_TO_PASS"], fields["PASS_TO_PASS"] = row["fail_to_pass"], row.get("pass_to_pass")
    elif form == "swe-smith":
        # The patch of SWE-smith makes the bug, and its reverse is the solution.
        fields["bug_patch"], fields["patch"] = row.get("patch"), ""
    elif form == "r2e-gym":
        fields |= _r2e_fields(row, where)
    else:
        fields |= _multi_swe_fields(row, where)
    return form, fields


def _r2e_fields(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    commit = _json_object(row, "parsed_commit_content", where)
    expected = _json_object(row, "expected_output_json", where)
    execution = (
        _json_object(row, "execution_result_content", where) if "execution_result_content" in row else {}
    )
    names, codes = execution.get("test_file_names") or [], execution.get("test_file_codes") or []
    return {
        "instance_id": row.get("instance_id") or f"{row.get('repo_name')}__{row.get('commit_hash')}",
        "repo": row.get("repo_name"),
        "base_commit": row.get("base_commit") or commit.get("old_commit_hash"),
        "test_files": {f"r2e_tests/{name}": code for name, code in zip(names, codes, strict=False)},
        "FAIL_TO_PASS": [name for name, status in expected.items() if status == "PASSED"],
    }


def _multi_swe_fields(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    base = row.get("base")
    issues = row.get("resolved_issues")
    texts = [
        f"{each.get('title')}\n\n{each.get('body')}" for each in issues or [] if isinstance(each, Mapping)
    ]
    return {
        "instance_id": row.get("instance_id") or f"{row['org']}__{row.get('repo')}-{row['number']}",
        "repo": f"{row['org']}/{row.get('repo')}",
        "base_commit": base.get("sha") if isinstance(base, Mapping) else None,
        "problem_statement": "\n\n".join(texts) or f"{row.get('title')}\n\n{row.get('body')}",
        "patch": row["fix_patch"],
        "FAIL_TO_PASS": _test_names(row.get("f2p_tests"), "f2p_tests", where),
        "PASS_TO_PASS": _test_names(row.get("p2p_tests"), "p2p_tests", where),
    }


def _test_names(value: Any, name: str, where: str) -> list[str]:
    """Multi-SWE maps each test to its results: by name, or as columns with the names under `name`."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value["name"]) if isinstance(value.get("name"), list) else [str(each) for each in value]
    raise ConfigError(f"{where}: `{name}` is {value!r:.80}; it must map tests to their results.")


def _json_object(row: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = row.get(name)
    try:
        result = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{where}: `{name}` is not valid JSON: {error}") from error
    if not isinstance(result, Mapping):
        raise ConfigError(f"{where}: `{name}` is {value!r:.80}; it must be a JSON object.")
    return dict(result)


def _name(row: Mapping[str, Any]) -> str:
    return f"The row {row.get('instance_id') or row.get('task_id') or '(without an `instance_id`)'}"


def _text(fields: Mapping[str, Any], name: str, where: str, *, optional: bool = False) -> str:
    value = fields.get(name)
    if value is None and optional:
        return ""
    if isinstance(value, int | float) and name == "version":
        return str(value)
    if not isinstance(value, str) or not (value.strip() or optional):
        raise ConfigError(f"{where}: `{name}` is {value!r:.80}; it must be a text.")
    return value


def _texts(value: Any, name: str, where: str) -> tuple[str, ...]:
    """A list of texts, or a JSON text that is one, as SWE-bench has it; SWE-bench Pro writes it as Python
    does."""
    result = value
    if isinstance(value, str) and value.strip():
        try:
            result = json.loads(value)
        except ValueError:
            result = _python_list(value)
    if result is None or result == "":
        return ()
    if not isinstance(result, list | tuple) or not all(isinstance(each, str) and each for each in result):
        raise ConfigError(f"{where}: `{name}` is {value!r:.80}; it must be a list of texts.")
    return tuple(result)


def _words(value: Any, where: str) -> tuple[str, ...]:
    """A command as a list of words, in one of the forms of a list of texts, or as a shell reads it."""
    if not isinstance(value, str) or value.lstrip().startswith(("[", "(")):
        return _texts(value, "test_command", where)
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise ConfigError(
            f"{where}: `test_command` is {value!r:.80}, which no shell reads: {error}"
        ) from error


def _python_list(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _files(value: Any, where: str) -> dict[str, str]:
    """Paths inside the repository and their contents."""
    result = _json_object({"test_files": value}, "test_files", where) if value else {}
    if not all(isinstance(each, str) for each in result.values()):
        raise ConfigError(f"{where}: `test_files` must map paths to texts.")
    for path in result:
        pure = PurePosixPath(str(path))
        if pure.is_absolute() or ".." in pure.parts or ".git" in pure.parts or not pure.parts:
            raise ConfigError(f"{where}: `test_files` has {path!r}; it must be a path inside the repository.")
    return {str(path): text for path, text in result.items()}


def _place(source: str, folder: Path | None) -> str:
    if not source or source.startswith(_URLS) or Path(source).is_absolute() or folder is None:
        return source
    return str(folder / source)
