"""The default benchmark, as a person runs it."""

from pathlib import Path

import pytest

from rllm.build import build_trainer, training_config
from rllm.trainer.replay import replay


@pytest.mark.slow
def test_the_default_run_learns_to_cross_the_lake(tmp_path: Path) -> None:
    trainer = build_trainer(training_config("frozenlake", seed=1), tmp_path / "run")
    summary = trainer.train().summary
    assert summary["before"]["success"] <= 0.35
    assert summary["after"]["success"] >= 0.90
    assert summary["after"]["greedy"] >= 0.90
    assert summary["after"]["success"] >= summary["before"]["greedy"] + 0.20
    assert replay(trainer).is_identical
