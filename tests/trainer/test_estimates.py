"""A plan says how long a run takes at most, and what it leaves on the disk."""

from pathlib import Path
from typing import Any

import pytest

from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.config.loader import load_config
from rllm.config.supervised import SftConfig
from rllm.errors import ConfigError
from rllm.trainer import estimates, supervised
from rllm.trainer import run as trainer_run
from rllm.trainer.defaults import settle_defaults
from rllm.trainer.estimates import (
    RunEstimate,
    disk_bytes,
    disk_bytes_needed,
    estimate_rows,
    estimate_run,
)
from rllm.trainer.memory_plan import stored_parts
from rllm.trainer.sft import AgentSFTTrainer

PEAK_FLOPS, PEAK_BYTES = 1e9, 1e8


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a known peak."""
    monkeypatch.setattr(estimates, "peak_flops", lambda *_: PEAK_FLOPS)
    monkeypatch.setattr(estimates, "peak_bytes_per_s", lambda *_: PEAK_BYTES)


def estimate(*assignments: str, num_ranks: int = 1) -> RunEstimate:
    config = load_config(["steps=10", "rollout.max_turns=2", "threads=1", *assignments])
    settle_defaults(config, Path("nowhere"))
    result = estimate_run(config, num_ranks)
    assert result is not None
    return result


def weights(*assignments: str) -> int:
    parts = stored_parts(load_config(assignments))
    assert parts is not None
    return parts.weights


def test_rates_follow_from_parameters_and_the_peak_of_the_machine() -> None:
    parameters = weights() / 4
    by_reading, by_computing = PEAK_BYTES / (4 * parameters), PEAK_FLOPS / (2 * parameters)
    plain = estimate("rollout.tasks_per_step=2", "rollout.group_size=2")
    assert plain.learned_tokens_per_s == pytest.approx(0.7 * PEAK_FLOPS / (6 * parameters))
    assert plain.sampled_tokens_per_s == pytest.approx(0.5 * 4 * by_reading)
    assert estimate("rollout.tasks_per_step=32").sampled_tokens_per_s == pytest.approx(0.5 * by_computing)
    assert estimate("lora.rank=2").learned_tokens_per_s > plain.learned_tokens_per_s
    assert estimate(num_ranks=2).learned_tokens_per_s == pytest.approx(2 * plain.learned_tokens_per_s)


def test_a_step_has_as_many_tokens_as_its_limits_allow_and_a_run_its_evaluations() -> None:
    plain = estimate("evaluation.every_steps=0", "evaluation.num_tasks=3")
    tokens = 16 * 8 * 2 * 4  # tasks, attempts, turns, tokens of a turn
    each = 1 / plain.sampled_tokens_per_s + 1 / plain.learned_tokens_per_s
    assert plain.step_s == pytest.approx(tokens * each)
    evaluated = 2 * 2 * 3 * 2 * 4  # sampled and greedily, before and after; tasks, turns, tokens
    assert plain.run_s == pytest.approx(10 * plain.step_s + evaluated / plain.sampled_tokens_per_s)
    between = estimate("evaluation.every_steps=5", "evaluation.num_tasks=3", "evaluation.every_num_tasks=1")
    assert between.run_s > plain.run_s
    assert estimate("warm_start.steps=5", "evaluation.every_steps=0").run_s > plain.run_s


def test_disk_holds_checkpoints_that_stay_and_two_models() -> None:
    config = load_config(["checkpoint.keep=3"])
    parts = stored_parts(config)
    assert parts is not None
    assert disk_bytes(config, parts) == 5 * (parts.gradients + parts.optimizer) + 2 * parts.weights
    assert estimate("lora.rank=2").disk_bytes < estimate().disk_bytes


def test_rows_are_learned_from_once_an_update() -> None:
    quantities: dict[str, Any] = {"tokens_per_update": 700, "optimizer_updates": 3}
    config = SftConfig()
    config.model.path, config.threads = "builtin:tiny", 1
    result = estimate_rows(config, quantities)
    assert result is not None
    assert result.sampled_tokens_per_s == 0.0
    assert result.step_s == pytest.approx(700 / result.learned_tokens_per_s)
    assert result.run_s == pytest.approx(3 * result.step_s)
    assert estimate_rows(config, {"optimizer_updates": 3}) is None


def test_nothing_is_said_of_what_is_computed_elsewhere() -> None:
    config = load_config(["backend=verl", "model.path=a-name"])
    assert estimate_run(config, 1) is None


def test_a_run_asks_the_disk_for_what_its_plan_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    num_bytes_asked: list[int] = []

    def ask(path: Path, num_bytes: int, what: str) -> None:
        num_bytes_asked.append(num_bytes)
        raise ConfigError("no room")

    monkeypatch.setattr(trainer_run, "require_free_space", ask)
    monkeypatch.setattr(supervised, "require_free_space", ask)
    settings = ["lora.rank=2", "steps=3", "warm_start.steps=0", "evaluation.num_tasks=4", "threads=1"]
    run = build_run(training_config("frozenlake", None, tuple(settings)), tmp_path / "run")
    plan = run.estimate(1)
    assert plan is not None
    with pytest.raises(ConfigError):
        run.train()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "completion": "2"}\n' * 4)
    trainer = AgentSFTTrainer([f"data.dataset={rows}", "lora.rank=2", "threads=1"], output=tmp_path / "sft")
    plan_of_rows = estimate_rows(trainer.config, trainer.dry_run()[0])
    assert plan_of_rows is not None
    with pytest.raises(ConfigError):
        trainer.train()
    assert num_bytes_asked == [plan.disk_bytes, plan_of_rows.disk_bytes]


def test_models_of_unknown_shape_are_counted_as_float32_with_adamw(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    config = load_config({"model": {"path": str(tmp_path)}, "checkpoint": {"keep": 1}})
    assert disk_bytes_needed(config, 1000) == 3 * 4 * 3000 + 2 * 4 * 1000
    config.critic.trunk = "separate"
    assert disk_bytes_needed(config, 1000) == 3 * 4 * (3000 + 4000) + 2 * 4 * 1000
    config.backend, config.model.path = "tinker", "Qwen/Qwen3-8B"
    assert disk_bytes_needed(config, 0) == 0
