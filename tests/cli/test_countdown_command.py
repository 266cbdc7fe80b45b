"""`rllm train countdown` and `rllm eval countdown`: episodes that are one question and one answer."""

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

Rllm = Callable[..., Result]


def test_countdown_is_trained_and_measured_by_name(
    rllm: Rllm, tiny_settings: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trained = rllm("train", "countdown", *tiny_settings, "--output", run, "--json")
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["after"]["sampled_report"]["attempted"] == 4
    evaluated = rllm("eval", "countdown", "--model", run, "--num-tasks", "4", "--json")
    assert evaluated.exit_code == 0, evaluated.output
    shown = rllm("runs", "show", run, "--episode", "1")
    assert " target " in shown.stdout


def test_the_expert_of_countdown_is_told_signs_that_exist(rllm: Rllm, tmp_path: Path) -> None:
    words = ("--set", 'warm_start.expert_args={signs="+"}', "--output", tmp_path / "run")
    refused = rllm("train", "countdown", *words)
    assert refused.exit_code == 2
    assert "warm_start.expert_args.signs" in " ".join(refused.stderr.split())
