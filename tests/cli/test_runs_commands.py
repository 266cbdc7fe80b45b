import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.cli.before_after import episode_pair
from rllm.cli.terminal import success_table
from rllm.store.run_directory import RunDirectory
from rllm.tracking.screen import Screen
from rllm.view.comparison_page import differing_keys

Rllm = Callable[..., Result]


def test_runs_are_listed_with_their_state_newest_first(
    finished_run: Any, stopped_run: Path, rllm: Rllm, tmp_path: Path
) -> None:
    shutil.copytree(finished_run.path, tmp_path / "finished")
    shutil.copytree(stopped_run, tmp_path / "running")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    for age_s, name in enumerate(["running", "finished", "stopped"]):
        config = tmp_path / name / "config.json"
        config.touch()
        os.utime(config, (1e9 - age_s, 1e9 - age_s))
    with RunDirectory.create_or_open(tmp_path / "running"):
        result = rllm("runs", "list", tmp_path, "--json")
        shown = rllm("runs", "list", tmp_path)
    assert result.exit_code == shown.exit_code == 0
    listed = json.loads(result.stdout)
    assert [(each["name"], each["state"]) for each in listed["runs"]] == [
        ("running", "running"),
        ("finished", "finished"),
        ("stopped", "stopped"),
    ]
    assert [each["pid"] is not None for each in listed["runs"]] == [True, False, False]
    assert [(each["steps"], each["total_steps"]) for each in listed["runs"]] == [(1, 1)] * 3
    assert "damaged" in listed["unreadable"][0]["run"]
    assert "is not valid JSON" in shown.stderr
    for word in ("running (process", "finished", "stopped", "1/1", "frozenlake"):
        assert word in shown.stdout


def test_where_there_are_no_runs_it_says_how_to_make_one(rllm: Rllm) -> None:
    result = rllm("runs", "list")
    assert result.exit_code == 0
    assert "rllm train frozenlake" in result.stdout
    assert rllm("runs", "list", "absent").exit_code == 2


def test_a_run_is_shown_with_its_settings_result_and_ids(finished_run: Any, rllm: Rllm) -> None:
    result = rllm("runs", "show", finished_run.path)
    assert result.exit_code == 0
    for word in ("finished", "builtin:tiny", "2 tasks × 2 attempts", "warm start", "trained", "after.greedy"):
        assert word in result.stdout
    shown = json.loads(rllm("runs", "show", finished_run.path, "--json").stdout)
    assert shown["summary"] == json.loads((finished_run.path / "summary.json").read_text())
    assert [each["phase"] for each in shown["phases"]] == [
        "untrained",
        "untrained.greedy",
        "before",
        "before.greedy",
        "train",
        "after",
        "after.greedy",
    ]
    assert all(sum(each["outcomes"].values()) == each["episodes"] == 4 for each in shown["phases"])
    assert len(shown["success"]) == 1


def test_the_episodes_of_a_phase_are_listed(finished_run: Any, rllm: Rllm) -> None:
    words = ("runs", "show", finished_run.path, "--phase", "train", "--step", "0")
    listed = json.loads(rllm(*words, "--json").stdout)["episodes"]
    assert [each["attempt"] for each in listed] == [0, 1, 0, 1]
    shown = rllm(*words).stdout
    assert all(str(each["id"]) in shown and each["task_id"] in shown for each in listed)


def test_an_episode_is_shown_turn_by_turn_with_its_tokens(finished_run: Any, rllm: Rllm) -> None:
    overview = json.loads(rllm("runs", "show", finished_run.path, "--json").stdout)
    row_id = next(each["first_id"] for each in overview["phases"] if each["phase"] == "train")
    shown = rllm("runs", "show", finished_run.path, "--episode", str(row_id))
    assert shown.exit_code == 0
    assert f"Episode {row_id}" in shown.stdout
    for word in ("phase train, step 0", "Turn 1", "tokens", "action", "reward", "Ended:", "Log-probability"):
        assert word in shown.stdout
    data = json.loads(rllm("runs", "show", finished_run.path, "--episode", str(row_id), "--json").stdout)
    assert (data["phase"], data["step"]) == ("train", 0)
    for step in data["episode"]["trajectories"][0]["steps"]:
        assert len(step["tokens"]) == len(step["response_ids"]) == len(step["logprobs"])
        assert step["observation"].splitlines()[0] in shown.stdout


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[]"),
        ("config.json", "{}"),
        ("config.json", '{"task": null}'),
        ("config.json", '{"kind": "eval"}'),
        ("config.json", '{"seed": 0, "steps": "three"}'),
        ("summary.json", "[1]"),
        ("summary.json", '{"after": {}}'),
        ("summary.json", '{"wall_s": NaN}'),
        ("metrics.jsonl", '{"phase": 7, "step": "x"}\n'),
    ],
)
def test_files_that_no_run_wrote_are_named_and_hide_no_other_run(
    finished_run: Any, rllm: Rllm, tmp_path: Path, name: str, text: str
) -> None:
    for each in ("whole", "broken"):
        shutil.copytree(finished_run.path, tmp_path / "all" / each)
    (tmp_path / "all" / "broken" / name).write_text(text)
    result = rllm("runs", "show", tmp_path / "all" / "broken")
    assert result.exit_code == 2
    assert name in result.stderr
    listed = json.loads(rllm("runs", "list", tmp_path / "all", "--json").stdout)
    assert "whole" in [each["name"] for each in listed["runs"]]
    assert len(listed["runs"]) + len(listed["unreadable"]) == 2
    assert rllm("runs", "compare", tmp_path / "all" / "broken", finished_run.path).exit_code in (0, 2)


