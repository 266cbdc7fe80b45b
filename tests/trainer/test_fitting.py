"""Slots, cache, passes and checkpoints of a run fit the model and the free memory, and the run keeps them."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.config.loader import load_config
from rllm.config.open_keys import MEMORY_KEYS, get_key
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError
from rllm.models.builtin import TinyModel, create_model
from rllm.models.facts import FROM_SCRATCH
from rllm.store.run_directory import RunDirectory
from rllm.trainer import fitting, memory_plan
from rllm.trainer.defaults import settle_defaults
from rllm.trainer.memory_plan import learned_models, stored_parts

QUICK = (
    *("steps=1", "rollout.tasks_per_step=2", "rollout.group_size=2", "rollout.max_turns=2", "threads=1"),
    *("evaluation.num_tasks=2", "evaluation.every_steps=0", "task.num_train_tasks=9", "warm_start.steps=0"),
)


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A directory that says its model comes from elsewhere, of 6 layers."""
    size = TinyModel(hidden_size=128, num_layers=6, num_heads=4, intermediate_size=512)
    create_model(tmp_path / "model", size)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {FROM_SCRATCH: False}))
    return tmp_path / "model"


def settled(path: object, *assignments: str) -> TrainConfig:
    config = load_config([f"model.path={path}", *assignments])
    settle_defaults(config, Path("nowhere"))
    return config


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    for module in (fitting, memory_plan):
        monkeypatch.setattr(module, "free_bytes", lambda device: num_bytes)


def values_of(config: TrainConfig) -> dict[str, Any]:
    return {key: get_key(config, key) for key in MEMORY_KEYS}


def test_a_model_made_here_has_the_values_that_its_tasks_were_tuned_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 10**11)  # other programs have much of a real one
    config = settled("builtin:tiny")
    assert values_of(config) == {
        "inference.num_slots": 256,
        "inference.cache_tokens": 256 * 512,
        "optimizer.micro_batch_tokens": 16_384,
        "optimizer.logits_mb": 512.0,
        "checkpoint.every_steps": 5,
    }


def test_a_pretrained_model_has_slots_for_what_is_played_at_once_and_short_passes(pretrained: Path) -> None:
    config = settled(pretrained, "rollout.tasks_per_step=4", "evaluation.num_tasks=16")
    assert config.inference.num_slots == 4 * 8
    assert config.optimizer.micro_batch_tokens == fitting.CPU_PASS_TOKENS
    assert settled(pretrained, "rollout.num_parallel=7").inference.num_slots == 7
    assert settled(pretrained, "rollout.tasks_per_step=4").inference.num_slots == 256, "of the evaluation"


def test_less_memory_gives_a_smaller_cache_and_smaller_passes_and_the_plan_fits(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = stored_parts(load_config([f"model.path={pretrained}"]))
    assert parts is not None
    sizes: list[tuple[int, int]] = []
    for room in (8_000_000_000, 400_000_000, 150_000_000):
        num_bytes = parts.total + room
        free(monkeypatch, num_bytes)
        short = (
            "inference.max_context=256",
            "rollout.max_tokens_per_turn=8",
            "inference.max_prefill_tokens=256",
        )
        config = settled(pretrained, *short)
        plan = memory_plan.memory_plan(config, num_ranks=1, num_local_ranks=1)
        assert plan is not None
        plan.require_fits()
        sizes.append((config.inference.cache_tokens, config.optimizer.micro_batch_tokens))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == (256 * 256, 1024)
    assert sizes[-1][0] < sizes[0][0]
    assert sizes[-1][1] < sizes[0][1]


def test_what_a_configuration_says_is_kept(pretrained: Path) -> None:
    assignments = ("inference.num_slots=3", "optimizer.micro_batch_tokens=77", "checkpoint.every_steps=1")
    config = settled(pretrained, *assignments, "inference.cache_tokens=5000", "optimizer.logits_mb=9")
    assert list(values_of(config).values()) == [3, 5000, 77, 9.0, 1]


def test_a_large_checkpoint_is_written_less_often_but_four_times_a_run(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settled(pretrained, "steps=100").checkpoint.every_steps == 5
    monkeypatch.setattr(fitting, "FAST_CHECKPOINT", 1e6)
    periods = {steps: settled(pretrained, f"steps={steps}").checkpoint.every_steps for steps in (8, 40, 1000)}
    assert periods == {8: 5, 40: 10, 1000: 20}


def test_a_token_of_a_deep_model_is_measured_on_a_few_of_its_layers(pretrained: Path) -> None:
    (model,) = learned_models(load_config([f"model.path={pretrained}"]))
    few = fitting.bytes_of_token(model)
    whole = (1.0 + memory_plan.FRAGMENTS) * fitting._weight_bytes(model, model.shape.num_layers)
    assert few == pytest.approx(whole, rel=0.03)


def test_ranks_come_to_one_answer_whatever_each_of_them_finds_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(fitting, "machine_bytes", lambda device: 10**10)
    free(monkeypatch, 7)
    assert fitting._free_for_each("cpu") == 10**10 // 2
    assert fitting._free_for_each("cuda") == 10**10


def test_a_run_goes_on_with_its_values_and_is_refused_where_they_no_longer_fit(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "frozenlake", "--recipe", "scratch", "--model", str(pretrained), "--output", "run"]
    for assignment in QUICK:
        words += ["--set", assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rllm.trainer.run.TrainingRun._train", _stop)
        stopped = CliRunner().invoke(front_door, words, prog_name="rllm")
    assert isinstance(stopped.exception, RuntimeError)
    config = RunDirectory.read(tmp_path / "run").config()
    assert config["optimizer"]["micro_batch_tokens"] == fitting.CPU_PASS_TOKENS
    chosen = RunDirectory.read(tmp_path / "run").choices()
    assert {"inference.num_slots", "inference.cache_tokens"} <= chosen.keys()
    free(monkeypatch, 900_000)
    refused = CliRunner().invoke(front_door, words, prog_name="rllm")
    assert refused.exit_code == 2
    assert "free" in refused.stderr
    free(monkeypatch, 9_000_000_000)
    monkeypatch.setattr(fitting, "CPU_PASS_TOKENS", 64)  # a new run would have another value
    done = CliRunner().invoke(front_door, words, prog_name="rllm")
    assert done.exit_code == 0, done.output
    assert RunDirectory.read(tmp_path / "run").config() == config


async def _stop(*_: object) -> None:
    raise RuntimeError("stopped")


def test_what_the_built_in_decoder_does_not_compute_has_short_passes_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = settled(tmp_path)
    assert config.optimizer.micro_batch_tokens == fitting.CPU_PASS_TOKENS
    assert config.checkpoint.every_steps == 5


def test_a_row_of_no_token_limit_is_refused(pretrained: Path) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        load_config(["optimizer.micro_batch_tokens=-1"])
