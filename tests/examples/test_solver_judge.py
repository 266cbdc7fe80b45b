"""The solver-judge example, a few steps long: both roles learn, and a frozen judge stays what it was."""

import json
import runpy
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
MAX_LINES = 185
SHORT = {
    "threads": 1,
    "steps": 2,
    "rollout": {"tasks_per_step": 6, "group_size": 8},
    "warm_start": {"steps": 30, "episodes_per_step": 32, "learning_rate": 1e-2, "noise": 0.5},
    "evaluation": {"num_tasks": 16},
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
    assert len(episodes) == 2 * 6 * 8
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


def test_the_measurement_asks_both_roles_the_same_questions_before_and_after(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure.py", str(finished)])
    runpy.run_path(str(EXAMPLE / "measure.py"), run_name="__main__")
    found = json.loads((finished / "measured.json").read_text())
    for role in ("solver", "judge"):
        for way in ("sampled", "greedy"):
            before, after = (found[when][role][way] for when in ("imitation", "reinforcement"))
            assert before["asked"] == after["asked"]
            assert 0.0 <= after["low"] <= after["share"] <= after["high"] <= 1.0
    assert found["imitation"]["solver"]["greedy"]["asked"] == 16
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


def test_both_experts_know_the_answer_and_follow_their_habit_as_often_as_they_are_told(
    example: ModuleType,
) -> None:
    tasks = example.tasks("train")[:800]

    def right(noise: float) -> dict[str, float]:
        rng = np.random.default_rng(0)
        graded: dict[str, list[bool]] = {"solver": [], "judge": []}
        for task in tasks:
            for role, [(asked, answer)] in example.experts(task, noise, rng):
                if role == "judge":
                    answer = asked[0]["content"].split(f"{answer}: ")[1].split("\n")[0]
                graded[role].append(example.is_right(task, answer))
        return {role: sum(each) / len(each) for role, each in graded.items()}

    # A quarter of the targets are sums. A third of the other pairs have a sum that is wrong.
    assert right(0.0) == {"solver": 1.0, "judge": 1.0}
    assert right(1.0) == pytest.approx({"solver": 0.25, "judge": 0.75}, abs=0.05)
    assert right(0.5) == pytest.approx({"solver": 0.625, "judge": 0.875}, abs=0.05)


def test_no_answer_is_right_more_often_and_no_two_splits_share_a_pair_of_numbers(example: ModuleType) -> None:
    pairs: dict[str, set[tuple[int, ...]]] = {}
    for split in ("train", "validation", "test"):
        tasks = example.tasks(split)
        assert len({example.identity(task) for task in tasks[:512]}) == 512
        assert len({(*task["numbers"], task["target"]) for task in tasks}) == len(tasks) > 1000
        returns = example.baselines(tasks)
        constant = [np.mean(returns[name]) for name in returns if name.startswith("always")]
        assert constant == [0.25] * 4
        pairs[split] = {tuple(task["numbers"]) for task in tasks}
    assert not pairs["train"] & pairs["test"]
    assert not pairs["validation"] & pairs["test"]
    assert not pairs["train"] & pairs["validation"]


def test_exactly_one_of_the_four_answers_is_right(example: ModuleType) -> None:
    for task in example.tasks("validation")[:200]:
        answers = {name: example.answer_of(task, name) for name in example.FORMS}
        assert [name for name, answer in answers.items() if example.is_right(task, answer)] == [
            example.kind(task)
        ]


def test_the_example_is_short() -> None:
    for path in EXAMPLE.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
