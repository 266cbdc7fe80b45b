"""`rllm train … --seeds N`: runs in processes of their own, and one report over them."""

import json
import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.cli import seeds
from rllm.cli.seeds import SeedRun, seeds_report
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics

Rllm = Callable[..., Result]
WAIT_S = 120.0


def wait_for(is_true: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s, "nothing came of it"
        time.sleep(0.05)


def seed_run(path: Path, seed: int, summary: dict[str, Any] | None, warm_steps: int = 0) -> SeedRun:
    with RunDirectory.create_or_open(path / f"seed{seed}") as run:
        run.write_config({"seed": seed, "warm_start": {"steps": warm_steps}})
        if summary is not None:
            run.write_summary({"wall_s": 10.0 + seed, **summary})
    return SeedRun(seed=seed, path=run.path, options=None)  # pyright: ignore[reportArgumentType]


def measured(success: float, greedy: float) -> dict[str, float]:
    return {"success": success, "greedy": greedy, "return": success}


def test_means_have_student_s_interval_over_the_seeds_within_what_a_share_can_be(tmp_path: Path) -> None:
    values = [0.5, 0.6, 0.7]
    runs = [
        seed_run(tmp_path, seed, {"before": measured(0.1, 0.2), "after": measured(value, 0.9 + seed / 20)})
        for seed, value in enumerate(values)
    ]
    report = seeds_report(runs, {})
    after = report["mean"]["after"]
    margin = 4.302652729911275 * 0.1 / math.sqrt(3)  # t of 2 degrees of freedom, standard deviation 0.1
    assert after["success"]["mean"] == pytest.approx(0.6)
    assert after["success"]["interval"] == pytest.approx([0.6 - margin, 0.6 + margin])
    assert after["greedy"]["interval"][1] == 1.0
    assert report["mean"]["before"]["success"] == {"mean": pytest.approx(0.1), "interval": None}
    assert report["mean"]["gain"]["success"]["interval"] == pytest.approx([0.5 - margin, 0.5 + margin])
    assert report["mean"]["wall_s"]["mean"] == pytest.approx(11.0)
    assert [row["gain"]["success"] for row in report["seeds"]] == pytest.approx([0.4, 0.5, 0.6])
    assert "over 3 seeds (Student's t)" in report["interval"]


def test_seeds_that_failed_or_were_not_measured_before_are_in_no_mean(tmp_path: Path) -> None:
    after = {"after": measured(0.5, 0.5)}
    runs = [seed_run(tmp_path, 0, after), seed_run(tmp_path, 1, None), seed_run(tmp_path, 2, after)]
    report = seeds_report(runs, {1: "the disk is full"})
    assert report["seeds"][1]["failed"] == "the disk is full"
    assert report["finished"] == 2
    assert report["mean"]["gain"]["success"] == {"mean": None, "interval": None}
    assert "the 2 finished of 3 seeds" in report["interval"]
    alone = seeds_report(runs[:2], {1: "the disk is full"})
    assert alone["mean"]["after"]["success"] == {"mean": 0.5, "interval": None}
    assert "1 of 2 seeds finished" in alone["interval"]
    assert seeds_report(runs[1:2], {})["mean"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "1"], "--seeds is 1; an interval needs 2 or more"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--seeds", "-3"], "--seeds is -3"),
        (["--seeds", "3", "--seed", str(2**63 - 2)], "below 2**63"),
        (["--seeds", "2", "--set", "seed=4"], "--set seed=4 would give all 2 runs one seed"),
        (["--seeds", "2", "--resume"], "leave it out"),
        (["--seeds", "2", "--preview"], "leave --seeds 2 out"),
        (["--seeds", "2", "--output", "taken"], "taken is a run"),
        (["--seeds", "2", "--set", "distributed.restarts=1"], "`distributed.restarts` is 1"),
        (["--seeds", "two"], "not a valid integer"),
    ],
)
def test_what_several_seeds_cannot_honour_is_refused_before_any_process(
    rllm: Rllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr(seeds, "launch", None)
    with RunDirectory.create_or_open(tmp_path / "taken") as run:
        run.write_config({"seed": 0})
    result = rllm("train", "frozenlake", *words)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "runs").exists()


