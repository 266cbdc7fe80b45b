"""A run says once what it computes with, keeps it, and measures each step against the machine's peak."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.models.peak import peak_bytes_per_s, peak_flops
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer import machine
from rllm.trainer.machine import machines_of


class Notes:
    """A tracker that keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def begin(self, phase: str) -> None: ...
    def advance(self, done: int, total: int) -> None: ...
    def log(self, step: int, phase: str, metrics: Any) -> None: ...
    def close(self) -> None: ...


def test_the_kernels_are_said_once_and_kept(letters: ModuleType, tmp_path: Path) -> None:
    notes = Notes()
    letters.make_trainer(tmp_path / "run", {"steps": 1}, tracker=notes).train()
    with RunDirectory.read(tmp_path / "run") as run:
        (kept,) = machines_of(run)
        summary = run.summary()
    assert [line for line in notes.lines if "Chosen" not in line and "Alarm" not in line] == [kept.line()]
    for word in ("1 thread,", "float32", "attention flash", "fused AdamW", "built-in engine"):
        assert word in kept.line()
    assert summary is not None
    assert summary["machines"] == json.loads((tmp_path / "run" / "machine.json").read_text())
    assert (kept.dtype, kept.sampler_dtype, kept.threads) == ("float32", "float32", 1)


@pytest.mark.parametrize(
    ("optimizer", "kernel"),
    [({"name": "muon", "muon_dtype": "float32"}, "Muon in float32"), ({"name": "adafactor"}, "Adafactor")],
    ids=str,
)
def test_the_kernels_are_those_that_are_chosen(
    letters: ModuleType, tmp_path: Path, optimizer: dict[str, Any], kernel: str
) -> None:
    run, settings = tmp_path / "run", {"steps": 1, "optimizer": optimizer, "model": {"dtype": "bfloat16"}}
    letters.make_trainer(run, settings).train()
    (kept,) = machines_of(RunDirectory.read(run))
    assert kernel in kept.optimizer
    assert kept.dtype == kept.sampler_dtype == "bfloat16"


@contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """Runs end as by Ctrl-C behind so many steps."""
    from rllm.trainer.loop import RunParts

    save = RunParts.save

    def save_and_stop(run: RunParts) -> None:
        save(run)
        if run.state.steps == steps:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunParts, "save", save_and_stop)
        yield


def test_a_run_that_goes_on_takes_the_peak_from_its_record(
    letters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings = tmp_path / "run", {"steps": 2, "checkpoint": {"every_steps": 1}}
    with stopped_after(1), pytest.raises(KeyboardInterrupt):
        letters.make_trainer(run, settings).train()
    measured = (run / "machine.json").read_bytes()
    monkeypatch.setattr("rllm.models.peak.peak_flops", None)  # nobody measures again
    letters.make_trainer(run, settings).train()
    assert (run / "machine.json").read_bytes() == measured


def test_a_run_that_goes_on_with_other_kernels_says_so_and_has_both_on_record(
    letters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, settings = tmp_path / "run", {"steps": 2, "checkpoint": {"every_steps": 1}}
    with stopped_after(1), pytest.raises(KeyboardInterrupt):
        letters.make_trainer(run, settings).train()
    monkeypatch.setattr("rllm.models.kernels.processor_name", lambda device: "another processor")
    with caplog.at_level(logging.WARNING, logger=machine.__name__):
        letters.make_trainer(run, settings).train()
    first, second = machines_of(RunDirectory.read(run))
    assert (first.from_step, second.from_step) == (
        0,
        first.from_step + 1 + letters.SETTINGS["warm_start"]["steps"],
    )
    assert f"processor {first.processor} → another processor" in caplog.text


def test_each_step_has_its_share_of_the_peak(finished: Path) -> None:
    lines = read_metrics(finished / "metrics.jsonl")
    kept = machines_of(RunDirectory.read(finished))[-1]
    updates = [line for line in lines if line["phase"] in ("warm_start", "train") and "update_flops" in line]
    assert {line["phase"] for line in updates} == {"warm_start", "train"}
    for line in updates:
        speed = line["update_flops"] / line["update_s"]
        assert line["update_flops_share"] == pytest.approx(speed / kept.peak_flops)
        assert line["update_flops_share"] > 0.0
    imitated = [line["update_flops"] for line in updates if line["phase"] == "warm_start"]
    assert max(imitated) < 2 * min(imitated), "each is of its step alone"
    assert sum(line["update_s"] for line in updates) < updates[-1]["run_s"]
    rollouts = [line for line in lines if line["phase"] == "train"]
    assert all("rollout_bandwidth_share" in line for line in rollouts)
    for line in rollouts:
        speed = line["rollout_bytes"] / line["rollout_busy_s"]
        assert line["rollout_bandwidth_share"] == pytest.approx(speed / kept.peak_bytes_per_s)


def test_several_policies_have_shares_of_their_own(letters: ModuleType, tmp_path: Path) -> None:
    letters.make_pair_trainer(tmp_path / "run", {"steps": 1}).train()
    (line,) = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    for policy in ("solver", "judge"):
        assert line[f"policy.{policy}.update_flops_share"] > 0.0
        assert line[f"policy.{policy}.rollout_bandwidth_share"] > 0.0


def test_a_supervised_run_has_them_too(chats: ModuleType, tmp_path: Path) -> None:
    notes = Notes()
    chats.make_trainer(tmp_path / "run", {"epochs": 1}, tracker=notes).train()
    lines = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    run = RunDirectory.read(tmp_path / "run")
    (machine,) = machines_of(run)
    for line in lines:
        speed = line["update_flops"] / line["update_s"]
        assert line["update_flops_share"] == pytest.approx(speed / machine.peak_flops)
    assert [line for line in notes.lines if "Chosen" not in line] == [machine.line()]
    assert (run.summary() or {})["machines"] == run.machines()


def test_the_peak_is_what_the_best_of_several_products_reaches() -> None:
    flops = peak_flops("cpu", "float32")
    assert 1e8 < flops < 1e13
    assert 1e7 < peak_bytes_per_s("cpu", "float32", 1) < 1e13
    assert 1e7 < peak_bytes_per_s("cpu", "bfloat16", 1 << 24) < 1e13


def test_a_small_product_that_waited_for_a_core_does_not_lower_the_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter((0.02, 0.001))  # of products of two sizes
    monkeypatch.setattr("rllm.models.peak._best_s", lambda *_: next(seconds))
    monkeypatch.setattr("rllm.models.peak.LARGEST_SIZE", 512)
    assert peak_flops("cpu", "float32") == pytest.approx(2 * 512**3 / 0.001)
