"""Runs of earlier versions open and resume.

`earlier/runs-COMMIT.tar.gz` holds the runs that COMMIT wrote: one finished, one killed with -9 after its
second step, both from the model in `start/`.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from rllm.cli.main import rllm
from rllm.tracking.jsonl import read_metrics

EARLIER = sorted((Path(__file__).parent / "earlier").glob("runs-*.tar.gz"))
SETTINGS = (
    "steps=4",
    "threads=1",
    "optimizer.muon_dtype=float32",
    "warm_start.steps=4",
    "warm_start.episodes_per_step=8",
    "rollout.tasks_per_step=4",
    "rollout.group_size=4",
    "evaluation.num_tasks=4",
    "evaluation.every_num_tasks=2",
    "checkpoint.every_steps=1",
    "checkpoint.keep=1",
)
COMMAND = ["train", "frozenlake", "--model", "start", "--seed", "7"]
COMMAND += [word for setting in SETTINGS for word in ("--set", setting)]
"""What made both runs."""


@pytest.fixture(params=EARLIER, ids=lambda path: path.name.removesuffix(".tar.gz"))
def earlier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the runs of one earlier version, which is the working directory too."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _rllm(*words: str) -> str:
    result = CliRunner().invoke(rllm, words, prog_name="rllm", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_finished_run_of_an_earlier_version_is_shown_and_measured(earlier: Path) -> None:
    assert "finished" in _rllm("runs", "list", str(earlier))
    assert "prompt" in _rllm("runs", "show", "finished", "--episode", "1", "--json")
    report = _rllm("eval", "frozenlake", "--model", "finished", "--num-tasks", "2", "--json")
    assert '"attempted": 2' in report


def test_a_finished_run_of_an_earlier_version_stays_finished(earlier: Path) -> None:
    before = (earlier / "finished/summary.json").read_bytes()
    assert "is finished" in _rllm(*COMMAND, "--output", "finished")
    assert (earlier / "finished/summary.json").read_bytes() == before


def test_an_interrupted_run_of_an_earlier_version_ends_as_the_whole_one(earlier: Path) -> None:
    lines = read_metrics(earlier / "interrupted/metrics.jsonl")
    _rllm(*COMMAND, "--output", "interrupted")
    resumed = read_metrics(earlier / "interrupted/metrics.jsonl")
    assert resumed[: len(lines)] == lines
    assert [(line["phase"], line["step"]) for line in resumed] == [
        (line["phase"], line["step"]) for line in read_metrics(earlier / "finished/metrics.jsonl")
    ]
    ends = [load_file(earlier / run / "model/model.safetensors") for run in ("interrupted", "finished")]
    for name, values in ends[0].items():
        torch.testing.assert_close(values, ends[1][name], rtol=1e-3, atol=1e-4)
