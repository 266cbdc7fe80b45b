"""Runs that train adapters: what is sampled, saved, shared and resumed.

Who plays: letter_game.py; who kills: killing.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rllm.errors import ConfigError
from rllm.models.directory import load_model, parameters_sha256
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.policies import create_initial_models, load_initial_models
from rllm.trainer.replay import replay
from rllm.trainer.sft import AgentSFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""PeftModel asks transformers in its old words."""

Ask = Callable[..., dict[str, Any]]
ADAPTER = {"lora": {"rank": 4, "alpha": 16.0}, "optimizer": {"learning_rate": 0.01}}
PAIR = {**ADAPTER, "steps": 2, "warm_start": {"steps": 2}, "checkpoint": {"every_steps": 1}}


def _sha256(model: Path) -> str:
    return parameters_sha256(load_model(model).model.state_dict_hf())


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(6, 70).unsqueeze(0)).logits


def _require_same_model(base: Path, adapter: Path, merged: Path) -> None:
    """transformers and peft make of the two what transformers makes of the third."""
    inner = AutoModelForCausalLM.from_pretrained(base)
    before = _logits(inner)
    with_adapter = _logits(PeftModel.from_pretrained(inner, adapter))
    assert float((with_adapter - before).abs().max()) > 1e-3
    torch.testing.assert_close(
        _logits(AutoModelForCausalLM.from_pretrained(merged)), with_adapter, atol=1e-5, rtol=1e-5
    )


@pytest.fixture(scope="module")
def finished(letters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    letters.make_trainer(run, ADAPTER).train()
    return run


def test_the_sampler_has_the_adapter_as_soon_as_it_is_published(finished: Path) -> None:
    lines = [each for each in read_metrics(finished / "metrics.jsonl") if each["phase"] == "train"]
    assert max(each["canary_gap"] for each in lines) < 1e-5
    gaps = [each["logprob_gap_first"] for each in lines if "logprob_gap_first" in each]
    assert gaps  # a first update whose rows all tie has computed none
    assert max(gaps) < 1e-5
    assert all(each["canary_moved"] > 1e-4 for each in lines[1:])


def test_the_trained_model_is_there_merged_and_as_an_adapter_that_peft_reads(finished: Path) -> None:
    _require_same_model(finished / "initial_model", finished / "adapter", finished / "model")
    assert _sha256(finished / "model") != _sha256(finished / "initial_model")
    settings = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 16.0)
    assert settings["base_model_name_or_path"] == str(finished / "initial_model")


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(finished: Path) -> None:
    checkpoint = max((finished / "checkpoints").glob("step-*"))
    weights = load_file(checkpoint / "weights.safetensors")
    assert weights
    assert all(".lora_A." in name or ".lora_B." in name for name in weights)
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert size < (finished / "model" / "model.safetensors").stat().st_size
    moments = load_file(checkpoint / "optimizer.safetensors")
    assert {name.rpartition(".")[0] for name in moments if "." in name} == set(weights)


def test_a_run_of_an_adapter_replays_without_an_engine(letters: ModuleType, finished: Path) -> None:
    result = replay(letters.make_trainer(finished, ADAPTER).run)
    assert result.differences == []
    assert result.is_identical


def test_a_base_in_4_bits_samples_and_trains_with_the_same_numbers(
    letters: ModuleType, tmp_path: Path
) -> None:
    settings = {**ADAPTER, "lora": {**ADAPTER["lora"], "base_dtype": "nf4"}}
    letters.make_trainer(tmp_path / "run", settings).train()
    lines = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    assert max(each["canary_gap"] for each in lines) < 1e-5
    gaps = [each["logprob_gap_first"] for each in lines if "logprob_gap_first" in each]
    assert gaps
    assert max(gaps) < 1e-5
    assert all(each["canary_moved"] > 1e-4 for each in lines[1:])
    assert replay(letters.make_trainer(tmp_path / "run", settings).run).is_identical
    saved = load_model(tmp_path / "run" / "model").model.state_dict_hf()
    begin = load_model(tmp_path / "run" / "initial_model").model.state_dict_hf()
    unchanged = {name for name, each in saved.items() if torch.equal(each, begin[name])}
    assert unchanged == {name for name in begin if "_proj" not in name}


# ---- several policies --------------------------------------------------------------------------------------


def _memory(model: Any) -> dict[int, int]:
    return {each.data_ptr(): each.numel() for each in model.parameters()}


