"""A run that samples further steps while it learns: how old its rows are, and what it adds up to."""

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rllm.config.loader import config_dict, load_config
from rllm.errors import ConfigError
from rllm.inference.local.client import LocalClient
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer import learning
from rllm.trainer.ahead import StepsAhead
from rllm.trainer.loop import _idle_shares
from rllm.trainer.replay import replay
from rllm.types.episode import Episode, Outcome

CONTINUOUS: dict[str, Any] = {"inference": {"lockstep": False}}


MASKED = {"old_logprobs": "trainer", "correction": "mask"}


def _async(max_staleness: int, correction: str = "auto") -> dict[str, Any]:
    schedule = {"kind": "async", "max_staleness": max_staleness, "correction": correction}
    return {**CONTINUOUS, "schedule": schedule}


def _parameters(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def _episodes(run: Path) -> dict[int, list[Episode]]:
    steps = {line["step"] for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"}
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        return {step: list(store.episodes("train", step)) for step in sorted(steps)}


def _ages(run: Path) -> dict[int, list[int]]:
    """Step -> publishes since each of its sampled tokens, from the store and the metrics alone."""
    published = [
        line["policy_version"] for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"
    ]
    ages: dict[int, list[int]] = {}
    for step, episodes in _episodes(run).items():
        versions = [
            version
            for episode in episodes
            for trajectory in episode.trajectories
            for each in trajectory.steps
            for version in each.policy_versions
        ]
        ages[step] = [sum(later > version for later in published[:step]) for version in versions]
    return ages


def test_an_idle_share_is_the_part_of_a_step_without_work() -> None:
    ahead: Any = SimpleNamespace(metrics={"rollout_s": 2.0})
    clients = {"one": SimpleNamespace(busy_s=5.0), "two": SimpleNamespace(busy_s=7.0)}
    run: Any = SimpleNamespace(clients=clients)
    shares = _idle_shares(run, ahead, sampled_s=3.0, elapsed_s=10.0)
    assert shares == pytest.approx({"trainer_idle": 0.2, "sampler_idle": 1.0 - (6.0 - 3.0) / 10.0})
    assert _idle_shares(run, ahead, sampled_s=3.0, elapsed_s=2.0)["sampler_idle"] == 0.0
    alone: Any = SimpleNamespace(clients={"one": clients["one"]})
    assert _idle_shares(alone, ahead, sampled_s=3.0, elapsed_s=10.0)["sampler_idle"] == pytest.approx(0.8)
    clients["two"] = SimpleNamespace()  # a sampler that does not say how long it had work
    assert _idle_shares(run, ahead, sampled_s=3.0, elapsed_s=10.0) == pytest.approx({"trainer_idle": 0.2})


def test_without_staleness_an_asynchronous_run_has_the_bits_of_a_synchronous_one(
    letters: ModuleType, tmp_path: Path
) -> None:
    letters.make_trainer(tmp_path / "sync").train()
    schedule = {"schedule": {"kind": "async", "max_staleness": 0}}
    letters.make_trainer(tmp_path / "async", schedule).train()
    assert _parameters(tmp_path / "sync") == _parameters(tmp_path / "async")


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_rows_are_as_old_as_the_bound_and_no_older_and_a_replay_has_the_same_bits(
    letters: ModuleType, tmp_path: Path, max_staleness: int
) -> None:
    trainer = letters.make_trainer(tmp_path / "run", {"steps": 8, **_async(max_staleness)})
    trainer.train()
    ages = _ages(tmp_path / "run")
    assert max(age for step in ages.values() for age in step) == max_staleness
    recorded = {
        line["step"]: line["staleness_max"]
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if line["phase"] == "train"
    }
    assert recorded == {step: max(each) for step, each in ages.items()}
    assert replay(
        letters.make_trainer(tmp_path / "run", {"steps": 8, **_async(max_staleness)}).run
    ).is_identical


def test_a_publish_that_waits_holds_up_no_conversation(
    letters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    publish, step = LocalClient.publish, StepsAhead.step

    async def noted_step(ahead: StepsAhead, number: int) -> Any:
        loops.append(asyncio.get_running_loop())
        return await step(ahead, number)

    def waits_for_the_loop(client: LocalClient, *weights: Any) -> None:
        has_turned = threading.Event()
        if len(loops) == 2:  # the second step is being sampled
            loops[0].call_soon_threadsafe(has_turned.set)
            assert has_turned.wait(5), "the event loop goes on"
        publish(client, *weights)

    monkeypatch.setattr(StepsAhead, "step", noted_step)
    monkeypatch.setattr(LocalClient, "publish", waits_for_the_loop)
    letters.make_trainer(tmp_path / "run", {"steps": 3, **_async(2)}).train()
    assert len(loops) == 3


def test_a_learner_that_stands_still_is_waited_for_while_worlds_go_on_and_no_step_begins_before_its_time(
    letters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_staleness, at_step = 2, 3
    begun: list[int] = []
    turns: list[str] = []
    meanwhile: list[tuple[list[int], int]] = []
    sample, learn = StepsAhead._sample_with_times, learning.update

    class Counted(letters.LetterEnv):
        def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
            turns.append(self.letter)
            return super().step(action)

        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Counted":
            return Counted(info["letter"])

    async def noted_sample(ahead: StepsAhead, step: int) -> Any:
        begun.append(step)
        return await sample(ahead, step)

    def stand_still(*values: Any) -> Any:
        if values[-1] == at_step and not meanwhile:
            num_before, num_now = len(turns), -1
            while num_now != len(turns):  # until the worlds have nothing to do for a while
                num_now = len(turns)
                time.sleep(1.0)
            meanwhile.append((sorted(begun), num_now - num_before))
        return learn(*values)

    monkeypatch.setattr(StepsAhead, "_sample_with_times", noted_sample)
    monkeypatch.setattr(learning, "update", stand_still)
    changes = {"steps": 8, **_async(max_staleness)}
    letters.make_trainer(tmp_path / "run", changes, env_class=Counted).train()
    ((steps, num_turns),) = meanwhile
    assert steps == list(range(at_step + max_staleness + 1))
    assert num_turns > 0, "the newest step was played while the learner stood still"
    lines = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    assert (lines[at_step + 1]["steps_waiting"], lines[at_step + 1]["waited_s"] > 0.5) == (1.0, True)
    assert max(age for step in _ages(tmp_path / "run").values() for age in step) <= max_staleness


def test_the_steps_play_the_tasks_that_a_synchronous_run_plays(letters: ModuleType, tmp_path: Path) -> None:
    letters.make_trainer(tmp_path / "sync", {"steps": 6}).train()
    letters.make_trainer(tmp_path / "async", {"steps": 6, **_async(2)}).train()
    played = [
        {step: [each.task_id for each in episodes] for step, episodes in _episodes(run).items()}
        for run in (tmp_path / "sync", tmp_path / "async")
    ]
    assert played[0] == played[1]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"schedule": {"max_staleness": 2}}, "schedule.max_staleness"),
        ({"schedule": {"kind": "async", "max_staleness": -1}}, "schedule.max_staleness"),
        ({"schedule": {"kind": "sometimes"}}, "schedule.kind"),
        ({"schedule": {"kind": "async"}}, "inference.lockstep"),
        ({**_async(1, "loss"), "algorithm": {"loss": "policy_gradient"}}, "policy_gradient"),
        ({**_async(1, "loss"), "algorithm": {"old_logprobs": "trainer"}}, "algorithm.correction"),
        ({"schedule": {"correction": "token"}}, r"schedule\.correction.*schedule\.kind"),
        (_async(1, "group"), "schedule.correction"),
        (_async(0, "token"), r"schedule\.correction.*max_staleness"),
        ({**_async(1, "token"), "algorithm": MASKED}, r"schedule\.correction.*'mask'"),
        ({**_async(1, "sequence"), "algorithm": {**MASKED, "correction": "truncate"}}, "correction_level"),
        ({**_async(1), "backend": "verl"}, "backend"),
    ],
)
def test_what_cannot_learn_from_older_weights_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(changes)


