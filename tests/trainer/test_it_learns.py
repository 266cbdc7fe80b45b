"""Two short runs that learn: one question and one answer, and several turns with credit for each.

Both begin with an imitator that knows every answer and mostly says A, out of habit. Rewards alone show that
the answers pay. The floors lie where no broken learner comes, which the slow test shows by breaking it: the
sign of the advantages, the mask, whom they belong to, which turn, and the update itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rllm.algorithms.losses import PolicyLoss
from rllm.environments.base import BaseEnv
from rllm.errors import RllmError
from rllm.trainer import learning
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.sample import TrainingBatch, TrainingSample

LETTERS, HABIT = "ABCDEFGH", "A"
REMARKS = {
    True: "well done, that was it: go on like this, there is more to come and it will not be harder",
    False: "oh no, it was another one: what a pity, but never mind, nobody knows all of them by heart",
}
"""Longer than the answers, as in most worlds: whoever trains on them learns little else."""
MAX_START, MIN_END, MIN_GAIN = 0.5, 0.85, 0.35
"""Share of right answers, sampled, before and after; and how far that is above the greedy share before."""


def next_letter(letter: str) -> str:
    return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


class NextLetterEnv(BaseEnv):
    """What follows a letter, for each of some letters in turn; every answer is paid at once."""

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.turn = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"{self.letters[0]} ?", {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        is_right = action == next_letter(self.letters[self.turn])
        self.turn += 1
        is_over = self.turn == len(self.letters)
        shown = "" if is_over else f"{REMARKS[is_right]} {self.letters[self.turn]} ?"
        return shown, is_right / len(self.letters), is_over, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "NextLetterEnv":
        return NextLetterEnv(info["letters"])


def habitual(task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[tuple[str, str]]:
    """With probability `noise` the habit instead of the answer."""
    env = NextLetterEnv(task["letters"])
    shown, turns = env.reset()[0], list[tuple[str, str]]()
    for letter in task["letters"]:
        answer = HABIT if rng.random() < noise else next_letter(letter)
        turns.append((shown, answer))
        shown = env.step(answer)[0]
    return turns


def trained(letters: ModuleType, output: Path, num_turns: int) -> dict[str, Any]:
    """The summary of a run."""
    rng = np.random.default_rng(0)
    drawn = ["".join(rng.choice(list(LETTERS), num_turns)) for _ in range(192)]
    tasks = [{"task_id": str(number), "letters": each} for number, each in enumerate(drawn)]
    single = num_turns == 1
    trainer = AgentTrainer(
        {
            "seed": 100,
            "steps": 9 if single else 14,
            "threads": 1,
            "inference": {"num_slots": 128, "max_context": 64 if single else 256},
            "rollout": {
                "tasks_per_step": 16 if single else 8,
                "group_size": 8,
                "max_turns": num_turns,
                "max_tokens_per_turn": 2,
                "num_parallel": 128,
            },
            "warm_start": {
                "steps": 24,
                "episodes_per_step": 16,
                "learning_rate": 1e-2,
                "noise": 0.7 if single else 0.6,
            },
            "algorithm": {"credit": "trajectory" if single else "turn", "loss": "policy_gradient"},
            "optimizer": {"name": "muon", "learning_rate": 3e-3},
            "evaluation": {"num_tasks": 64, "every_steps": 0},
        },
        train_dataset=tasks[64:],
        val_dataset=tasks[:64],
        agent_class=letters.LetterAgent,
        env_class=NextLetterEnv,
        demonstrate=habitual,
        output=output,
    )
    return trainer.train().summary


def shares(summary: dict[str, Any]) -> tuple[float, float, float]:
    """Of right answers: sampled before, greedy before, sampled after."""
    before, after = summary["before"], summary["after"]
    reports = (before["sampled_report"], before["greedy_report"], after["sampled_report"])
    start, greedy, end = (each["mean_reward"] for each in reports)
    return start, greedy, end


def reaches_the_floors(summary: dict[str, Any]) -> bool:
    _, greedy, end = shares(summary)
    return end >= MIN_END and end - greedy >= MIN_GAIN


@pytest.mark.parametrize("num_turns", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rewards_bring_out_what_an_imitator_knows_and_does_not_do(
    letters: ModuleType, tmp_path: Path, num_turns: int
) -> None:
    summary = trained(letters, tmp_path / "run", num_turns)
    start, _, _ = shares(summary)
    assert start <= MAX_START
    assert reaches_the_floors(summary), shares(summary)


# ---- what the floors are for -----------------------------------------------------------------------------

Advantages = Mapping[str, np.ndarray]


def _changed_advantages(change: Callable[[Advantages], Advantages]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        right = learning.group_advantages
        patch.setattr(learning, "group_advantages", lambda *args, **options: change(right(*args, **options)))

    return apply


def _given_to_others(advantages: Advantages) -> Advantages:
    rng = np.random.default_rng(len(advantages))
    return dict(zip(advantages, rng.permutation(np.array(list(advantages.values()))), strict=True))


def _without_mask(patch: pytest.MonkeyPatch) -> None:
    """Prompts and remarks are trained on as if the policy had written them."""
    right = learning.training_batch

    def unmasked(*args: Any, **options: Any) -> TrainingBatch:
        batch = right(*args, **options)
        batch.samples = [_unmasked(each) for each in batch.samples]
        return batch

    patch.setattr(learning, "training_batch", unmasked)


def _unmasked(sample: TrainingSample) -> TrainingSample:
    sampled = np.flatnonzero(sample.trainable_T)
    nearest = sampled[np.minimum(np.searchsorted(sampled, np.arange(sample.num_tokens)), len(sampled) - 1)]
    versions_T = np.full(sample.num_tokens, sample.policy_versions_T[sampled[0]])
    return replace(sample, policy_versions_T=versions_T, advantages_T=sample.advantages_T[nearest])


def _without_update(patch: pytest.MonkeyPatch) -> None:
    """What was learned never arrives where it is sampled from."""
    right = TorchBackend.update

    def lost(
        self: TorchBackend, samples: Sequence[TrainingSample], loss: Any, rate: float
    ) -> dict[str, float]:
        kept = [each.detach().clone() for each in self.model.parameters()]
        metrics = right(self, samples, loss, rate)
        if isinstance(loss, PolicyLoss):
            with torch.no_grad():
                for parameter, before in zip(self.model.parameters(), kept, strict=True):
                    parameter.copy_(before)
        return metrics

    patch.setattr(TorchBackend, "update", lost)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "sign": _changed_advantages(lambda found: {uid: -each for uid, each in found.items()}),
    "attempts": _changed_advantages(_given_to_others),
    "turns": _changed_advantages(lambda found: {uid: np.roll(each, -1) for uid, each in found.items()}),
    "mask": _without_mask,
    "publish": _without_update,
}


@pytest.mark.slow
@pytest.mark.parametrize("num_turns", [1, 3])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_learner_misses_the_floors(
    letters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str, num_turns: int
) -> None:
    if mistake in ("turns", "mask") and num_turns == 1:
        pytest.skip("one turn: no other one, and attempts share the prompt, whose advantages cancel")
    MISTAKES[mistake](monkeypatch)
    try:
        summary = trained(letters, tmp_path / "run", num_turns)
    except RllmError as error:
        pytest.fail(f"It was refused ({error}), so the floors are not what notices it.")
    assert not reaches_the_floors(summary), shares(summary)
