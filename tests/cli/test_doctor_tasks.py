"""`rllm doctor tasks` through the front door, on rows that no world can be made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result

Rllm = Callable[..., Result]
ROW: dict[str, Any] = {
    "instance_id": "a__b-1",
    "source": "nowhere",
    "base_commit": "0" * 40,
    "problem_statement": "It is broken.",
    "FAIL_TO_PASS": ["test_a.py::test_a"],
}


def test_a_task_that_cannot_be_made_is_broken_and_the_others_are_looked_at(
    rllm: Rllm, tmp_path: Path
) -> None:
    rows = [ROW, {**ROW, "instance_id": "a__b-\x1b[31m2", "test_command": ["tox"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = rllm("doctor", "tasks", tmp_path, "--json")
    assert ended.exit_code == 1
    report = json.loads(ended.stdout)
    assert set(report["not_made"]) == {row["instance_id"] for row in rows} == set(report["broken"])
    assert "is not there" in report["not_made"]["a__b-1"]
    assert not report["sound"]
    shown = rllm("doctor", "tasks", tmp_path / "rows.jsonl")
    assert "2 of 2 tasks" in shown.output
    assert "\x1b[31m" not in shown.output
    assert (
        len(json.loads(rllm("doctor", "tasks", tmp_path, "--max-tasks", 1, "--json").stdout)["broken"]) == 1
    )


def test_what_is_no_file_of_tasks_is_bad_usage(rllm: Rllm, tmp_path: Path) -> None:
    ended = rllm("doctor", "tasks", tmp_path / "empty")
    assert ended.exit_code == 2
    assert "rows.jsonl" in ended.stderr
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({**ROW, "source": "x.bundle", "base_commit": None}) + "\n"
    )
    ended = rllm("doctor", "tasks", tmp_path)
    assert ended.exit_code == 2
    assert "a__b-1 has no `base_commit`" in " ".join(ended.stderr.split())