@pytest.mark.parametrize(
    ("max_staleness", "algorithm", "correction", "comes_to"),
    [
        (0, {}, "auto", ("sampler", "none", "token")),
        (1, {}, "auto", ("sampler", "none", "token")),
        (2, {}, "auto", ("trainer", "truncate", "token")),
        (2, {"loss": "gspo"}, "auto", ("sampler", "none", "token")),
        (2, {}, "loss", ("sampler", "none", "token")),
        (1, {}, "sequence", ("trainer", "truncate", "sequence")),
        (1, {"old_logprobs": "trainer"}, "auto", ("trainer", "truncate", "token")),
        (1, {"loss": "policy_gradient"}, "auto", ("trainer", "truncate", "token")),
        (4, MASKED, "auto", ("trainer", "mask", "token")),
    ],
)
def test_the_schedule_chooses_what_makes_up_for_age_and_a_stored_choice_stays(
    max_staleness: int, algorithm: dict[str, Any], correction: str, comes_to: tuple[str, ...]
) -> None:
    config = load_config({**_async(max_staleness, correction), "algorithm": algorithm})
    again = load_config(config_dict(config))
    for each in (config.algorithm, again.algorithm):
        assert (each.old_logprobs, each.correction, each.correction_level) == comes_to
    assert config_dict(again) == config_dict(config)


