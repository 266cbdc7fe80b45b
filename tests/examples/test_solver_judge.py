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


def test_the_judge_is_asked_in_both_orders_and_paid_for_beating_a_coin(
    finished: Path, example: ModuleType
) -> None:
    with EpisodeStore.open(finished / "reinforcement" / "store.sqlite", read_only=True) as store:
        episodes = list(store.episodes("train"))
    assert len(episodes) == 2 * 8 * 8
    for episode in episodes:
        assert episode.outcome is Outcome.SCORED
        solvers, judges = episode.trajectories[:2], episode.trajectories[2:]
        assert [each.name for each in episode.trajectories] == ["solver", "solver", "judge", "judge"]
        paid = [float(example.is_right(episode.task, each.output)) for each in solvers]
        assert [each.reward for each in solvers] == paid
        given = [each.output for each in solvers]
        for judge, pair in zip(judges, (given, given[::-1]), strict=True):
            assert judge.steps[0].chat_completions[0] == example.to_judge(episode.task, pair)[0]
            letter = judge.steps[0].model_response
            chosen = pair["AB".index(letter)] if letter in ("A", "B") else None
            assert judge.output == chosen
            worth = 0.0 if chosen is None else float(example.is_right(episode.task, chosen))
            assert judge.reward == pytest.approx(worth - sum(paid) / 2)
        if [each.steps[0].model_response for each in judges] in (["A", "A"], ["B", "B"]):
            assert sum(each.reward or 0.0 for each in judges) == pytest.approx(0.0)


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
        judges = [each for episode in store.episodes("train") for each in episode.trajectories[2:]]
    assert any(judge.reward for judge in judges)  # there was something that it would have learned from


def test_the_solver_errs_as_often_as_it_is_told_and_the_judge_by_liking_sums(example: ModuleType) -> None:
    tasks = example.tasks("train")[:600]

    def right(noise: float) -> dict[str, float]:
        rng = np.random.default_rng(0)
        graded: dict[str, list[bool]] = {"solver": [], "judge": []}
        for task in tasks:
            for role, [(asked, answer)] in example.experts(task, noise, rng):
                if role == "judge":
                    answer = asked[0]["content"].split(f"{answer}: ")[1].split("\n")[0]
                graded[role].append(example.is_right(task, answer))
        return {role: sum(each) / len(each) for role, each in graded.items()}

    fond = 0.5 + 0.5 * 0.3  # always where the target is the sum, three times in ten where it is not
    assert right(0.0) == pytest.approx({"solver": 1.0, "judge": fond}, abs=0.06)
    assert right(0.5) == pytest.approx({"solver": 0.75, "judge": fond}, abs=0.06)
    assert right(1.0) == pytest.approx({"solver": 0.5, "judge": fond}, abs=0.06)


def test_neither_sign_is_right_more_often_and_no_test_problem_is_a_training_problem(
    example: ModuleType,
) -> None:
    seen: dict[str, set[tuple[int, ...]]] = {}
    for split in ("train", "test"):
        tasks = example.tasks(split)[:512]
        assert len(tasks) == 512
        assert sum(task["target"] == sum(task["numbers"]) for task in tasks) == 256
        assert all(first >= second for first, second in (task["numbers"] for task in tasks))
        seen[split] = {(*task["numbers"], task["target"]) for task in tasks}
        assert len(seen[split]) == 512
    assert not seen["train"] & seen["test"]


def test_the_example_is_short() -> None:
    for path in EXAMPLE.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
