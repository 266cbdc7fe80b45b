"""`rllm dpo`: words in, a run directory out; the habits of the other commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

SETTINGS = ["--set", "threads=1", "--set", "batch_size=4", "--set", "optimizer.learning_rate=1e-3"]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [
        {"prompt": f"{letter} or {other}", "chosen": letter, "rejected": f"{other} {other}"}
        for letter in "AB"
        for other in "CDEF"
    ]
    return written(tmp_path / "pairs.jsonl", rows)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_pairs_becomes_a_run_that_is_shown_again_when_asked_again(
    rllm: Callable[..., Result], pairs: Path
) -> None:
    first = rllm("dpo", pairs, *SETTINGS)
    assert first.exit_code == 0, first.output
    assert "on 1 held-out" in first.stdout
    assert "next:" in first.stdout.lower()
    assert first.stdout.count(" –") == 2, "a file's answers say nothing of a divergence from the reference"
    again = rllm("dpo", pairs, *SETTINGS, "--json")
    summary = json.loads(again.stdout)
    assert summary["run"] == "runs/dpo-pairs-seed0"
    assert summary["kind"] == "dpo"
    assert summary["after"]["margin"] > summary["before"]["margin"] == pytest.approx(0.0, abs=1e-6)
    assert "is finished" in again.stderr


def test_a_dry_run_prints_the_plan_and_writes_nothing(rllm: Callable[..., Result], pairs: Path) -> None:
    done = rllm("dpo", pairs, "--loss", "simpo", "--dry-run", "--json")
    plan = json.loads(done.stdout)
    assert plan["config"]["preference"]["loss"] == "simpo"
    assert plan["derived"]["beta"] == 2.0
    assert plan["derived"]["examples"] == 7
    assert [path.name for path in Path().iterdir()] == ["pairs.jsonl"]


def test_what_is_held_out_may_be_a_file_of_its_own(rllm: Callable[..., Result], pairs: Path) -> None:
    done = rllm("dpo", pairs, "--val-dataset", pairs, "--dry-run", "--json")
    derived = json.loads(done.stdout)["derived"]
    assert (derived["examples"], derived["heldout_examples"]) == (8, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "There is nothing to train on"),
        (["missing.jsonl"], "There is no dataset missing.jsonl"),
        (["--run", "missing"], "missing is not a run"),
        (["pairs.jsonl", "--loss", "kto"], "pairs.jsonl:1: it has no `completion`"),
        (["pairs.jsonl", "--set", "preference.label_smoothing=0.7"], "below 0.5"),
        (["pairs.jsonl", "--loss", "sppo"], "did you mean 'simpo'?"),
    ],
    ids=str,
)
def test_bad_words_and_rows_end_with_2_and_leave_nothing(
    rllm: Callable[..., Result], pairs: Path, words: list[str], message: str
) -> None:
    done = rllm("dpo", *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not list(Path("runs").glob("*"))


def test_attempts_of_a_finished_run_are_compared(
    rllm: Callable[..., Result], finished_run: Any, tmp_path: Path
) -> None:
    """A run of one step may hold no success: then the command says what it found."""
    done = rllm("dpo", "--run", finished_run.path, *SETTINGS, "--output", tmp_path / "dpo", "--json")
    if done.exit_code == 2:
        assert "can be compared" in json.loads(done.stderr.splitlines()[-1])["error"]["message"]
    else:
        assert json.loads(done.stdout)["run_counts"]["tasks_with_both"] > 0
