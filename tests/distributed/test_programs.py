"""A program behind the gateway is trained on several ranks as on one: each plays its share of the tasks."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file

from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.distribution import require_distributed

Ranks = Callable[..., list[dict[str, Any]]]
RequireAllWell = Callable[[list[dict[str, Any]]], None]


def test_two_ranks_train_a_program_as_one_does_each_behind_a_gateway_of_its_own(
    ranks: Ranks,
    require_all_well: RequireAllWell,
    words_program: ModuleType,
    smallest_model: Path,
    tmp_path: Path,
) -> None:
    words_program.main(tmp_path / "alone", smallest_model, tmp_path / "calls-alone")
    require_all_well(ranks("words", [tmp_path / "shared", smallest_model, tmp_path / "calls-shared"], 2))

    alone, shared = (RunDirectory.read(tmp_path / name) for name in ("alone", "shared"))
    assert sampled(shared) == sampled(alone)
    for mine, theirs in zip(read_metrics(alone.metrics_path), read_metrics(shared.metrics_path), strict=True):
        for name in ("episodes", "failed", "groups", "calls", "unclaimed_calls", "tokens.trained"):
            assert theirs.get(name) == mine.get(name), (mine["phase"], mine["step"], name)
    mine, theirs = (load_file(run.model_path / "model.safetensors") for run in (alone, shared))
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-4
    files = [
        sorted(str(each.relative_to(run.path)) for each in run.path.rglob("*")) for run in (alone, shared)
    ]
    assert files[0] == files[1], "nothing is left of either gateway"

    calls = [json.loads(line) for line in (tmp_path / "calls-shared").read_text().splitlines()]
    assert len({call["process"] for call in calls}) == len({call["host"] for call in calls}) == 2
    places = {(call["process"], call["host"]) for call in calls}
    assert len(places) == 2, "a program calls the gateway of its own process"


def sampled(run: RunDirectory) -> list[Any]:
    """What the policy wrote in every episode of a run, and with which weights."""
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        return sorted(
            (
                phase,
                episode.task_id,
                episode.rollout_idx,
                [(step.response_ids, step.policy_versions) for step in episode.trajectories[0].steps],
                episode.reward,
            )
            for phase in store.phases()
            for episode in store.episodes(phase)
        )


def test_a_program_that_may_be_silent_for_longer_than_a_rank_is_refused() -> None:
    slow = load_config(["distributed.timeout_s=300", "rollout.episode_timeout_s=290"])
    with pytest.raises(ConfigError, match=r"`distributed\.timeout_s` is 300.*more than 320"):
        require_distributed(slow, 2, is_program=True)
    require_distributed(slow, 2, is_program=False)  # whose turns are signs of life
