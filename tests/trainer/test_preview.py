"""The preview of a run: its first step, measured, with nothing kept."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm import AgentTrainer
from rllm.errors import ConfigError
from rllm.store.episodes import EpisodeStore
from rllm.trainer.preview import Preview, answers, preview
from rllm.types.episode import Episode, Outcome, Trajectory

EIGHT = {"tasks_per_step": 4, "group_size": 8}


def make_trainer(letters: ModuleType, run: Path, **changes: Any) -> AgentTrainer:
    return letters.make_trainer(run, {"warm_start": {"steps": 0}, **changes}, demonstrate=None)


@pytest.fixture(scope="module")
def measured(letters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Preview:
    return preview(make_trainer(letters, tmp_path_factory.mktemp("runs") / "run").run)


def test_attempts_are_those_of_the_first_step_of_the_run(letters: ModuleType, tmp_path: Path) -> None:
    shown = preview(make_trainer(letters, tmp_path / "run", rollout=EIGHT).run)
    assert list(tmp_path.iterdir()) == [], "nothing is kept"
    make_trainer(letters, tmp_path / "run", rollout=EIGHT, steps=1).train()
    with EpisodeStore.open(tmp_path / "run" / "store.sqlite", read_only=True) as store:
        played = {(episode.task_id, episode.rollout_idx): episode for episode in store.episodes("train")}
    assert len(shown.episodes) == 32
    for episode in shown.episodes:
        first = played[episode.task_id, episode.rollout_idx]
        assert answers(episode) == answers(first)
        assert episode.reward == first.reward


def test_eight_attempts_are_played_whatever_the_group_size_of_the_run(measured: Preview) -> None:
    assert [len(attempts) for attempts in measured.groups().values()] == [8, 8]
    assert measured.config.rollout.group_size == 3, "the run keeps its own"


def test_costs_are_those_of_a_step_of_the_run(measured: Preview) -> None:
    costs, share = measured.costs(), 2 * 3 / 16
    assert costs["step_tokens"] == round(share * measured.metrics["tokens.sampled"])
    assert costs["step_s"] == pytest.approx(share * (measured.sampling_s + measured.learning_s))
    # Before and after: sampled and greedy, 4 tasks each; in between twice: sampled and greedy, 2 tasks each.
    evaluated_s = (2 * 2 * 4 + 2 * 2 * 2) / 16 * measured.sampling_s
    assert costs["run_s"] == pytest.approx(4 * costs["step_s"] + evaluated_s)
    assert measured.peak_bytes > 1e8


def test_the_update_is_measured(measured: Preview) -> None:
    assert measured.metrics["update_kl"] > 0.0
    assert measured.metrics["policy_entropy"] > 1.0


def with_rewards(of: Preview, rewards: list[list[float]], **changes: Any) -> Preview:
    """The preview of a run whose attempts got these rewards; an attempt with reward 1 succeeds."""
    episodes = [
        Episode(
            task_id=f"task-{task}",
            rollout_idx=attempt,
            trajectories=[Trajectory(reward=reward)],
            is_correct=reward == 1.0,
            outcome=Outcome.SCORED,
        )
        for task, attempts in enumerate(rewards)
        for attempt, reward in enumerate(attempts)
    ]
    return replace(of, episodes=episodes, **changes)


MIXED, FAILED, SOLVED = [1.0] + [0.0] * 7, [0.0] * 8, [1.0] * 8


@pytest.mark.parametrize(
    ("rewards", "level", "words"),
    [
        ([FAILED] * 8, "bad", "will not learn: all attempts at a task got the same reward, at each of 8"),
        ([SOLVED] * 8, "warning", "little to learn: 100%"),
        ([MIXED] + [FAILED] * 7, "warning", "slowly: the attempts at only 1 of 8 tasks"),
        ([MIXED] * 5 + [FAILED] * 3, "good", "can learn: the attempts at 5 of 8 tasks"),
        ([FAILED] * 4 + [[0.5] * 8] * 4, "bad", "will not learn"),
    ],
)
def test_one_sentence_says_whether_the_run_will_learn(
    measured: Preview, rewards: list[list[float]], level: str, words: str
) -> None:
    shown = with_rewards(measured, rewards)
    assert shown.verdict()[0] == level
    assert words in shown.verdict()[1]
    assert shown.facts()["verdict"] == level


def test_an_estimator_that_compares_no_attempts_learns_from_any_difference(measured: Preview) -> None:
    algorithm = replace(measured.config.algorithm, estimator="reinforce")
    config = replace(measured.config, algorithm=algorithm)
    shown = with_rewards(measured, [FAILED] * 4 + [[0.5] * 8] * 4, config=config)
    assert shown.verdict()[0] == "good"


def test_a_run_with_a_warm_start_is_not_judged_by_the_model_before_it(measured: Preview) -> None:
    warm_start = replace(measured.config.warm_start, steps=80)
    shown = with_rewards(measured, [FAILED] * 8, config=replace(measured.config, warm_start=warm_start))
    assert "80 steps" in shown.verdict()[1]


def test_pass_at_k_is_of_the_attempts_that_did_not_fail(measured: Preview) -> None:
    shown = with_rewards(measured, [MIXED, FAILED])
    assert shown.pass_rate(1) == pytest.approx(1 / 16)
    assert shown.pass_rate(8) == 0.5
    shown.episodes[0].outcome = Outcome.INFRASTRUCTURE_FAILURE  # the only success
    assert shown.pass_rate(1) == 0.0
    assert shown.pass_rate(8) == 0.0, "the other task has eight"
    assert shown.num_with_signal == 0


def test_a_run_with_a_teacher_is_refused(letters: ModuleType, tmp_path: Path) -> None:
    run = make_trainer(letters, tmp_path / "run").run
    run.config.distill.teacher = "somewhere"
    with pytest.raises(ConfigError, match=r"distill.teacher.*Leave --preview out"):
        preview(run)
