"""Keys that a configuration leaves open get values that fit the model, and a run keeps them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rllm.cli.main import rllm as front_door
from rllm.config.loader import load_config
from rllm.config.open_keys import OPEN_KEYS, get_key, open_keys
from rllm.config.supervised import SftConfig
from rllm.errors import ConfigError
from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model
from rllm.models.facts import FROM_SCRATCH, directory_facts
from rllm.store.run_directory import RunDirectory
from rllm.trainer.defaults import settle_defaults, settle_supervised

Rllm = Callable[..., Result]
QUICK = (
    *("steps=1", "rollout.tasks_per_step=2", "rollout.group_size=2", "rollout.max_turns=2", "threads=1"),
    *("evaluation.num_tasks=2", "evaluation.every_steps=0", "task.num_train_tasks=9"),
)


@pytest.fixture
def pretrained(tmp_path: Path) -> Callable[[int], Path]:
    """Directories that say they are models of so many parameters, made elsewhere."""

    def make(num_parameters: int, max_positions: int = 8192) -> Path:
        directory = tmp_path / f"model-{num_parameters}-{max_positions}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"max_position_embeddings": max_positions}))
        header = json.dumps({"w": {"dtype": "F32", "shape": [num_parameters], "data_offsets": [0, 0]}})
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
        return directory

    return make


@pytest.fixture
def rllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rllm:
    """Runs `rllm WORD…` in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(front_door, words, prog_name="rllm", catch_exceptions=False)


def _settled(path: object, *assignments: str, **facts: bool) -> dict[str, float]:
    config = load_config([f"model.path={path}", *assignments])
    settle_defaults(config, Path("nowhere"), **facts)
    return {key: get_key(config, key) for key in OPEN_KEYS}


def test_every_open_key_is_open_by_default_and_has_a_value_once_it_is_settled() -> None:
    config = load_config()
    assert set(open_keys(config)) == set(OPEN_KEYS)
    settle_defaults(config, Path("nowhere"), has_expert=True)
    assert open_keys(config) == []


def test_a_model_made_here_keeps_the_settings_that_its_tasks_were_tuned_with() -> None:
    values = _settled("builtin:tiny", has_expert=True)
    assert values["optimizer.learning_rate"] == 1e-3
    assert (values["optimizer.warmup_steps"], values["warm_start.steps"]) == (0, 100)
    assert (values["rollout.max_tokens_per_turn"], values["inference.max_context"]) == (4, 512)


def test_the_rate_of_a_pretrained_model_falls_with_its_size_and_an_adapter_takes_ten_times_of_it(
    pretrained: Callable[[int], Path],
) -> None:
    small, large = pretrained(134_515_008), pretrained(4 * 134_515_008)
    assert _settled(small)["optimizer.learning_rate"] == 2e-5
    assert _settled(large)["optimizer.learning_rate"] == 1e-5
    assert _settled(large, "lora.rank=8")["optimizer.learning_rate"] == 1e-4
    assert _settled(small)["optimizer.warmup_steps"] == 5
    assert _settled(small, "steps=5")["optimizer.warmup_steps"] == 2


def test_a_pretrained_model_has_room_to_think_within_its_positions(pretrained: Callable[..., Path]) -> None:
    roomy, short = _settled(pretrained(1000)), _settled(pretrained(1000, 512))
    assert (roomy["rollout.max_tokens_per_turn"], roomy["inference.max_context"]) == (256, 4096)
    assert (short["rollout.max_tokens_per_turn"], short["inference.max_context"]) == (128, 512)
    assert _settled(pretrained(2000), is_program=True)["rollout.max_tokens_per_turn"] == 0


def test_a_pretrained_model_imitates_an_expert_only_when_it_is_asked_to(
    pretrained: Callable[[int], Path],
) -> None:
    model = pretrained(134_515_008)
    assert _settled(model, has_expert=True)["warm_start.steps"] == 0
    assert _settled(model, "warm_start.steps=9", has_expert=True)["warm_start.learning_rate"] == 2e-5