def _slow(letters: ModuleType) -> dict[str, Any]:
    """The letter game in a world whose turns take from 0 to 60 ms, by the letter."""

    class Slow(letters.LetterEnv):
        def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
            time.sleep(0.06 * (ord(self.letter) % 4 == 0))
            return super().step(action)

        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Slow":
            return Slow(info["letter"])

    return {"env_class": Slow}


def test_slow_attempts_are_trained_on_as_often_as_they_were_begun(
    letters: ModuleType, tmp_path: Path
) -> None:
    letters.make_trainer(tmp_path / "run", {"steps": 8, **_async(3)}, **_slow(letters)).train()
    for step, episodes in _episodes(tmp_path / "run").items():
        identities = [(each.task_id, each.rollout_idx) for each in episodes]
        assert len(identities) == len(set(identities)) == 6, f"step {step} has every attempt, once"
    counts = {
        line["step"]: (line["tokens.sampled"], line["tokens.trained"])
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if line["phase"] == "train"
    }
    assert all(sampled == trained for sampled, trained in counts.values())


def _ks_p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sample Kolmogorov-Smirnov, asymptotic (Stephens 1970, as in Numerical Recipes, section 14.3)."""
    places = np.sort(np.concatenate((one, other)))
    gap = max(
        abs(
            np.searchsorted(np.sort(one), places, "right") / len(one)
            - np.searchsorted(np.sort(other), places, "right") / len(other)
        )
    )
    root = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (root + 0.12 + 0.11 / root) * gap
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * k * k * scaled**2) for k in range(1, 101))
    return min(1.0, max(0.0, sum(terms)))


def _turn_waits_ms(rng: np.random.Generator) -> list[int]:
    """Pareto numbers of turns, each with a log-normal wait; both with heavy tails."""
    num_turns = min(12, int(rng.random() ** (-1 / 1.1)))
    return [min(40, 1 + int(2 * np.exp(rng.normal()))) for _ in range(num_turns)]


@pytest.mark.slow
def test_lengths_and_durations_that_are_trained_on_are_distributed_as_those_that_are_issued(
    letters: ModuleType, tmp_path: Path
) -> None:
    rng = np.random.default_rng(7)

    class HeavyTailed(letters.LetterEnv):
        def __init__(self, letter: str) -> None:
            super().__init__(letter)
            self.waits = _turn_waits_ms(rng)

        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            self.turn = 0
            return f"{self.letter} {self.waits[0]}", {}

        def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
            time.sleep(self.waits[self.turn] / 1000)
            self.turn += 1
            over = self.turn == len(self.waits)
            reward = (ord(action[0]) % 5) / 4 if over and action else 0.0
            return "" if over else f"{self.letter} {self.waits[self.turn]}", reward, over, {}

        @staticmethod
        def from_dict(info: dict[str, Any]) -> "HeavyTailed":
            return HeavyTailed(info["letter"])

    changes = {
        "steps": 24,
        **letters.merged(_async(3), {"inference": {"max_context": 256}}),
        "rollout": {"max_turns": 12, "env_workers": 8},
        "evaluation": {"num_tasks": 1, "every_steps": 0},
    }
    letters.make_trainer(
        tmp_path / "run", changes, val_dataset=letters.TASKS[:1], env_class=HeavyTailed
    ).train()
    trained = [
        [int(each["content"].split()[1]) for each in turns[-1].chat_completions if each["role"] == "user"]
        for episodes in _episodes(tmp_path / "run").values()
        for turns in (episode.trajectories[0].steps for episode in episodes)
    ]
    issued = [_turn_waits_ms(np.random.default_rng(1_000 + each)) for each in range(4_000)]
    assert len(trained) == 24 * 6
    for measure in (len, sum):
        assert _ks_p_value([measure(each) for each in trained], [measure(each) for each in issued]) > 0.01
    quick = [each for each in trained if sum(each) < 20]
    assert _ks_p_value([sum(each) for each in quick], [sum(each) for each in issued]) < 0.01, "it would show"


@pytest.mark.parametrize("replay_fraction", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_goes_on_with_the_tasks_that_it_would_have_played(
    letters: ModuleType, ask: Callable[..., dict[str, Any]], tmp_path: Path, replay_fraction: float
) -> None:
    changes = {
        "steps": 8,
        **_async(2),
        "curriculum": {"replay_fraction": replay_fraction},
        "checkpoint": {"every_steps": 3},
    }
    run = tmp_path / "run"
    assert ask(run, changes=changes, die_at_line=["train", 4])["signal"] == 9
    assert ask(run, changes=changes, interrupt_at_line=["train", 5])["signal"] == 2
    for num_answers in (9, 31):  # while steps are being sampled, behind a checkpoint and behind a record
        assert ask(run, changes=changes, die_at_answer=num_answers)["signal"] == 9
    assert ask(run, changes=changes)["signal"] == 0
    episodes = _episodes(run)
    assert list(episodes) == list(range(8))
    for each in episodes.values():
        assert len({(episode.task_id, episode.rollout_idx) for episode in each}) == len(each) == 6
    assert max(age for step in _ages(run).values() for age in step) <= 2
    assert replay(letters.make_trainer(run, changes).run).is_identical
    if not replay_fraction:
        assert ask(tmp_path / "whole", changes=changes)["signal"] == 0
        whole = _episodes(tmp_path / "whole")
        assert {step: {each.task_id for each in some} for step, some in whole.items()} == {
            step: {each.task_id for each in some} for step, some in episodes.items()
        }


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"rank": 2}, "model": {"path": "builtin:tiny"}},
        {"algorithm": {"old_logprobs": "trainer", "correction": "truncate"}},
        {"algorithm": {"estimator": "gae"}, "critic": {"trunk": "shared"}},
        {"algorithm": {"kl_coef": 0.01}},
    ],
    ids=["lora", "decoupled", "shared trunk", "reference"],
)
def test_what_else_a_run_has_learns_beside_its_sampler(
    letters: ModuleType, tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = letters.merged({"steps": 5, **_async(2)}, changes)
    letters.make_trainer(tmp_path / "run", settings).train()
    assert max(age for step in _ages(tmp_path / "run").values() for age in step) == 2
    assert replay(letters.make_trainer(tmp_path / "run", settings).run).is_identical


def test_a_workflow_of_two_policies_is_sampled_ahead(letters: ModuleType, tmp_path: Path) -> None:
    changes = letters.merged(
        {"steps": 5, **_async(2)}, {"algorithm": {"correction": "mask", "correction_high": 5.0}}
    )
    letters.make_pair_trainer(tmp_path / "run", changes).train()
    lines = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    assert max(line["staleness_max"] for line in lines) == 2
    assert replay(letters.make_pair_trainer(tmp_path / "run", changes).run).is_identical


def test_a_world_that_never_answers_costs_its_attempts_and_holds_nobody_up(
    letters: ModuleType, tmp_path: Path
) -> None:
    class Stuck(letters.LetterEnv):
        def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
            if self.letter == "A":
                time.sleep(1.0)  # beyond the limit of a step
            return super().step(action)

        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Stuck":
            return Stuck(info["letter"])

    rollout = {"step_timeout_s": 0.3, "retry_limit": 1, "max_failed_fraction": 1.0, "env_workers": 8}
    changes = {"steps": 8, **_async(3), "rollout": rollout, "evaluation": {"num_tasks": 1, "every_steps": 0}}
    letters.make_trainer(tmp_path / "run", changes, val_dataset=letters.TASKS[1:2], env_class=Stuck).train()
    lines = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    episodes = _episodes(tmp_path / "run")
    failed = {
        step: sum(episode.outcome is Outcome.INFRASTRUCTURE_FAILURE for episode in each)
        for step, each in episodes.items()
    }
    assert sum(failed.values()) > 0
    assert [line["failed"] for line in lines] == [failed[step] for step in range(8)]
    assert all(len(each) == 6 for each in episodes.values())


def test_a_run_whose_groups_are_all_rejected_goes_on_to_its_end(letters: ModuleType, tmp_path: Path) -> None:
    class Flat(letters.LetterEnv):
        def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
            observation, _, done, info = super().step(action)
            return observation, 1.0 * done, done, info

        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Flat":
            return Flat(info["letter"])

    filters = {"filters": {"dynamic": True, "max_rounds": 2}}
    changes = {"steps": 6, **_async(2), **filters}
    letters.make_trainer(tmp_path / "run", changes, env_class=Flat).train()
    lines = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    assert [line["rounds"] for line in lines] == [2] * 6
    assert all(line["tokens.trained"] == 0 for line in lines)
