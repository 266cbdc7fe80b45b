from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rllm.algorithms.task_sampler import TaskSampler
from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.models.directory import load_model
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.learning import learn
from rllm.trainer.replay import replay
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
    one_step = load_config({"steps": 1, "optimizer": {"learning_rate": 1.0, "warmup_steps": 0}})
    assert learning_rate(one_step, 0) == 1.0


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
        learner = trainer.run.make_learner({"policy": load_model(tiny_directory)})
        _, metrics = learn(learner, episodes, 0)
        (policy,) = learner.policies.values()
        return metrics, [each.detach() for each in policy.loaded_model.model.parameters()]

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


# ---- which tasks a step takes, and what is sampled at them -----------------------------------------------


def _tied_letters(letters: ModuleType, alike: str) -> type[Any]:
    """The game with some letters whose tasks pay every attempt the same."""

    class Tied(letters.LetterEnv):
        def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
            observation, reward, over, info = super().step(action)
            return observation, 0.5 if over and self.letter in alike else reward, over, info

        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Tied":
            return Tied(info["letter"])

    return Tied


def _lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]


def _tasks_by_step(run: Path, steps: int) -> list[set[str]]:
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        return [{each.task_id for each in store.episodes("train", step)} for step in range(steps)]


DYNAMIC: dict[str, Any] = {
    "steps": 3,
    "warm_start": {"steps": 0},
    "rollout": {"group_size": 8, "tasks_per_step": 2, "num_parallel": 32},
    "inference": {"num_slots": 32},
    "evaluation": {"num_tasks": 1, "every_steps": 0},
    "filters": {"dynamic": True, "max_rounds": 4},
}


def test_tied_groups_are_replaced_by_groups_at_the_next_tasks_and_no_task_is_lost(
    letters: ModuleType, tmp_path: Path
) -> None:
    trainer = letters.make_trainer(tmp_path, DYNAMIC, env_class=_tied_letters(letters, "ACEG"))
    trainer.train()
    lines, tasks = _lines(tmp_path), _tasks_by_step(tmp_path, 3)
    for line, taken in zip(lines, tasks, strict=True):
        assert line["tasks"] == len(taken) == line["groups"] + line["groups_rejected"]
        assert line["groups"] == 2 or line["rounds"] == 4
        assert line["groups_tied"] == 0
        counts = {name: line[name] for name in line if name.startswith("tokens.")}
        assert counts.pop("tokens.sampled") == sum(counts.values())
        assert (counts.get("tokens.dropped.no_signal", 0) > 0) == (line["groups_rejected"] > 0)
    assert sum(line["groups_rejected"] for line in lines) > 0
    order = TaskSampler(letters.TASKS, seed=5, purpose="tasks").batch(0, sum(map(len, tasks)))
    issued = iter(task["task_id"] for task in order)
    assert tasks == [{next(issued) for _ in taken} for taken in tasks]


def test_a_step_in_which_everything_ties_makes_do_after_its_last_round(
    letters: ModuleType, tmp_path: Path
) -> None:
    changes = letters.merged(DYNAMIC, {"steps": 1, "filters": {"max_rounds": 2}})
    trainer = letters.make_trainer(tmp_path, changes, env_class=_tied_letters(letters, "ABCDEFGH"))
    trainer.train()
    (line,) = _lines(tmp_path)
    assert (line["rounds"], line["tasks"], line["groups"], line["groups_rejected"]) == (2, 4, 0, 4)
    assert line["tokens.trained"] == 0
    assert "loss" not in line


def test_tasks_without_an_id_are_told_apart_over_several_rounds(letters: ModuleType, tmp_path: Path) -> None:
    nameless = [{"letter": task["letter"]} for task in letters.TASKS]
    changes = letters.merged(DYNAMIC, {"steps": 1})
    trainer = letters.make_trainer(
        tmp_path, changes, env_class=_tied_letters(letters, "ABCDEFGH"), train_dataset=nameless
    )
    trainer.train()
    assert _tasks_by_step(tmp_path, 1) == [set(map(str, range(8)))]


def _stored(run: Path, step: int) -> dict[str, list[Episode]]:
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        by_task: dict[str, list[Episode]] = {}
        for episode in store.episodes("train", step):
            by_task.setdefault(episode.task_id, []).append(episode)
    return by_task


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_group_whose_first_attempts_are_solved_alike_is_not_played_on(
    letters: ModuleType, tmp_path: Path, dynamic: bool
) -> None:
    filters = {"filters": {"dynamic": dynamic, "first_attempts": 2, "max_rounds": 3 if dynamic else 4}}
    changes = letters.merged(letters.merged(DYNAMIC, {"rollout": {"tasks_per_step": 4}}), filters)
    tied = _tied_letters(letters, "ACEG")
    nameless = [{"letter": task["letter"]} for task in letters.TASKS]
    letters.make_trainer(tmp_path, changes, env_class=tied, train_dataset=nameless).train()
    stopped = 0
    for line in _lines(tmp_path):
        groups = _stored(tmp_path, line["step"])
        for attempts in groups.values():
            first = [each.trajectories[0].reward or 0.0 for each in attempts[:2]]
            is_solved = first[0] == first[1] > 0.0
            assert [each.rollout_idx for each in attempts] == list(range(2 if is_solved else 8))
            stopped += is_solved
        assert line["tasks"] * 8 == line["episodes"] + line["attempts_not_played"]
        assert line["attempts_not_played"] == 6 * line["tasks_solved_first"]
        assert line["groups"] + line["groups_rejected"] == line["tasks"] == len(groups)
    assert stopped >= 4
    result = replay(letters.make_trainer(tmp_path, changes, env_class=tied, train_dataset=nameless).run)
    assert result.is_identical, result.differences


