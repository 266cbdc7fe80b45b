"""A program of another library that brings its own tasks and its own judge.

    "verifiers:gsm8k?num_train=100" ──► target "gsm8k", arguments {"num_train": 100}
    its rows ──► train, test: no row is in both ──► Task(id "gsm8k-test-3", metadata {"input": row})
    Task, AgentConfig ──► run ──► an Episode with its reward; the calls are captured by the gateway

Its Episode carries reward and success, so that no evaluator is named: `PAYS_ITSELF` reads them.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rllm.agents.flow import AgentFlow
from rllm.errors import ConfigError
from rllm.rewards.evaluator import Evaluator
from rllm.types.episode import Episode
from rllm.types.evaluation import EvalOutput
from rllm.types.names import name_arguments
from rllm.types.task import AgentConfig, Task

HELD_OUT_EVERY = 20
"""The interval of held-out tasks in a library without a held-out set: places 0, 20, 40, …"""
INPUT = "input"
"""Field of a task's metadata: the library's own row."""
TRAIN, TEST = "train", "test"


class TaskProgram(ABC):
    """Tasks, a program that plays them and what it is paid, all of one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        prefix, _, rest = name.partition(":")
        self.target, self.arguments = name_arguments(rest)
        if not self.target:
            raise ConfigError(f"`{name}` names nothing; write {prefix}:NAME.")
        self.flow = AgentFlow(self.run, self.label)

    @property
    def label(self) -> str:
        """Role of its trajectories, and the beginning of its task ids."""
        return self.target

    @abstractmethod
    def run(self, task: Task, config: AgentConfig) -> Any:
        """Play one task against the model at `config.base_url`: an Episode with reward and success, or
        something to await that gives it.

        Raises ActionError for what the policy wrote and the library cannot read, SandboxError for a service
        that failed and may be tried again, AgentError or RewardError for what would fail again.
        """

    @abstractmethod
    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(rows to train on, held-out rows) as the library has them; either may be empty."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Facts that a score depends on, for its hash: versions and sources."""

    @abstractmethod
    def instruction(self, row: Mapping[str, Any]) -> str:
        """The text of a row that people read."""

    def tasks(self, split: str, most: int | None = None) -> list[Task]:
        """The first `most` tasks of a split. Raises ConfigError for a split that is empty or unknown."""
        if split not in self._splits:
            raise ConfigError(f"`{self.name}` has no split `{split}`; it has {', '.join(self._splits)}.")
        return self._splits[split][:most]

    @cached_property
    def _splits(self) -> dict[str, list[Task]]:
        train, held_out = self.rows()
        contents = {_content_of(row, self.name) for row in held_out}
        places = [place for place, row in enumerate(train) if _content_of(row, self.name) not in contents]
        if train and not (held_out and places):  # nothing is held out, or the held-out rows are all
            held_out = train[::HELD_OUT_EVERY]
            places = [place for place in range(len(train)) if place % HELD_OUT_EVERY]
        splits = {
            TRAIN: [self._task(TRAIN, place, train[place]) for place in places],
            TEST: [self._task(TEST, place, row) for place, row in enumerate(held_out)],
        }
        return {split: tasks for split, tasks in splits.items() if tasks}

    def _task(self, split: str, place: int, row: dict[str, Any]) -> Task:
        return Task(
            id=f"{self.label}-{split}-{place}", instruction=self.instruction(row), metadata={INPUT: row}
        )

    def __reduce__(self) -> tuple[type["TaskProgram"], tuple[str]]:
        """By name: a process of its own loads it again."""
        return type(self), (self.name,)


def _content_of(row: Mapping[str, Any], name: str) -> str:
    """All of a row but its number. Raises ConfigError for a row that no store can hold."""
    try:
        return json.dumps({key: value for key, value in row.items() if key != "example_id"}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`{name}` has a row that JSON cannot hold ({error}); give it text, numbers, lists and dicts."
        ) from error


def _own_judgement(task: Mapping[str, Any], episode: Episode) -> EvalOutput:
    rewards: Sequence[float | None] = [each.reward for each in episode.trajectories]
    # None: a limit of the gateway ended it before its library could judge, so nothing was earned.
    return EvalOutput(reward=rewards[0] or 0.0, is_correct=episode.is_correct)


PAYS_ITSELF = Evaluator(_own_judgement, "its own judge")
"""Reads reward and success of an episode that a TaskProgram made."""
