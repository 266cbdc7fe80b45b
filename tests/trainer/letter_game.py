"""A world that is trained in within a second, for one policy (letters) or for a solver and a judge (pair)."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rllm.agents.base import BaseAgent
from rllm.environments.base import BaseEnv
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types.episode import Action, Episode, Step, Trajectory
from rllm.workflows.workflow import Workflow

SETTINGS: dict[str, Any] = {
    "seed": 5,
    "steps": 4,
    "threads": 1,
    "inference": {"num_slots": 8, "max_context": 128},
    "rollout": {
        "tasks_per_step": 2,
        "group_size": 3,
        "max_turns": 2,
        "max_tokens_per_turn": 3,
        "num_parallel": 8,
        "env_workers": 2,
    },
    "warm_start": {"steps": 4, "episodes_per_step": 4},
    "evaluation": {"num_tasks": 4, "every_steps": 2, "every_num_tasks": 2},
    "checkpoint": {"every_steps": 2, "keep": 2},
}
TASKS = [{"task_id": f"say-{letter}", "letter": letter} for letter in "ABCDEFGH"]


class LetterEnv(BaseEnv):
    """Two turns. The last answer pays by its first letter, in quarters, so that attempts differ by chance."""

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.turn = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"{self.letter} 1", {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        over = self.turn == 2
        return f"{self.letter} 2", (ord(action[0]) % 5) / 4 if over and action else 0.0, over, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "LetterEnv":
        return LetterEnv(info["letter"])


class LetterAgent(BaseAgent):
    """Passes on what it is shown and what it is told."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._trajectory = Trajectory()

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        return self._messages

    @property
    def trajectory(self) -> Trajectory:
        return self._trajectory

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if not done:
            self._messages.append({"role": "user", "content": observation})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self._messages.append({"role": "assistant", "content": response})
        self._trajectory.steps.append(
            Step(chat_completions=list(self._messages), model_response=response, action=response)
        )
        return Action(response)


def demonstrate(task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[tuple[str, str]]:
    letter = task["letter"]
    return [
        (f"{letter} {turn}", "ABCDEFGH"[rng.integers(8)] if rng.random() < noise else letter)
        for turn in (1, 2)
    ]


class PairWorkflow(Workflow):
    """Two solvers at a time, then a judge who reads both; each is paid by the first letter that it says."""

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        said = await asyncio.gather(*(self.say("solver", f"{task['letter']} {turn}") for turn in (1, 2)))
        judged = await self.say("judge", " ".join(str(each.output)[:1] for each in said))
        return Episode(id=uid, task=task, trajectories=[*said, judged], is_correct=judged.reward == 1.0)

    async def say(self, role: str, question: str) -> Trajectory:
        messages = [{"role": "user", "content": question}]
        output = await self.rollout_engine.get_model_response(messages, role=role)
        reward = (ord(output.text[0]) % 5) / 4 if output.text else 0.0
        step = Step.from_model_output(output, messages, reward=reward)
        return Trajectory(name=role, steps=[step], reward=reward, output=output.text)


def demonstrate_pair(
    task: dict[str, Any], noise: float, rng: np.random.Generator
) -> list[tuple[str, list[tuple[list[dict[str, Any]], str]]]]:
    letter = task["letter"]
    asked = [("solver", f"{letter} 1"), ("solver", f"{letter} 2"), ("judge", f"{letter} {letter}")]
    return [
        (role, [([{"role": "user", "content": question}], "ABCDEFGH"[rng.integers(8)])])
        for role, question in asked
    ]


PAIR: dict[str, Any] = {
    "policies": {"solver": {"path": "builtin:tiny"}, "judge": {"path": "builtin:tiny"}},
    "inference": {"lockstep": False},
    "algorithm": {"old_logprobs": "trainer"},
}
"""Settings of the pair on top of those of the game."""


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections and keys of `changes` on top of those of `settings`; None takes a section away."""
    both = {key: merged(value, {}) if isinstance(value, dict) else value for key, value in settings.items()}
    for key, value in changes.items():
        both[key] = merged(both.get(key, {}), value) if isinstance(value, dict) else value
    return {key: value for key, value in both.items() if value is not None}


def make_pair_trainer(run: Path, changes: Mapping[str, Any] | None = None, **more: Any) -> AgentTrainer:
    """A trainer of the pair; `changes` are sections or keys on top of its settings."""
    settings = merged(SETTINGS, PAIR)
    del settings["rollout"]["max_turns"]
    return AgentTrainer(
        **{
            "config": merged(settings, changes or {}),
            "train_dataset": TASKS,
            "val_dataset": TASKS[:4],
            "validation_dataset": TASKS[4:6],
            "workflow_class": PairWorkflow,
            "demonstrate": demonstrate_pair,
            "output": run,
            **more,
        }
    )


def make_trainer(run: Path, changes: Mapping[str, Any] | None = None, **more: Any) -> AgentTrainer:
    """A trainer of the letter game; `changes` are sections or keys on top of SETTINGS."""
    config = merged(SETTINGS, changes or {})
    return AgentTrainer(
        **{
            "config": config,
            "train_dataset": TASKS,
            "val_dataset": TASKS[:4],
            "validation_dataset": TASKS[4:6],
            "agent_class": LetterAgent,
            "env_class": LetterEnv,
            "demonstrate": demonstrate,
            "output": run,
            **more,
        }
    )


def make_program_trainer(run: Path, **more: Any) -> AgentTrainer:
    """A trainer of a program that never asks, on the tasks of the game."""
    return AgentTrainer(
        **{
            "config": {"evaluation": {"every_steps": 0}},
            "train_dataset": [{"instruction": "x", **task} for task in TASKS],
            "val_dataset": [{"instruction": "x", **task} for task in TASKS[:4]],
            "agent_flow": lambda task, config: None,
            "evaluator": lambda task, episode: 0.0,
            "output": run,
            **more,
        }
    )