def test_the_rest_of_a_group_is_what_it_would_have_been_had_it_been_played_at_once(
    letters: ModuleType, tmp_path: Path
) -> None:
    for name, filters in (("whole", {}), ("first", {"first_attempts": 2})):
        changes = letters.merged(
            DYNAMIC, {"steps": 1, "filters": {"dynamic": False, "max_rounds": 4} | filters}
        )
        letters.make_trainer(tmp_path / name, changes).train()
    whole, first = (_stored(tmp_path / name, 0) for name in ("whole", "first"))
    assert any(len(attempts) == 8 for attempts in first.values())
    for task_id, attempts in first.items():
        for mine, theirs in zip(attempts, whole[task_id], strict=False):
            for one, other in zip(mine.trajectories[0].steps, theirs.trajectories[0].steps, strict=True):
                assert one.response_ids == other.response_ids
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_workflow_of_two_policies_stops_where_every_role_was_paid_alike(
    letters: ModuleType, tmp_path: Path
) -> None:
    class Pair(letters.PairWorkflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            episode = await super().run(task, uid, **kwargs)
            if task["letter"] in "ACEG":
                episode.is_correct = True
                for trajectory in episode.trajectories:
                    trajectory.reward = 1.0
            return episode

    changes = {"steps": 1, "warm_start": {"steps": 0}, "evaluation": {"num_tasks": 1, "every_steps": 0}}
    changes |= {"rollout": {"tasks_per_step": 8, "group_size": 4}, "filters": {"first_attempts": 2}}
    letters.make_pair_trainer(tmp_path, changes, workflow_class=Pair).train()
    (line,) = _lines(tmp_path)
    sizes = {groups[0].task["letter"]: len(groups) for groups in _stored(tmp_path, 0).values()}
    assert {sizes[letter] for letter in "ACEG"} == {2}
    assert 4 in sizes.values()
    assert line["attempts_not_played"] == 2 * line["tasks_solved_first"] == 32 - line["episodes"]


def test_rows_of_tied_groups_beside_rows_that_the_trainer_scored_are_measured_alike(
    letters: ModuleType, tmp_path: Path
) -> None:
    class Pair(letters.PairWorkflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            episode = await super().run(task, uid, **kwargs)
            for trajectory in episode.trajectories:
                is_tied = task["letter"] in "ACEG"
                trajectory.reward = 1.0 if is_tied else float(trajectory.steps[0].response_ids[0] % 2)
            return episode

    changes = {"steps": 1, "warm_start": {"steps": 0}, "evaluation": {"num_tasks": 1, "every_steps": 0}}
    changes |= {"rollout": {"tasks_per_step": 8, "group_size": 4}, "algorithm": {"old_logprobs": "trainer"}}
    letters.make_pair_trainer(tmp_path, changes, workflow_class=Pair).train()
    (line,) = _lines(tmp_path)
    assert 0 < line["groups_tied"] < line["groups"]
    assert all(line[f"policy.{name}.update_kl"] >= 0.0 for name in ("solver", "judge"))


def test_a_loss_or_an_estimator_that_is_not_there_is_refused_before_a_run_begins(
    letters: ModuleType, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def loss(tokens):\n    return -tokens.advantages_M * tokens.new_M\n"
        "def centred(rewards_G):\n    return rewards_G - rewards_G.mean()\n"
    )
    for key in ("loss", "estimator"):
        trainer = letters.make_trainer(tmp_path / "run", {"algorithm": {key: f"{own}:missing"}})
        with pytest.raises(ConfigError, match="missing"):
            trainer.train()
        assert not (tmp_path / "run" / "config.json").exists()
    mine = {"algorithm": {"loss": f"{own}:loss", "estimator": f"{own}:centred"}}
    changes = letters.merged(mine, {"steps": 1, "warm_start": {"steps": 0}, "evaluation": {"num_tasks": 1}})
    letters.make_trainer(tmp_path / "run", changes).train()
    (line,) = _lines(tmp_path / "run")
    assert line["grad_norm"] > 0.0


@pytest.mark.parametrize(
    ("body", "error"), [("return next(iter([]))", "StopIteration"), ("raise SystemExit(3)", "SystemExit")]
)
@pytest.mark.parametrize("key", ["loss", "estimator"])
def test_an_algorithm_of_ones_own_that_stops_an_iteration_or_the_process_ends_the_run(
    letters: ModuleType, tmp_path: Path, key: str, body: str, error: str
) -> None:
    own = tmp_path / "stopping.py"
    own.write_text(f"def loss(tokens):\n    {body}\ndef estimator(rewards_G):\n    {body}\n")
    changes = {"algorithm": {key: f"{own}:{key}"}, "warm_start": {"steps": 0}, "evaluation": {"num_tasks": 1}}
    with pytest.raises(RuntimeError, match=error):
        letters.make_trainer(tmp_path / "run", changes).train()
