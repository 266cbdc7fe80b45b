"""`rllm init` writes a project whose test passes and whose training begins at once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from rllm.cli.init import FILES, TRAIN

Rllm = Callable[..., Result]
SOURCES = Path(__file__).resolve().parents[2] / "src"
TINY = ("steps=1", "rollout.tasks_per_step=2", "rollout.group_size=2", "evaluation.num_tasks=2", "threads=1")


def test_the_tests_of_a_new_project_pass(rllm: Rllm, tmp_path: Path) -> None:
    made = rllm("init", "mine")
    assert made.exit_code == 0, made.stderr
    assert " ".join(TRAIN) in made.stdout
    assert sorted(
        str(path.relative_to("mine")) for path in Path("mine").rglob("*") if path.is_file()
    ) == sorted(FILES)
    assert (tmp_path / "mine" / "README.md").read_text().startswith("# mine\n")
    passed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "."],
        cwd=tmp_path / "mine",
        env={**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert passed.returncode == 0, passed.stdout + passed.stderr


def test_a_new_project_trains_with_the_command_that_it_names(
    rllm: Rllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = json.loads(rllm("init", ".", "--json").stdout)
    assert made["train"] == list(TRAIN)
    tiny = [word for assignment in TINY for word in ("--set", assignment)]
    trained = rllm(*made["train"][1:], *tiny, "--json")
    assert trained.exit_code == 0, trained.stderr
    assert json.loads(trained.stdout)["run"] == "runs/agent-solve-seed0"
    words = ("--dataset", "data/test.jsonl", "--model", "runs/agent-solve-seed0", "--threads", "1", "--json")
    measured = rllm("eval", "agent.py:solve", "--evaluator", "evaluator.py:score", *words)
    assert measured.exit_code == 0, measured.stderr
    assert json.loads(measured.stdout)["sampled"]["scored"] == 6


@pytest.mark.slow
def test_a_new_project_learns(rllm: Rllm) -> None:
    """Rows that it was not trained on, from random weights."""
    rllm("init", ".")
    result = json.loads(rllm(*TRAIN[1:], "--set", "threads=1", "--json").stdout)
    assert result["before"]["success"] < 0.1
    assert result["after"]["success"] > 0.8


def test_the_settings_of_a_new_project_are_honoured_as_they_are(rllm: Rllm) -> None:
    rllm("init", "mine")
    plan = rllm(
        "train",
        "mine/agent.py:solve",
        "--evaluator",
        "mine/evaluator.py:score",
        "--config",
        "mine/config.toml",
        "--dataset",
        "mine/data/train.jsonl",
        "--dry-run",
        "--json",
    )
    assert plan.exit_code == 0, plan.stderr


def test_what_is_there_is_never_written_over(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "agent.py").write_text("my thesis")
    refused = rllm("init", "mine")
    assert refused.exit_code == 2
    assert "agent.py is there" in refused.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["agent.py"]
    (tmp_path / "file").touch()
    assert rllm("init", "file").exit_code == 2