def test_of_several_models_the_largest_pretrained_one_decides(pretrained: Callable[[int], Path]) -> None:
    small, large = pretrained(134_515_008), pretrained(4 * 134_515_008)
    policies = [f"policies.a.path={small}", f"policies.b.path={large}", "policies.c.path=builtin:tiny"]
    assert _settled("builtin:tiny", *policies)["optimizer.learning_rate"] == 1e-5


def test_a_frozen_policy_decides_no_rate_and_an_adapter_of_one_policy_raises_none_of_another(
    pretrained: Callable[[int], Path],
) -> None:
    small, large = pretrained(134_515_008), pretrained(4 * 134_515_008)
    both = [f"policies.a.path={small}", f"policies.b.path={large}"]
    assert _settled(small, *both, "policies.b.trainable=false")["optimizer.learning_rate"] == 2e-5
    assert _settled(small, *both, "policies.a.lora_rank=8")["optimizer.learning_rate"] == 1e-5
    assert _settled(small, *both, "lora.rank=8")["optimizer.learning_rate"] == 1e-4


def test_what_a_configuration_says_is_kept(pretrained: Callable[[int], Path]) -> None:
    values = _settled(pretrained(134_515_008), "optimizer.learning_rate=3e-4", "inference.max_context=100")
    assert (values["optimizer.learning_rate"], values["inference.max_context"]) == (3e-4, 100)


def test_a_value_that_follows_is_checked_like_one_that_was_given() -> None:
    config = load_config(["filters.overlong_buffer=4"])
    with pytest.raises(ConfigError, match=r"`rollout.max_tokens_per_turn` is 4"):
        settle_defaults(config, Path("nowhere"))


def test_a_run_on_rows_has_a_rate_of_its_own_kind(pretrained: Callable[[int], Path]) -> None:
    for kind, path, rank, rate in (
        ("sft", pretrained(134_515_008), 0, 2e-5),
        ("sft", pretrained(134_515_009), 8, 2e-4),
        ("sft", "builtin:tiny", 0, 3e-3),
        ("dpo", pretrained(134_515_010), 0, 5e-6),
        ("dpo", "builtin:tiny", 0, 3e-4),
    ):
        config = SftConfig()
        config.model.path, config.lora.rank = str(path), rank
        settle_supervised(config, Path("nowhere"), kind)
        assert config.optimizer.learning_rate == rate


def test_the_mark_of_a_model_made_here_survives_training(tmp_path: Path) -> None:
    create_model(tmp_path / "made")
    save_model(load_model(tmp_path / "made"), tmp_path / "trained")
    assert directory_facts(tmp_path / "trained").from_scratch
    config = json.loads((tmp_path / "trained/config.json").read_text())
    del config[FROM_SCRATCH]
    (tmp_path / "trained/config.json").write_text(json.dumps(config))
    assert directory_facts(tmp_path / "trained").from_scratch, "older directories are known by their template"
    (tmp_path / "trained/tokenizer_config.json").unlink()
    assert not directory_facts(tmp_path / "trained").from_scratch


def test_a_run_says_what_was_chosen_once_and_keeps_it(rllm: Rllm) -> None:
    words = ["train", "frozenlake", "--output", "run", *(word for key in QUICK for word in ("--set", key))]
    words += ["--set", "warm_start.steps=1"]
    first = rllm(*words)
    assert first.exit_code == 0, first.output
    assert "inference.max_context 512" in first.output
    run = RunDirectory.read(Path("run"))
    choices = run.choices()
    assert choices["inference.max_context"]["value"] == run.config()["inference"]["max_context"] == 512
    assert "inference.max_context" not in rllm(*words).output
    assert "inference.max_context" in rllm("runs", "show", "run").output
    assert json.loads(rllm("runs", "show", "run", "--json").output)["chosen"] == choices


def test_a_run_that_is_there_goes_on_with_the_values_that_it_began_with(rllm: Rllm) -> None:
    words = ["train", "frozenlake", "--output", "run", *(word for key in QUICK for word in ("--set", key))]
    words += ["--set", "warm_start.steps=1"]
    assert rllm(*words, "--set", "inference.max_context=300").exit_code == 0
    again = rllm(*words, "--dry-run", "--json")
    plan = json.loads(again.stdout)
    assert plan["config"]["inference"]["max_context"] == 300
    assert (plan["conflict"], plan["chosen"]) == (None, {})
