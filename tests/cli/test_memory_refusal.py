"""Every command that trains refuses a run that needs more memory than is free; `--force` starts it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rllm.cli.main import rllm as front_door
from rllm.models.builtin import create_model
from rllm.trainer import memory_plan

ROWS = [{"prompt": f"Up {number}", "completion": "Down"} for number in range(4)]
PAIRS = [{"prompt": f"Up {number}", "chosen": "Down", "rejected": "Left"} for number in range(4)]
SMALL = ["--set", "optimizer.micro_batch_tokens=64"]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("rows", ROWS), ("pairs", PAIRS), ("prompts", ROWS)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "train": ["train", "frozenlake"],
        "sft": ["sft", "rows.jsonl"],
        "dpo": ["dpo", "pairs.jsonl"],
        "distill": ["distill", "frozenlake", "--teacher", "http://127.0.0.1:9/v1"],
    }


def run(words: list[str]) -> Result:
    return CliRunner().invoke(front_door, words, prog_name="rllm")


@pytest.mark.parametrize("name", ["train", "sft", "dpo", "distill"])
def test_a_plan_that_does_not_fit_is_shown_and_refused(
    commands: dict[str, list[str]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*commands[name], "--dry-run", "--json", *SMALL]
    shown = run(words)
    assert shown.exit_code == 0, shown.output
    memory = json.loads(shown.stdout)["memory"]
    assert 0 < memory["weights"] < memory["peak"] < memory["free"]
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: memory["peak"] - 1)
    refused = run(words)
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["memory"]["peak"] == memory["peak"], "the plan is shown all the same"
    for part in ("needs", "free;", "`optimizer.micro_batch_tokens`", "--force"):
        assert part in refused.stderr
    assert run([*words, "--force"]).exit_code == 0
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["train", "sft", "dpo"])
def test_a_run_that_does_not_fit_is_refused_before_any_work(
    commands: dict[str, list[str]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1000)
    refused = run([*commands[name], "--output", "run", *SMALL])
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert not Path("run/config.json").exists()


def test_a_run_that_is_forced_is_made(
    commands: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1000)
    done = run([*commands["sft"], "--output", "run", "--force", "--set", "max_steps=1"])
    assert done.exit_code == 0, done.output
    assert Path("run/summary.json").is_file()


def test_a_teacher_counts_with_its_student(commands: dict[str, list[str]]) -> None:
    create_model(Path("teacher"), "tiny")
    alone, beside = (
        json.loads(run(["distill", "prompts.jsonl", "--teacher", teacher, "--dry-run", "--json"]).stdout)
        for teacher in ("http://127.0.0.1:9/v1", "teacher")
    )
    assert alone["memory"]["reference"] == 0
    assert beside["memory"]["reference"] == beside["memory"]["weights"]