def test_without_a_tokenizer_tokens_are_shown_by_number(
    finished_run: Any, rllm: Rllm, tmp_path: Path
) -> None:
    shutil.copytree(finished_run.path, tmp_path / "bare")
    for name in ("model", "initial_model"):
        shutil.rmtree(tmp_path / "bare" / name)
    result = rllm("runs", "show", "bare", "--episode", "1")
    assert result.exit_code == 0
    assert "tokens  #" in result.stdout
    assert "has no tokenizer" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--episode", "4711"), "holds no episode 4711"),
        (("--episode", "9" * 30), "holds no episode 999"),
        (("--phase", "train", "--step", "9" * 30), "no episodes of step 999"),
        (("--phase", "trian"), "has no phase `trian`; did you mean 'train'?"),
        (("--step", "99"), "no episodes of step 99"),
        (("--episode", "1", "--phase", "train"), "leave --phase and --step out"),
    ],
    ids=["episode", "long episode", "long step", "phase", "step", "both"],
)
def test_what_a_run_does_not_hold_is_refused(
    words: tuple[str, ...], message: str, finished_run: Any, rllm: Rllm
) -> None:
    result = rllm("runs", "show", finished_run.path, *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_runs_are_compared_in_numbers_settings_and_a_picture(
    finished_run: Any, rllm: Rllm, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished_run.path, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"seed": 5}))
    result = rllm("runs", "compare", finished_run.path, other, "--picture", "both.png", "--json")
    assert result.exit_code == 0
    compared = json.loads(result.stdout)
    assert [each["seed"] for each in compared["runs"]] == [0, 5]
    assert compared["differences"] == {"seed": {str(finished_run.path): 0, str(other): 5}}
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    shown = rllm("runs", "compare", finished_run.path, other).stdout
    for word in ("untrained", "before", "after", "seed  0 | 5", "--picture"):
        assert word in shown


def test_one_run_has_nothing_to_be_compared_with(finished_run: Any, rllm: Rllm) -> None:
    result = rllm("runs", "compare", finished_run.path, finished_run.path)
    assert result.exit_code == 2
    assert "two runs" in result.stderr


def test_a_picture_needs_a_directory(finished_run: Any, stopped_run: Path, rllm: Rllm) -> None:
    result = rllm("runs", "compare", finished_run.path, stopped_run, "--picture", "absent/both.png")
    assert result.exit_code == 2
    assert "directory absent" in result.stderr


def test_only_the_keys_that_differ_are_named() -> None:
    configs = {
        "a": {"seed": 0, "model": {"path": "x", "device": "cpu"}},
        "b": {"seed": 0, "model": {"path": "y"}},
    }
    assert differing_keys(configs) == {
        "model.path": {"a": "x", "b": "y"},
        "model.device": {"a": "cpu", "b": None},
    }


def test_reports_with_scores_fit_a_shell_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    whole = {
        "success": 1.0,
        "success_interval": [0.985, 1.0],
        "greedy": 1.0,
        "greedy_interval": [0.985, 1.0],
        "score": -10.1,
        "score_interval": [-13.5, -17.1],
    }
    Screen().print(success_table({"untrained": whole, "warm start": whole, "trained": whole}))
    printed = capsys.readouterr().out
    assert printed.count("100.0% [98.5, 100.0]") == 6
    assert printed.count("-10.1 [-13.5, -17.1]") == 3


def test_one_task_before_and_after_training_stands_side_by_side(rllm: Rllm, finished_run: Any) -> None:
    shown = rllm("runs", "show", finished_run.path, "--before-after").stdout
    before, after = episode_pair(RunDirectory.read(finished_run.path))
    assert before.task_id == after.task_id
    assert str(before.task_id) in shown
    for episode in (before, after):
        (trajectory,) = episode.trajectories
        assert trajectory.steps[0].model_response.strip() in shown
    refused = rllm("runs", "show", finished_run.path, "--before-after", "--json")
    assert refused.exit_code == 2
    assert "--before-after" in refused.stderr


def test_a_run_that_has_not_ended_has_no_task_to_show_before_and_after(
    rllm: Rllm, finished_run: Any, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run.path, tmp_path / "half")
    with sqlite3.connect(run / "store.sqlite") as store:
        store.execute("UPDATE phases SET name = 'later' WHERE name = 'after'")
    refused = rllm("runs", "show", run, "--before-after")
    assert refused.exit_code == 2
    assert "before and after" in refused.stderr
