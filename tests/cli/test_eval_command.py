import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Rllm = Callable[..., Result]

FEW = ("--num-tasks", "3", "--threads", "1")


def test_a_run_and_its_model_directory_are_the_same_model(finished_run: Any, rllm: Rllm) -> None:
    of_run = rllm("eval", "frozenlake", "--model", finished_run.path, *FEW, "--json")
    of_model = rllm("eval", "frozenlake", "--model", finished_run.path / "model", *FEW, "--json")
    assert of_run.exit_code == of_model.exit_code == 0
    report = json.loads(of_run.stdout)
    assert report == json.loads(of_model.stdout)
    assert report["model"] == str(finished_run.path / "model")
    for way in ("sampled", "greedy"):
        counts = report[way]
        assert counts["attempted"] == 3
        assert counts["attempted"] == counts["scored"] + counts["truncated"] + counts["failed"]


def test_the_report_shows_every_count_and_what_to_type_next(finished_run: Any, rllm: Rllm) -> None:
    result = rllm("eval", "frozenlake", "--model", finished_run.path, *FEW, "--split", "validation")
    assert result.exit_code == 0
    for word in (
        "validation tasks",
        "sampled",
        "greedy",
        "attempted",
        "scored",
        "truncated",
        "failed",
        "95 %",
    ):
        assert word in result.stdout
    assert f"rllm runs show {finished_run.path}" in result.stdout


def test_a_run_without_a_trained_model_is_refused(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    result = rllm("eval", "frozenlake", "--model", "run")
    assert result.exit_code == 2
    assert "no trained model yet" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("frozenlake", "--model", "absent"), "neither a run nor a model directory"),
        (("frozenlaek", "--model", "absent"), "did you mean `frozenlake`?"),
        (("frozenlake",), "--model"),
        (("frozenlake", "--model", "absent", "--split", "train"), "'train' is not one of"),
        (("frozenlake", "--model", "absent", "--num-tasks", "0"), "--num-tasks"),
    ],
    ids=["model", "benchmark", "no model", "split", "count"],
)
def test_bad_words_are_refused(words: tuple[str, ...], message: str, rllm: Rllm) -> None:
    result = rllm("eval", *words)
    assert result.exit_code == 2
    assert message in result.stderr
