"""What a run measures of the model, and when: equal weights once, and not at all where that is asked for."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.view.run_facts import report_labels

PLAIN = {"warm_start": {"steps": 0}, "steps": 1, "evaluation": {"every_steps": 0}}


def _trained(letters: ModuleType, run: Path, **changed: Any) -> tuple[dict[str, Any], list[str]]:
    """(summary, phases in the order in which they were logged)."""
    settings = {**PLAIN, "evaluation": {**PLAIN["evaluation"], **changed}}
    summary = letters.make_trainer(run, settings).train().summary
    return summary, [line["phase"] for line in read_metrics(run / "metrics.jsonl")]


def test_without_a_warm_start_the_untrained_model_is_measured_once(
    letters: ModuleType, tmp_path: Path
) -> None:
    summary, phases = _trained(letters, tmp_path / "run")
    assert phases == ["before", "train", "after"]
    assert summary["untrained"] == summary["before"]
    with EpisodeStore.open(tmp_path / "run/store.sqlite", read_only=True) as store:
        assert "untrained" not in store.phases()
    assert sum(summary["after"]["sampled_report"]["endings"].values()) > 0


def test_a_run_that_is_not_to_be_measured_at_its_start_is_measured_at_its_end(
    letters: ModuleType, tmp_path: Path
) -> None:
    summary, phases = _trained(letters, tmp_path / "run", at_start=False)
    assert phases == ["train", "after"]
    assert not {"untrained", "before"} & summary.keys()
    assert (summary["skill"], summary["kinds"]) == ({}, [])


@pytest.mark.parametrize(
    ("steps", "labels"), [(0, ["before", "after"]), (3, ["untrained", "before", "after"])]
)
def test_tables_show_a_model_once(steps: int, labels: list[str]) -> None:
    assert list(report_labels({"warm_start": {"steps": steps}})) == labels
