"""Alarms: what spoils a run is told in the step in which it begins, with what to change."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm
from rllm.tracking.alarms import AlarmWatch, alarms_of

CONFIG = {"optimizer": {"learning_rate": 1e-3}}
HEALTHY = {
    "episodes": 8,
    "failed": 0,
    "groups": 2,
    "groups_tied": 0,
    "success": 0.5,
    "reward_mean": 0.5,
    "policy_entropy": 1.0,
    "answers_cut": 0.0,
    "update_kl": 0.01,
}


def _lines(*changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"step": step, **HEALTHY, **change} for step, change in enumerate(changes)]


def _raised(*changes: Mapping[str, Any]) -> list[tuple[int, str]]:
    return [(raised.step, raised.alarm.name) for raised in AlarmWatch(CONFIG, _lines(*changes)).history]


def test_a_healthy_run_raises_nothing() -> None:
    assert _raised(*[{}] * 20) == []


def test_a_step_that_moves_the_policy_too_far_is_told_in_that_step_with_a_lower_rate() -> None:
    watch = AlarmWatch(CONFIG)
    (raised,) = watch.observe(_lines({"update_kl": 1.2})[0])
    assert (raised.step, raised.alarm.name) == (0, "large step")
    assert "1.2 nats" in raised.alarm.sentence
    assert "0.001, to 0.0002" in raised.alarm.mend
    assert _raised({"policy.judge.update_kl": 0.3}) == [(0, "large step")]


def test_success_that_was_there_and_is_gone_is_told_after_three_steps_without_any() -> None:
    gone = {"success": 0.0}
    assert _raised({}, {}, gone, gone) == []
    assert _raised({}, {}, gone, gone, gone) == [(4, "success lost")]
    assert _raised(gone, gone, gone, gone) == [], "it never was there"


def test_a_step_in_which_every_episode_failed_is_told() -> None:
    assert _raised({"failed": 7}, {"failed": 8}) == [(1, "all failed")]


def test_an_entropy_near_zero_is_told_unless_the_tasks_are_solved() -> None:
    flat = {"policy_entropy": 0.01}
    assert _raised({}, flat, flat, flat) == [(3, "entropy")]
    assert _raised({}, *[flat | {"success": 0.95}] * 5) == []
    assert _raised({"policy_entropy": 4.0}, *[{"policy_entropy": 0.1}] * 3) == [(3, "entropy")], (
        "a twentieth of the first"
    )


def test_answers_that_are_mostly_cut_are_told_with_the_key_that_gives_room() -> None:
    watch = AlarmWatch(CONFIG, _lines({"answers_cut": 0.75}))
    assert "rollout.max_tokens_per_turn" in watch.history[0].alarm.mend


def test_an_alarm_is_raised_once_while_it_lasts_and_again_when_it_comes_back() -> None:
    cut = {"answers_cut": 1.0}
    assert _raised(cut, cut, {}, {}, {}, cut, cut, cut) == [(0, "answers cut"), (6, "answers cut")]


def test_a_run_that_goes_on_knows_the_steps_before() -> None:
    gone = {"success": 0.0}
    lines = _lines({}, {}, gone, gone, gone)
    watch = AlarmWatch(CONFIG, lines[:4])
    assert [raised.alarm.name for raised in watch.observe(lines[4])] == ["success lost"]


def test_a_policy_that_says_the_same_everywhere_is_not_told_to_try_easier_tasks() -> None:
    tied = {"groups_tied": 2, "policy_entropy": 0.01, "success": 0.0, "reward_mean": 0.0}
    names = [alarm.name for alarm in alarms_of(_lines({}, *[tied] * 10), CONFIG)]
    assert "entropy" in names
    assert "ties" not in names


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command whose first step moves the policy much too far."""
    monkeypatch.chdir(tmp_path)
    settings = (
        *("steps=3", "warm_start.steps=20", "warm_start.episodes_per_step=16", "threads=1"),
        *("optimizer.name=adamw", "optimizer.learning_rate=0.3", "optimizer.warmup_steps=0"),
        *("rollout.tasks_per_step=8", "rollout.group_size=8", "rollout.max_turns=2"),
        *("evaluation.num_tasks=2", "evaluation.every_steps=0", "task.num_train_tasks=90"),
    )
    return ["train", "frozenlake", "--output", "run", *(w for each in settings for w in ("--set", each))]


def test_a_run_tells_an_alarm_on_the_screen_at_its_end_and_when_it_is_shown(words: list[str]) -> None:
    done = CliRunner().invoke(rllm, words, prog_name="rllm", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.output.count("Lower `optimizer.learning_rate`, which is 0.3") >= 2
    shown = CliRunner().invoke(rllm, ["runs", "show", "run", "--json"], prog_name="rllm")
    assert "large step" in [alarm["name"] for alarm in json.loads(shown.stdout)["alarms"]]


def test_an_alarm_ends_the_run_where_that_is_asked_for_and_nothing_is_lost(words: list[str]) -> None:
    stopped = CliRunner().invoke(rllm, [*words, "--stop-on-alarm"], prog_name="rllm")
    assert stopped.exit_code == 1
    assert "`optimizer.learning_rate`" in stopped.output
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    num_done = sum(line["phase"] == "train" for line in steps)
    assert 0 < num_done < 3
    assert any(Path("run/checkpoints").glob("step-*"))
    finished = CliRunner().invoke(rllm, words, prog_name="rllm", catch_exceptions=False)
    assert finished.exit_code == 0, "without the option it goes to its end"