def test_a_rank_of_a_run_starts_no_seeds(rllm: Rllm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = rllm("train", "frozenlake", "--seeds", "2")
    assert result.exit_code == 2
    assert "WORLD_SIZE is 2" in result.stderr


def test_a_dry_run_shows_the_plan_once_and_the_time_and_disk_of_all_seeds(rllm: Rllm, tmp_path: Path) -> None:
    words = ("train", "frozenlake", "--seeds", "4", "--seed", "7", "--dry-run")
    shown = rllm(*words).stdout
    assert shown.count("rllm train frozenlake into") == 1
    assert "all 4 seeds" in shown
    plan = json.loads(rllm(*words, "--json").stdout)
    assert plan["run"] == "runs/frozenlake-seeds/seed7"
    assert plan["seeds"] == 4
    assert plan["estimate_of_seeds"]["run_s"] == pytest.approx(4 * plan["estimate"]["run_s"])
    assert plan["estimate_of_seeds"]["disk_bytes"] == 4 * plan["estimate"]["disk_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_seeds_are_runs_of_one_report_and_one_that_fails_does_not_lose_the_others(
    rllm: Rllm, tiny_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "frozenlake", *tiny_settings, "--seeds", "3", "--seed", "5", "--output", "lakes"]
    foreign = tmp_path / "lakes" / "seed6" / "notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    first = rllm(*words, "--json")
    assert first.exit_code == 1, first.stderr
    report = json.loads(first.stdout)
    assert [row["seed"] for row in report["seeds"]] == [5, 6, 7]
    assert "notes.txt" in report["seeds"][1]["failed"]
    assert "Seed 6 failed" in first.stderr
    assert report["finished"] == 2
    assert report == json.loads((tmp_path / "lakes" / "report.json").read_text())
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG")
    for row in (report["seeds"][0], report["seeds"][2]):
        run = RunDirectory.read(Path(row["run"]))
        summary = run.summary() or {}
        assert run.config()["seed"] == row["seed"]
        assert row["after"]["success"] == summary["after"]["success"]

    foreign.unlink()
    kept = (tmp_path / "lakes" / "seed5" / "summary.json").stat().st_mtime_ns
    second = rllm(*words)
    assert second.exit_code == 0, second.stderr
    assert second.stderr.count("is finished") == 2
    assert (tmp_path / "lakes" / "seed5" / "summary.json").stat().st_mtime_ns == kept
    for line in ("seed", "mean", "95 %", "gain", "over 3 seeds (Student's t)", "report.json", "seeds.png"):
        assert line in second.stdout
    assert "Success on 4 held-out tasks" not in second.stdout, "the result of each run goes to stderr"

    monkeypatch.setattr(seeds, "launch", None)
    other = rllm(*words, "--set", "optimizer.learning_rate=0.5")
    assert other.exit_code == 2
    assert "optimizer.learning_rate" in other.stderr
    fresh = rllm(*words, "--fresh", "--dry-run", "--json")
    assert json.loads(fresh.stdout)["run"] == "lakes-2/seed5"


@pytest.mark.slow
def test_an_alarm_that_stops_its_run_is_a_seed_that_failed(
    rllm: Rllm, tiny_settings: list[str], tmp_path: Path
) -> None:
    result = rllm("train", "frozenlake", *tiny_settings, "--seeds", "2", "--stop-on-alarm")
    assert result.exit_code == 1, result.stderr
    assert "Seed 0 failed: Step 1:" in " ".join(result.stdout.split())
    assert "Seed 1 failed: Step 1:" in " ".join(result.stdout.split())
    assert "0 of 2 seeds finished" in result.stdout
    assert "rllm train frozenlake --output runs/frozenlake-seeds" in result.stdout
    assert "--seeds 2" in result.stdout


def test_what_the_first_seed_is_refused_for_ends_the_command(rllm: Rllm, tmp_path: Path) -> None:
    result = rllm("train", "frozenlake", "--seeds", "2", "--set", "model.device=cuda:77", "--json")
    assert result.exit_code == 2
    error = json.loads(result.stderr.splitlines()[-1])["error"]
    assert "cuda:77" in error["message"]
    assert not (tmp_path / "runs" / "frozenlake-seeds" / "report.json").exists()


@pytest.mark.parametrize("by", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_seeds_that_are_stopped_or_killed_go_on_by_the_same_command(
    start_rllm: Callable[..., subprocess.Popen[str]],
    tiny_settings: list[str],
    rllm: Rllm,
    tmp_path: Path,
    by: signal.Signals,
) -> None:
    settings = [*tiny_settings, "--set", "steps=6", "--set", "warm_start.steps=0"]
    words = ["train", "frozenlake", *settings, "--seeds", "2", "--output", "lakes"]
    process = start_rllm(*words, cwd=tmp_path)
    run, metrics = tmp_path / "lakes" / "seed0", tmp_path / "lakes" / "seed0" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and any(line["phase"] == "train" for line in read_metrics(metrics)))
    process.send_signal(by)
    stdout, stderr = process.communicate(timeout=WAIT_S)
    wait_for(lambda: RunDirectory.read(run).writer_pid is None)
    assert RunDirectory.read(run).summary() is None, "it was to be stopped before its end"
    assert stdout == ""
    if by is signal.SIGTERM:
        assert process.returncode == 130
        assert stderr.count("Interrupted.") == 1
        assert "rllm train frozenlake --output lakes --set" in stderr
        assert stderr.rstrip().endswith("--seeds 2")
    num_lines = len(read_metrics(metrics))
    result = rllm(*words, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["finished"] == 2
    assert num_lines > 0
    steps = [line["step"] for line in read_metrics(metrics) if line["phase"] == "train"]
    assert steps == sorted(set(steps)), "no step is there twice"
    assert len(steps) == 6
