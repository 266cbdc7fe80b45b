"""An episode that cannot be trained on, or stored, costs itself and not the run that it is part of."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.environments.base import BaseEnv
from rllm.errors import ConfigError
from rllm.models.builtin import create_model
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.messages import LogprobMeaning

NAN = float("nan")


def of_step(**values: Any) -> Callable[[Episode], None]:
    """One more step, of a person or another model, that says it was sampled."""
    whole: dict[str, Any] = {
        "prompt_ids": [1],
        "response_ids": [2],
        "logprobs": [-0.5],
        "policy_versions": [0],
    }

    def change(episode: Episode) -> None:
        episode.trajectories.append(Trajectory(name="judge", steps=[Step(**whole | values)], reward=0.0))

    return change


def stray(episode: Episode) -> None:
    episode.trajectories[0].name = "nobody's"


def meaning(episode: Episode) -> None:
    of_step()(episode)
    output = episode.trajectories[0].steps[0].model_output
    assert output is not None
    output.logprob_meaning = LogprobMeaning.UNKNOWN


UNTRAINABLE: dict[str, tuple[Callable[[Episode], None], str]] = {
    "ids": (of_step(prompt_ids=[]), "0 prompt ids"),
    "log-probabilities": (of_step(logprobs=[]), "0 log-probabilities"),
    "versions": (of_step(policy_versions=[]), "0 policy versions"),
    "NaN": (of_step(logprobs=[NAN]), "not finite"),
    "another vocabulary": (of_step(response_ids=[10**6]), "the token ids 1 to 1000000"),
    "meaning": (meaning, "does not tell how"),
    "role": (stray, "none is chosen for the role `nobody's`"),
}


def test_what_a_teacher_cannot_measure_is_left_out_of_its_report_and_counted(
    letters: ModuleType, tmp_path: Path
) -> None:
    create_model(tmp_path / "teacher", seed=9)
    changes = [change for change, _ in UNTRAINABLE.values()]

    class Odd(letters.PairWorkflow):  # type: ignore[name-defined, misc]
        """In each report seven of eight attempts are odd."""

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            episode = await super().run(task, uid, **kwargs)
            if self.rollout_engine.key[1].startswith("report/") and task["task_id"] != "7":
                changes[int(task["task_id"])](episode)
            return episode

    settings = {
        "steps": 1,
        "warm_start": {"steps": 0},
        "evaluation": {"every_steps": 0, "num_tasks": 8},
        "algorithm": {"estimator": "teacher"},
        "distill": {"teacher": str(tmp_path / "teacher")},
    }
    tasks = [{"task_id": str(number), "letter": letter} for number, letter in enumerate("ABCDEFGH")]
    letters.make_pair_trainer(
        tmp_path / "run", settings, workflow_class=Odd, demonstrate=None, val_dataset=tasks
    ).train()
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        if line["phase"] in ("before", "after"):
            assert line["unmeasured"] == 7
            assert line["reverse_kl"] > 0.0


def test_what_cannot_be_trained_on_fails_one_episode_of_a_step(letters: ModuleType, tmp_path: Path) -> None:
    left, words = list(UNTRAINABLE.values()), dict[str, list[str]]()

    class Odd(letters.PairWorkflow):  # type: ignore[name-defined, misc]
        """Three attempts of each step are odd."""

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            episode = await super().run(task, uid, **kwargs)
            purpose = self.rollout_engine.key[1]
            if purpose.startswith("train/") and len(words.setdefault(purpose, [])) < 3 and left:
                change, why = left.pop()
                words[purpose].append(why)
                change(episode)
            return episode

    run, steps = tmp_path / "run", 3
    changes = {"steps": steps, "warm_start": {"steps": 0}, "evaluation": {"every_steps": 0, "num_tasks": 1}}
    letters.make_pair_trainer(run, changes, workflow_class=Odd).train()
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        for step in range(steps):
            errors = [
                each.info["error"]
                for each in store.episodes("train", step)
                if each.outcome is Outcome.INFRASTRUCTURE_FAILURE
            ]
            assert [each["place"] for each in errors] == ["trainer"] * len(words[f"train/{step}"])
            for why in words[f"train/{step}"]:
                assert any(why in each["message"] for each in errors), why
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert [line["failed.infrastructure_failure"] for line in lines] == [3, 3, 1]
    assert all(line["tokens.dropped.failed"] > 0 for line in lines)


def test_the_first_token_of_a_vocabulary_is_one_and_attempts_that_follow_the_first_are_looked_at_as_well(
    letters: ModuleType, tmp_path: Path
) -> None:
    class Odd(letters.PairWorkflow):  # type: ignore[name-defined, misc]
        """The first attempts use the first token, the last one none of the vocabulary."""

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            episode = await super().run(task, uid, **kwargs)
            if self.rollout_engine.key[1].startswith("train/"):
                of_step(response_ids=[10**6 if uid.endswith(":3") else 0])(episode)
            return episode

    changes = {
        "steps": 1,
        "warm_start": {"steps": 0},
        "filters": {"first_attempts": 2},
        "rollout": {"group_size": 4},
        "evaluation": {"every_steps": 0, "num_tasks": 1},
    }
    letters.make_pair_trainer(tmp_path / "run", changes, workflow_class=Odd).train()
    with EpisodeStore.open(tmp_path / "run" / "store.sqlite", read_only=True) as store:
        failed = {
            each.rollout_idx
            for each in store.episodes("train", 0)
            if each.outcome is Outcome.INFRASTRUCTURE_FAILURE
        }
    assert failed == {3}


def test_a_run_of_nothing_to_train_on_ends_with_what_is_missing(letters: ModuleType, tmp_path: Path) -> None:
    class Silent(letters.PairWorkflow):  # type: ignore[name-defined, misc]
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            episode = await super().run(task, uid, **kwargs)
            of_step(logprobs=[])(episode)
            return episode

    changes = {"warm_start": {"steps": 0}, "evaluation": {"every_steps": 0, "num_tasks": 1}}
    trainer = letters.make_pair_trainer(tmp_path / "run", changes, workflow_class=Silent)
    with pytest.raises(ConfigError, match=r"0 log-probabilities") as raised:
        trainer.train()
    assert "6 of the 6 episodes" in raised.value.__notes__[0]


class HostileEnv(BaseEnv):
    """The letter game, but one answer in eight is odd, each time in another way."""

    made = 0

    def __init__(self, game: BaseEnv) -> None:
        self.game = game
        HostileEnv.made += 1
        self.way = HostileEnv.made // 8 % len(WAYS) if HostileEnv.made % 8 == 0 else -1

    def reset(self, seed: int | None = None) -> Any:
        return self.game.reset(seed)

    def step(self, action: Any) -> Any:
        moved = self.game.step(action)
        return moved if self.way < 0 else WAYS[self.way](*moved)


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def sink(depth: int) -> Any:
    return sink(depth + 1)


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()


WAYS: list[Callable[..., Any]] = [
    lambda seen, reward, done, info: ("x" * 2_000_000, reward, False, info),
    lambda seen, reward, done, info: (b"bytes", reward, False, info),
    lambda seen, reward, done, info: ("\udc80", reward, False, info),
    lambda seen, reward, done, info: (seen, NAN, done, info),
    lambda seen, reward, done, info: (seen, 1e200, True, info),
    lambda seen, reward, done, info: (seen, reward, done, {str(key): key for key in range(10**5)}),
    lambda seen, reward, done, info: (seen, reward, done, {"x": {1, Mute()}, "y": NAN}),
    lambda *moved: Mute(),
    lambda *moved: sink(0),
    lambda *moved: leave_a_thread() or moved,
    lambda *moved: sys.exit(3),
]


def test_hostile_environments_end_no_run(letters: ModuleType, tmp_path: Path) -> None:
    class Keeps(letters.LetterAgent):  # type: ignore[name-defined, misc]
        """Keeps what it is shown in its record, as published agents do."""

        def update_from_env(self, observation: Any, reward: float, done: bool, info: Any, **kw: Any) -> None:
            super().update_from_env(observation, reward, done, info, **kw)
            for step in self.trajectory.steps[-1:]:
                step.observation, step.info = observation, info

    class Hostile(HostileEnv):
        @staticmethod
        def from_dict(info: dict[str, Any]) -> BaseEnv:
            return Hostile(letters.LetterEnv.from_dict(info))

    run = tmp_path / "run"
    changes = {
        "steps": 10,
        "rollout": {"group_size": 5, "retry_limit": 1},
        "warm_start": {"steps": 1},
        "evaluation": {"every_steps": 0, "num_tasks": 1},
    }
    letters.make_trainer(run, changes, env_class=Hostile, agent_class=Keeps).train()
    assert HostileEnv.made >= 8 * len(WAYS), "each way was met"
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        failed = [each for each in store.episodes("train") if each.outcome is Outcome.INFRASTRUCTURE_FAILURE]
    assert 5 <= len(failed) <= len(WAYS)
    infos = [each.info | each.trajectories[0].info for each in failed]
    causes = [info["error"]["message"] for info in infos]
    for words in ("nan", "no repr", "recursion", "SystemExit", "between -1e+18 and 1e+18", "is a set"):
        assert any(words in cause for cause in causes), (words, causes)
