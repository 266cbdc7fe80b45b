import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from rllm.models.builtin import TinyModel, create_model

Rllm = Callable[..., Result]

SMALL = (
    "steps=1",
    "rollout.tasks_per_step=2",
    "rollout.group_size=2",
    "rollout.max_tokens_per_turn=4",
    "inference.max_context=64",
    "inference.num_slots=4",
    "threads=1",
)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A teacher, a student and prompts; the command is run beside them."""
    for name, seed in (("teacher", 1), ("student", 2)):
        shape = TinyModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
        create_model(tmp_path / name, shape, seed=seed)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Up?"}\n{"prompt": "Down?"}\n')
    settings = [word for each in SMALL for word in ("--set", each)]
    return ["distill", "prompts.jsonl", "--teacher", "teacher", "--model", "student", *settings]


def test_a_run_says_how_near_the_student_came_and_what_to_type_next(rllm: Rllm, words: list[str]) -> None:
    result = rllm(*words, "--output", "run")
    assert result.exit_code == 0, result.stderr
    assert "reverse KL" in result.stdout
    assert "success" not in result.stdout
    assert "rllm serve model run/model" in result.stdout
    again = rllm(*words, "--output", "run", "--json")
    assert "run is finished" in again.stderr
    summary = json.loads(again.stdout)
    assert summary["after"]["reverse_kl"] > 0.0
    assert Path("run/curve.png").is_file()
    shown = rllm("runs", "show", "run").stdout
    assert f"{summary['before']['reverse_kl']:.4f} ±" in shown
    assert f"{summary['after']['reverse_kl']:.4f} ±" in shown
    assert "success" not in shown.lower()
    assert "reverse_kl" in json.loads(rllm("runs", "show", "run", "--json").stdout)["reports"]["after"]


def test_rate_and_rank_have_flags_as_in_train(rllm: Rllm, words: list[str]) -> None:
    done = rllm(*words, "--lr", "3e-4", "--lora-rank", "2", "--dry-run", "--json")
    assert done.exit_code == 0, done.stderr
    config = json.loads(done.stdout)["config"]
    assert (config["optimizer"]["learning_rate"], config["lora"]["rank"]) == (3e-4, 2)


def test_a_dry_run_prints_the_plan_and_writes_nothing(rllm: Rllm, words: list[str]) -> None:
    plan = json.loads(rllm(*words, "--dry-run", "--json").stdout)
    assert plan["config"]["algorithm"]["estimator"] == "teacher"
    assert plan["config"]["distill"]["teacher"] == "teacher"
    assert plan["derived"]["episodes_per_step"] == 4
    assert plan["run"] == "runs/distill-prompts-seed0"
    assert not Path("runs").exists()


def test_a_benchmark_keeps_its_tasks_and_loses_its_expert(rllm: Rllm, words: list[str]) -> None:
    plan = json.loads(rllm("distill", "frozenlake", "--teacher", "teacher", "--dry-run", "--json").stdout)
    assert plan["config"]["task"]["environment"] == "frozenlake"
    assert plan["config"]["warm_start"]["steps"] == 0
    assert plan["config"]["rollout"]["temperature"] == 1.0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["distill", "prompts.jsonl"], "set `distill.teacher`"),
        (["distill", "nowhere.jsonl", "--teacher", "teacher"], "no dataset nowhere.jsonl"),
        (["distill", "frozenlak", "--teacher", "teacher"], "did you mean `frozenlake`?"),
    ],
)
def test_what_is_wrong_ends_with_exit_code_2(
    rllm: Rllm, words: list[str], changed: list[str], said: str
) -> None:
    result = rllm(*changed, "--dry-run")
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_teacher_that_is_not_there_is_refused(rllm: Rllm, words: list[str]) -> None:
    result = rllm(*words, "--set", "distill.teacher=nobody", "--dry-run")
    assert result.exit_code == 2
    assert "`distill.teacher` is 'nobody'" in result.stderr
