import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rllm.build.training import build_run
from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.inference.local.engine import LocalEngine
from rllm.models.directory import parameters_sha256
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.replay import ReplayDifference, replay


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy that may be tampered with."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a replay needs no engine")

    monkeypatch.setattr(LocalEngine, "__init__", refuse)


def _contents(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and not path.name.startswith("store.sqlite-")  # SQLite's own, for readers
    }


@pytest.mark.usefixtures("no_engine")
def test_a_stored_run_replays_without_an_engine_to_the_same_losses_and_parameters(
    letters: ModuleType, run: Path
) -> None:
    before = _contents(run)
    result = replay(letters.make_trainer(run).run)
    assert result.differences == []
    assert result.recorded_sha256 == result.replayed_sha256
    assert result.is_identical
    assert (result.num_warm_steps, result.num_train_steps) == (4, 4)
    losses = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 8
    assert result.num_compared > 8 * 2
    assert _contents(run) == before


PPO: dict[str, Any] = {
    "algorithm": {
        "estimator": "gae",
        "kl_coef": 0.05,
        "kl_in": "reward",
        "kl_kind": "k1",
        "kl_target": 0.01,
        "old_logprobs": "trainer",
        "correction": "truncate",
    },
    "critic": {"trunk": "separate", "warmup_steps": 1},
    "filters": {"dynamic": True, "max_rounds": 3},
}
REMAX: dict[str, Any] = {
    "algorithm": {"estimator": "remax", "kl_coef": 0.05, "kl_target": 0.01, "credit": "turn"},
    "filters": {"min_reward_std": 0.1, "overlong_buffer": 1},
}


@pytest.mark.parametrize("changes", [PPO, REMAX], ids=["ppo", "remax"])
def test_critics_references_rounds_and_greedy_attempts_come_to_the_same_again(
    letters: ModuleType, tmp_path: Path, changes: dict[str, Any]
) -> None:
    short = letters.merged(changes, {"evaluation": {"num_tasks": 1, "every_steps": 0}})
    letters.make_trainer(tmp_path / "run", short).train()
    result = replay(letters.make_trainer(tmp_path / "run", short).run)
    assert result.differences == []
    assert result.is_identical
    compared = {name for line in read_metrics(tmp_path / "run" / "metrics.jsonl") for name in line}
    wanted = {"divergence", "kl_coef", "groups_rejected"}
    wanted |= {"critic.loss", "corrected_frac"} if changes is PPO else {"tokens.dropped.greedy"}
    assert wanted <= compared


def test_policies_with_a_critic_and_a_reference_of_their_own_come_to_the_same_again(
    letters: ModuleType, tmp_path: Path
) -> None:
    changes = {
        "steps": 2,
        "algorithm": {"estimator": "gae", "kl_coef": 0.05, "kl_target": 0.01},
        "critic": {"trunk": "separate"},
        "evaluation": {"num_tasks": 1, "every_steps": 0},
    }
    letters.make_pair_trainer(tmp_path / "run", changes).train()
    result = replay(letters.make_pair_trainer(tmp_path / "run", changes).run)
    assert result.differences == []
    assert result.is_identical
    (newest,) = (tmp_path / "run" / "checkpoints").glob("step-000006")
    for policy in ("solver", "judge"):
        assert (newest / policy / "critic" / "weights.safetensors").is_file()
    state = json.loads((newest / "state.json").read_text())
    assert set(state["kl_coefs"]) == {"solver", "judge"}
    assert state["curriculum"]["cursor"] == 4


def _edit_metrics(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_loss_that_was_recorded_otherwise_is_named(letters: ModuleType, run: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        if (line["phase"], line["step"]) == ("warm_start", 1):
            line["loss"] = 0.5
        if (line["phase"], line["step"]) == ("train", 2):
            del line["loss"]

    _edit_metrics(run, change)
    result = replay(letters.make_trainer(run).run)
    assert [(each.phase, each.step, each.metric, each.recorded) for each in result.differences] == [
        ("warm_start", 1, "loss", 0.5),
        ("train", 2, "loss", None),
    ]
    assert all(isinstance(each, ReplayDifference) and each.replayed > 0 for each in result.differences[:1])
    assert not result.is_identical
    assert result.recorded_sha256 == result.replayed_sha256


def test_an_episode_that_was_changed_leads_another_way_from_its_step_on(
    letters: ModuleType, run: Path
) -> None:
    with EpisodeStore.open(run / "store.sqlite") as store:
        episodes = list(store.episodes("train", 1))
        assert episodes[0].trajectories[0].reward is not None
        episodes[0].trajectories[0].reward += 0.25
        store.save_episodes("train", 1, episodes)
    result = replay(letters.make_trainer(run).run)
    assert min(each.step for each in result.differences if each.phase == "train") == 1
    assert all(each.phase == "train" for each in result.differences)
    assert result.recorded_sha256 != result.replayed_sha256


def test_a_model_that_is_not_the_runs_own_is_found_out_by_one_bit(letters: ModuleType, run: Path) -> None:
    path = run / "model" / "model.safetensors"
    weights = load_file(path)
    name = sorted(weights)[0]
    flat = weights[name].view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(9.0))
    save_file(weights, path, metadata={"format": "pt"})
    result = replay(letters.make_trainer(run).run)
    assert result.differences == []
    assert not result.is_identical


def test_another_configuration_is_another_run(letters: ModuleType, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        replay(letters.make_trainer(run, {"optimizer": {"learning_rate": 0.5}}).run)


def test_a_warm_start_on_other_tasks_is_refused_and_not_called_different(
    letters: ModuleType, run: Path
) -> None:
    with pytest.raises(ConfigError, match="other tasks"):
        replay(letters.make_trainer(run, train_dataset=letters.TASKS[:4]).run)
    with pytest.raises(ConfigError, match="other tasks"):  # as `rllm runs replay` makes it
        replay(build_run(load_config(RunDirectory.read(run).config()), run))


def test_a_run_that_has_not_finished_has_nothing_to_compare_with(letters: ModuleType, run: Path) -> None:
    (run / "summary.json").unlink()
    with pytest.raises(ConfigError, match="has not finished"):
        replay(letters.make_trainer(run).run)


def test_a_hash_follows_from_names_types_shapes_and_bytes() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, dtype=torch.bfloat16)}
    same = {"b": weights["b"].clone(), "a": weights["a"].t().contiguous().t()}
    assert parameters_sha256(weights) == parameters_sha256(same)
    others: list[dict[str, torch.Tensor]] = [
        {"a": weights["a"]},
        {**weights, "a": weights["a"].view(3, 2)},
        {**weights, "a": weights["a"].double()},
        {**weights, "a": -weights["a"]},
        {"A": weights["a"], "b": weights["b"]},
    ]
    assert len({parameters_sha256(each) for each in [weights, *others]}) == 6