@pytest.fixture(scope="module")
def pair(letters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A solver and a judge that learn beside each other on one base."""
    run = tmp_path_factory.mktemp("runs") / "pair"
    letters.make_pair_trainer(run, PAIR).train()
    return run


def test_two_policies_are_one_base_and_two_adapters(letters: ModuleType, pair: Path) -> None:
    assert [path.name for path in (pair / "initial_models").iterdir()] == ["solver"]
    models = load_initial_models(letters.make_pair_trainer(pair, PAIR).config, pair)
    solver, judge = (_memory(models[name].model) for name in ("solver", "judge"))
    base = _memory(load_model(pair / "initial_models" / "solver").model)
    assert sum((solver | judge).values()) == sum(solver.values()) + sum(judge.values()) - sum(base.values())
    for name in ("solver", "judge"):
        _require_same_model(
            pair / "initial_models" / "solver", pair / "adapters" / name, pair / "models" / name
        )
    assert _sha256(pair / "models" / "solver") != _sha256(pair / "models" / "judge")
    for line in read_metrics(pair / "metrics.jsonl"):
        if line["phase"] == "train":
            assert max(line[f"policy.{name}.canary_gap"] for name in ("solver", "judge")) < 1e-5
            assert max(line[f"policy.{name}.logprob_gap_sampler"] for name in ("solver", "judge")) < 1e-5
    assert replay(letters.make_pair_trainer(pair, PAIR).run).is_identical


def test_beside_an_adapter_a_frozen_policy_of_the_same_model_is_its_base(
    letters: ModuleType, finished: Path, tmp_path: Path
) -> None:
    base = str(finished / "initial_model")
    frozen = {"policies": {"solver": {"path": base}, "judge": {"path": base, "trainable": False}}}
    before = _sha256(finished / "initial_model")
    trainer = letters.make_pair_trainer(tmp_path / "run", {**PAIR, **frozen})
    models = load_initial_models(trainer.config, tmp_path / "run")
    assert models["solver"].base is models["judge"]
    trainer.train()
    assert _sha256(finished / "initial_model") == _sha256(tmp_path / "run" / "models" / "judge") == before
    assert [path.name for path in (tmp_path / "run" / "adapters").iterdir()] == ["solver"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["policies"]["judge"]["parameters_sha256"] == before
    assert summary["policies"]["solver"]["parameters_sha256"] != before


def test_one_policy_may_train_an_adapter_and_the_other_its_weights(
    letters: ModuleType, tmp_path: Path
) -> None:
    changes = {"policies": {"solver": {"lora_rank": 2, "lora_targets": ["q_proj"]}}}
    trainer = letters.make_pair_trainer(tmp_path / "run", {**PAIR, "lora": None, **changes})
    trainer.train()
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    names = {name: set(load_file(checkpoint / name / "weights.safetensors")) for name in ("solver", "judge")}
    assert names["solver"] == {
        f"adapter.model.layers.{layer}.self_attn.q_proj.lora_{part}.default.weight"
        for layer in (0, 1)
        for part in "AB"
    }
    assert "embed.weight" in names["judge"]
    assert sorted(path.name for path in (tmp_path / "run" / "initial_models").iterdir()) == [
        "judge",
        "solver",
    ]


# ---- killed ------------------------------------------------------------------------------------------------


def _learned(run: Path) -> dict[str, Any]:
    """What must not depend on a run's being killed."""
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        said = [
            step.response_ids
            for number in range(4)
            for episode in store.episodes("train", number)
            for trajectory in episode.trajectories
            for step in trajectory.steps
        ]
    return {
        "models": {
            str(path.parent.relative_to(run)): _sha256(path.parent)
            for path in run.glob("model*/**/config.json")
        },
        "adapters": {
            str(path.relative_to(run)): {
                name: np.asarray(each).tobytes() for name, each in load_file(path).items()
            }
            for path in run.glob("adapter*/**/*.safetensors")
        },
        "losses": [
            [value for name, value in line.items() if name.endswith(("loss", "grad_norm"))]
            for line in read_metrics(run / "metrics.jsonl")
        ],
        "said": said,
    }


@pytest.mark.parametrize("game", ["letters", pytest.param("pair", marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_save_it_ends_the_same(ask: Ask, tmp_path: Path, game: str) -> None:
    whole = ask(tmp_path / "whole", game=game, changes=ADAPTER)
    assert whole["signal"] == 0
    expected = _learned(tmp_path / "whole")
    assert len(expected["adapters"]) == (1 if game == "letters" else 2)

    def nth_event(of: str) -> int:
        """In the middle of those that have it in their name."""
        events = [number for number, event in enumerate(whole["events"], start=1) if of in event]
        return events[len(events) // 2]

    killed = tmp_path / "killed"
    assert ask(killed, game=game, changes=ADAPTER, die_at_event=nth_event("step-000006.tmp"))["signal"] == 9
    assert ask(killed, game=game, changes=ADAPTER)["signal"] == 0
    assert _learned(killed) == expected
    if game == "letters":
        killed = tmp_path / "killed at the end"
        assert ask(killed, game=game, changes=ADAPTER, die_at_event=nth_event(".adapter"))["signal"] == 9
        assert not (killed / "adapter").exists()
        assert ask(killed, game=game, changes=ADAPTER)["signal"] == 0
        assert _learned(killed) == expected


def test_an_adapter_beside_random_weights_is_made_and_remarked_on(
    letters: ModuleType, finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_initial_models(letters.make_trainer(tmp_path / "run", ADAPTER).config, tmp_path / "run")
    assert "builtin:tiny has random" in caplog.text
    caplog.clear()
    trained = {**ADAPTER, "model": {"path": str(finished / "model")}}
    create_initial_models(letters.make_trainer(tmp_path / "run", trained).config, tmp_path / "run")
    create_initial_models(letters.make_trainer(tmp_path / "run").config, tmp_path / "run")
    assert caplog.text == ""


# ---- what is refused ---------------------------------------------------------------------------------------


def test_a_layer_that_the_model_does_not_have_is_named_with_those_it_has(
    letters: ModuleType, tmp_path: Path
) -> None:
    changes = {"lora": {"rank": 4, "targets": ["q_proj", "query"]}}
    with pytest.raises(ConfigError, match=r"`lora\.targets` has 'query'.*down_proj, gate_proj.*v_proj"):
        letters.make_trainer(tmp_path / "run", changes).train()


def test_moments_in_8_bits_are_refused_where_every_matrix_is_too_small_for_them(
    letters: ModuleType, tmp_path: Path
) -> None:
    changes = {"lora": {"rank": 1}, "optimizer": {"name": "adamw8bit"}}
    with pytest.raises(ConfigError, match=r"adamw8bit.* 4,096 entries"):
        letters.make_trainer(tmp_path / "run", changes).train()
    row = {"prompt": "A", "completion": "B"}
    with pytest.raises(ConfigError, match=r"adamw8bit.* 4,096 entries"):
        AgentSFTTrainer({**changes, "threads": 1}, train_dataset=[row], output=tmp_path / "sft").train()
