from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rllm.config.loader import load_config
from rllm.models.directory import load_model
from rllm.store.episodes import EpisodeStore
from rllm.trainer.learning import learn
from rllm.trainer.schedules import learning_rate
from rllm.types.episode import Episode, Outcome, Step, Trajectory

Make = Callable[..., Any]


def test_the_learning_rate_warms_up_and_falls_in_a_line_to_its_last_fraction() -> None:
    config = load_config(
        {"steps": 11, "optimizer": {"learning_rate": 1.0, "warmup_steps": 3, "final_lr_fraction": 0.1}}
    )
    rates = [learning_rate(config, step) for step in range(11)]
    assert rates[:3] == [0.25, 0.5, 0.75]
    assert rates[3:] == pytest.approx([1.0 - 0.9 * step / 10 for step in range(3, 11)])
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(load_config({"steps": 1}), 0) == 1e-3


@pytest.fixture(scope="module")
def episodes(letters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    """Two groups of ten attempts, sampled from the untrained model."""
    run = tmp_path_factory.mktemp("runs") / "run"
    changes = {"steps": 1, "warm_start": {"steps": 0}, "rollout": {"group_size": 10, "tasks_per_step": 2}}
    letters.make_trainer(run, changes).train()
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        return list(store.episodes("train", 0))


@pytest.fixture
def learned(letters: ModuleType, tiny_directory: Path, tmp_path: Path) -> Make:
    """Metrics and weights after `learn` on some episodes, always from the same weights."""

    def learn_from(episodes: list[Episode]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        trainer = letters.make_trainer(tmp_path, {"rollout": {"tasks_per_step": 2}})
        learner = trainer.make_learner({"policy": load_model(tiny_directory)})
        _, metrics = learn(learner, episodes, 0)
        (policy,) = learner.policies.values()
        return metrics, [each.detach() for each in policy.loaded.model.parameters()]

    return learn_from


def _failed(task_id: str, attempt: int, outcome: Outcome) -> Episode:
    """A failure after one answer, with tokens that nobody may learn from."""
    step = Step(prompt_ids=[5, 6], response_ids=[7, 8], logprobs=[-1.0, -1.0], policy_versions=[0, 0])
    trajectory = Trajectory(steps=[step], reward=None, outcome=outcome)
    return Episode(task_id=task_id, rollout_idx=attempt, trajectories=[trajectory], outcome=outcome)


def test_a_third_of_infrastructure_failures_changes_no_bit_of_what_is_learned(
    episodes: list[Episode], learned: Make
) -> None:
    metrics, weights = learned(episodes)
    task_ids = sorted({episode.task_id for episode in episodes})
    failures = [
        _failed(task_ids[index % 2], 100 + index, Outcome.INFRASTRUCTURE_FAILURE) for index in range(8)
    ]
    mixed = [*failures[:3], *episodes, *failures[3:]]
    other_metrics, other_weights = learned(mixed)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, other_weights, strict=True))
    for name in ("loss", "grad_norm", "reward_mean", "success", "groups", "tokens.trained"):
        assert metrics[name] == other_metrics[name]
    assert (metrics["failed"], other_metrics["failed"]) == (0, 8)
    assert other_metrics["tokens.dropped.failed"] == 16


def test_the_order_of_arrival_changes_no_bit_of_what_is_learned(
    episodes: list[Episode], learned: Make
) -> None:
    _, weights = learned(episodes)
    _, other_weights = learned(episodes[::-1])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, other_weights, strict=True))


def test_the_first_update_sees_the_weights_that_sampled(episodes: list[Episode], learned: Make) -> None:
    metrics, _ = learned(episodes)
    assert metrics["loss"] != 0.0
    assert metrics["clipped_frac"] < 1.0


def test_a_step_in_which_everything_failed_learns_nothing_and_says_so(learned: Make) -> None:
    metrics, _ = learned([_failed("t", attempt, Outcome.INFRASTRUCTURE_FAILURE) for attempt in range(4)])
    assert (metrics["episodes"], metrics["failed"], metrics["groups"]) == (4, 4, 0)
    assert "loss" not in metrics
    assert metrics["success"] == 0.0
