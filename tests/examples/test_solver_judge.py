"""The solver-judge example, a few steps long: both roles learn, and a frozen judge stays what it was."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rllm.models.directory import load_model, parameters_sha256
from rllm.store.episodes import EpisodeStore
from rllm.types.episode import Outcome

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "solver_judge"
MAX_LINES = 150
SHORT = {
    "threads": 1,
    "steps": 2,
    "rollout": {"tasks_per_step": 8, "group_size": 8},
    "warm_start": {"steps": 30, "episodes_per_step": 32, "learning_rate": 1e-2, "noise": 0.5},
    "evaluation": {"num_tasks": 32},
}
"""Long enough for a few right answers by luck: without any, there is nothing to learn from."""


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example as its own directory sees it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield import_module("solver_judge")
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def finished(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of the example, a few steps long."""
    output = tmp_path_factory.mktemp("runs") / "short"
    example.train(output, {**example.CONFIG, **SHORT})
    return output


def hashes(run: Path) -> dict[str, str]:
    """SHA-256 of the parameters of each role's model at the end of a run."""
    models = {role: load_model(run / "models" / role).model for role in ("solver", "judge")}
    return {role: parameters_sha256(model.state_dict_hf()) for role, model in models.items()}


def test_both_roles_learn_in_both_phases(finished: Path) -> None:
    made = {role: finished / "imitation" / "initial_models" / role for role in ("solver", "judge")}
    untrained = {
        role: parameters_sha256(load_model(path).model.state_dict_hf()) for role, path in made.items()
    }
    stages = [untrained, hashes(finished / "imitation"), hashes(finished / "reinforcement")]
    for role in ("solver", "judge"):
        assert len({stage[role] for stage in stages}) == 3
    assert untrained["solver"] != untrained["judge"]


def test_every_answer_is_a_trajectory_of_its_role_and_the_judge_is_paid_for_beating_a_coin(
    finished: Path, example: ModuleType
) -> None:
    with EpisodeStore.open(finished / "reinforcement" / "store.sqlite", read_only=True) as store:
        episodes = list(store.episodes("train"))
    assert len(episodes) == 2 * 8 * 8
    for episode in episodes:
        assert episode.outcome is Outcome.SCORED
        first, second, judge = episode.trajectories
        assert [each.name for each in episode.trajectories] == ["solver", "solver", "judge"]
        paid = [float(example.is_right(episode.task, each.output)) for each in (first, second)]
        assert [first.reward, second.reward] == paid
        picked = paid[[first.output, second.output].index(judge.output)] if judge.output is not None else 0.0
        assert judge.reward == pytest.approx(picked - sum(paid) / 2)


def test_the_measurement_asks_both_roles_the_same_questions_before_and_after(finished: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE / "measure.py", finished], check=True, timeout=120)
    found = json.loads((finished / "measured.json").read_text())
    for role in ("solver", "judge"):
        for way in ("sampled", "greedy"):
            before, after = (found[when][role][way] for when in ("imitation", "reinforcement"))
            assert before["asked"] == after["asked"]
            assert 0.0 <= after["low"] <= after["share"] <= after["high"] <= 1.0
    assert found["imitation"]["solver"]["greedy"]["asked"] == 32
    assert (finished / "curves.png").stat().st_size > 1000


def test_a_frozen_judge_plays_and_its_parameters_do_not_change(
    example: ModuleType, finished: Path, tmp_path: Path
) -> None:
    models = finished / "imitation" / "models"
    policies = {
        "solver": {"path": str(models / "solver")},
        "judge": {"path": str(models / "judge"), "trainable": False},
    }
    config = {**example.CONFIG, **SHORT, "policies": policies, "warm_start": {"steps": 0}}
    example.trainer(tmp_path / "frozen", config).train()
    before, after = hashes(finished / "imitation"), hashes(tmp_path / "frozen")
    assert after["judge"] == before["judge"]
    assert after["solver"] != before["solver"]
    with EpisodeStore.open(tmp_path / "frozen" / "store.sqlite", read_only=True) as store:
        judges = [episode.trajectories[-1] for episode in store.episodes("train")]
    assert any(judge.reward for judge in judges)  # there was something that it would have learned from


def test_the_experts_err_as_often_as_they_are_told(example: ModuleType) -> None:
    tasks = example.countdown_tasks("train", 300, **example.PROBLEMS)

    def right(noise: float) -> dict[str, float]:
        rng = np.random.default_rng(0)
        counts = {"solver": 0, "judge": 0}
        for task in tasks:
            (_, [(_, answer)]), (_, [(asked, pick)]) = example.experts(task, noise, rng)
            chosen = asked[0]["content"].split(f"{pick}: ")[1].split("\n")[0]
            counts["solver"] += example.is_right(task, answer)
            counts["judge"] += example.is_right(task, chosen)
        return {role: count / len(tasks) for role, count in counts.items()}

    assert right(0.0) == {"solver": 1.0, "judge": 1.0}
    assert 0.4 < right(1.0)["judge"] < 0.6
    assert right(1.0)["solver"] < 0.4
    assert 0.65 < right(0.5)["judge"] < 0.85


def test_the_example_is_short() -> None:
    for path in EXAMPLE.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
