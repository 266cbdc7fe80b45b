import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.store.episodes import EpisodeStore
from rllm.types.episode import Outcome

Rllm = Callable[..., Result]
QUICK = ("--set", "threads=1", "--set", "batch_size=4", "--set", "optimizer.learning_rate=3e-3")
LONGEST_S = 120.0


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"{a} {b}", "completion": a} for a in "ABCD" for b in "EFGHK"]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_file_is_trained_on_and_the_result_shown(rllm: Rllm, chats: Path, tmp_path: Path) -> None:
    result = rllm("sft", "chats.jsonl", *QUICK, "--set", "epochs=4")
    assert result.exit_code == 0, result.output
    for word in (
        "Before and after, on 2 held-out examples",
        "loss",
        "token accuracy",
        "18 updates",
        "curve.png",
    ):
        assert word in result.stdout
    run = tmp_path / "runs" / "sft-chats-seed0"
    assert f"rllm serve model runs/{run.name}/model" in result.stdout
    assert "train" in result.stderr, "the live view goes to stderr"
    assert json.loads((run / "config.json").read_text())["kind"] == "sft"
    again = rllm("sft", "chats.jsonl", *QUICK, "--set", "epochs=4", "--json")
    assert "--fresh" in again.stderr
    summary = json.loads(again.stdout)
    assert Path(summary.pop("run")) == Path("runs/sft-chats-seed0")
    assert summary == json.loads((run / "summary.json").read_text())
    fresh = rllm("sft", "chats.jsonl", *QUICK, "--set", "max_steps=1", "--fresh", "--json")
    assert json.loads(fresh.stdout)["run"] == "runs/sft-chats-seed0-2"


def test_a_dry_run_prints_the_plan_and_writes_nothing(rllm: Rllm, chats: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("epochs = 3\nbatch_size = 5\n")
    words = ("sft", "chats.jsonl", "--config", "mine.toml", "--seed", "4", "--dry-run")
    shown = rllm(*words)
    assert shown.exit_code == 0, shown.output
    assert "Nothing was written." in shown.stdout
    planned = json.loads(rllm(*words, "--json").stdout)
    assert planned["data"] == "chats"
    assert planned["run"] == "runs/sft-chats-seed4"
    assert planned["config"]["epochs"] == 3
    derived = planned["derived"]
    assert (derived["examples"], derived["heldout_examples"]) == (18, 2)
    assert derived["optimizer_updates"] == 11  # 54 examples, five at a time
    assert derived["labelled_tokens_per_update"] == 10  # each answer is a letter and its end
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "mine.toml"]


def test_a_stored_run_is_learned_from_beginning_with_its_model(
    rllm: Rllm, finished_run: Any, tmp_path: Path
) -> None:
    run = tmp_path / "lake"
    shutil.copytree(finished_run.path, run)
    with EpisodeStore.open(run / "store.sqlite") as store:  # a model this young reaches no goal
        played = list(store.episodes("train", 0))
        store.save_episodes("train", 0, [replace(each, outcome=Outcome.SCORED) for each in played])
    words = ("sft", "--run", run, "--set", "data.min_reward=0", *QUICK)
    shown = rllm(*words, "--dry-run", "--json")
    assert shown.exit_code == 0, shown.output
    planned = json.loads(shown.stdout)
    assert planned["config"]["model"]["path"] == str(run / "model")
    assert planned["derived"]["examples"] + planned["derived"]["heldout_examples"] == 4
    result = rllm(*words, "--output", "learned", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["examples"] == planned["derived"]["examples"]


def test_a_run_may_be_what_training_starts_from(
    rllm: Rllm, finished_run: Any, chats: Path, tmp_path: Path
) -> None:
    plan = rllm("sft", "chats.jsonl", "--model", finished_run.path, *QUICK, "--dry-run", "--json")
    assert plan.exit_code == 0, plan.output
    assert json.loads(plan.stdout)["config"]["model"]["path"] == str(finished_run.path / "model")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            ("chats.jsonl:21: it has no label", "leave the"),
        ),
        ('{"messages"', ("chats.jsonl:21 is not valid JSON",)),
    ],
)
def test_a_row_that_cannot_be_learned_is_refused_by_its_line(
    rllm: Rllm, chats: Path, tmp_path: Path, line: str, words: tuple[str, ...]
) -> None:
    chats.write_text(f"{chats.read_text()}\n{line}\n")
    result = rllm("sft", "chats.jsonl", *QUICK)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert [word for word in words if word not in result.stderr] == []
    assert [path.name for path in tmp_path.iterdir() if path.name == "runs" and any(path.iterdir())] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "There is nothing to train on"),
        (("nowhere.jsonl",), "There is no dataset nowhere.jsonl"),
        (("chats.jsonl", "--run", "runs/x"), "train on one of them"),
        (("--run", "runs/x"), "runs/x is not a run"),
        (("chats.jsonl", "--set", "epoch=2"), "did you mean `epochs`?"),
        (("chats.jsonl", "--model", "nowhere"), "There is no model `nowhere`"),
    ],
)
def test_bad_usage_ends_with_2_and_says_why(
    rllm: Rllm, chats: Path, words: tuple[str, ...], message: str
) -> None:
    result = rllm("sft", *words, "--json")
    assert result.exit_code == 2
    assert message in json.loads(result.stderr.splitlines()[-1])["error"]["message"]


def test_what_is_held_out_may_be_a_file(rllm: Rllm, chats: Path, tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text('{"prompt": "A K", "completion": "A"}\n')
    planned = json.loads(
        rllm("sft", "chats.jsonl", "--val-dataset", "val.jsonl", "--dry-run", "--json").stdout
    )
    assert (planned["derived"]["examples"], planned["derived"]["heldout_examples"]) == (20, 1)


def test_ctrl_c_saves_the_run_and_says_how_to_go_on(
    start_rllm: Callable[..., subprocess.Popen[str]], chats: Path, tmp_path: Path, rllm: Rllm
) -> None:
    words = ["sft", "chats.jsonl", *QUICK, "--set", "epochs=5000", "--seed", "2", "--output", "run"]
    process = start_rllm(*words, cwd=tmp_path)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + LONGEST_S
    while not (metrics.is_file() and '"train"' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 130, stderr
    again = f"rllm sft chats.jsonl {' '.join(QUICK)} --set epochs=5000 --seed 2 --output run"
    assert again in " ".join(stderr.split())
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert state["steps"] == sum(line["phase"] == "train" for line in lines)
    refused = rllm(*words[:-4], "--seed", "2", "--output", "run", "--set", "epochs=6000")
    assert refused.exit_code == 2
    assert "epochs: 5000 there, 6000 here" in refused.stderr
