"""`inspect:FILE@task`: a task of Inspect AI as a program that brings its samples and its scorer.

    sample ──► a worker process ──► inspect_ai.eval ──► the session of the gateway, which captures every call
                                        └─ scores ──► value_to_float ──► reward

Inspect evaluates one thing at a time in a process, so there are several; each keeps what it imported.
"""
# pyright: reportMissingImports=false

import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rllm.errors import AgentError, ConfigError, MissingExtraError, RewardError, SandboxError
from rllm.integrations.task_program import INPUT, TaskProgram
from rllm.rewards.workers import WorkerPool, WorkerStatus
from rllm.types.episode import Episode, Step, TerminationReason, Trajectory
from rllm.types.judgements import finite_number
from rllm.types.names import object_named
from rllm.types.task import AgentConfig, Task

SCORE = "score"
"""Argument of a name that is not the task's: which of several scores is the reward."""
WORKERS = 2 * (os.cpu_count() or 1)
"""Samples at a time; a process has about 300 MB."""
MEMORY_MB = 16_384
"""The size of a worker's address space, most of which is never touched."""
CORRECT_FROM = 0.5
_LIMITS = {
    "context": TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
    "cost": TerminationReason.MAX_COST_EXCEEDED,
    "message": TerminationReason.MAX_TURNS_EXCEEDED,
    "time": TerminationReason.TIMEOUT,
    "token": TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
    "turn": TerminationReason.MAX_TURNS_EXCEEDED,
    "working": TerminationReason.TIMEOUT,
}
_TEXT_VALUES = ("yes", "true", "no", "false")


class InspectProgram(TaskProgram):
    """A task function of a file; the query of the name is its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        try:
            from inspect_ai import Task as InspectTask
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "inspect-ai", "inspect") from error
        self._file, at, function_name = self.target.partition("@")
        if not (at and function_name and self._file.endswith(".py")):
            raise ConfigError(f"`{name}` names no task; write inspect:FILE.py@TASK.")
        self._score_name = str(self.arguments.pop(SCORE, ""))
        function = object_named(f"{self._file}:{function_name}", group="", what="Inspect task")
        try:
            task = function(**self.arguments)
        except Exception as error:
            raise ConfigError(
                f"{self.target} with {self.arguments} raised {type(error).__name__}: {error!s:.500}"
            ) from error
        if not isinstance(task, InspectTask):
            raise ConfigError(f"{self.target} is no task of Inspect but a {type(task).__name__}.")
        if not task.scorer:
            raise ConfigError(f"{self.target} has no scorer, so nothing would be paid; give it one.")
        self._library_task = task
        self._pool: WorkerPool | None = None
        self.flow.max_concurrent = WORKERS

    @property
    def label(self) -> str:
        return self.target.rpartition("@")[2]

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        samples = list(self._library_task.dataset)
        return [
            {
                # What Inspect numbers itself begins with 1.
                "id": place + 1 if sample.id is None else sample.id,
                "question": sample.input if isinstance(sample.input, str) else sample.input[-1].text,
                "target": sample.target,
            }
            for place, sample in enumerate(samples)
        ], []

    def content(self) -> dict[str, Any]:
        return {
            "inspect_ai": metadata.version("inspect_ai"),
            "file": Path(self._file).read_text("utf-8"),
            "arguments": self.arguments,
            SCORE: self._score_name,
        }

    def instruction(self, row: Mapping[str, Any]) -> str:
        return row["question"]

    def run(self, task: Task, config: AgentConfig) -> Episode:
        """In a thread of its own, which waits for a worker."""
        pool = self._workers(float(config.metadata["timeout_s"]))
        reply = pool.call(
            {
                "task": self.target,
                "directory": str(Path.cwd()),
                "arguments": self.arguments,
                "id": task.metadata[INPUT]["id"],
                "model": config.model,
                "base_url": config.base_url,
                "api_key": config.api_key,
            }
        )
        if reply.status is not WorkerStatus.OK:
            raise SandboxError(
                f"The worker of {self.name}: {reply.status} {reply.detail} {reply.value or ''!s:.500}"
            )
        sample = reply.value
        if sample["error"]:
            raise AgentError(f"{self.name}, sample {task.metadata[INPUT]['id']!r}: {sample['error']:.800}")
        reward, signals = self._reward(sample["scores"])
        reason = _LIMITS.get(sample["limit"], TerminationReason.ENV_DONE)
        steps = [Step(id=call, info={"completion_id": call}) for call in sample["calls"]]
        trajectory = Trajectory(
            name=self.label, steps=steps, reward=reward, signals=signals, termination_reason=reason
        )
        return Episode(
            trajectories=[trajectory], termination_reason=reason, is_correct=reward >= CORRECT_FROM
        )

    def _workers(self, timeout_s: float) -> WorkerPool:
        if self._pool is None or self._pool.timeout_s != timeout_s:
            self._pool = WorkerPool(
                "rllm.integrations.inspect.sample:play_sample",
                workers=WORKERS,
                timeout_s=timeout_s,
                memory_mb=MEMORY_MB,
            )
        return self._pool

    def _reward(self, scores: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """(the score that pays, all that are numbers). Raises RewardError for one that Inspect would take
        for 0 because it cannot read it."""
        name = self._score_name or next(iter(scores), "")
        if name not in scores:
            raise RewardError(
                f"{self.name} has no score `{name}`; it has {', '.join(scores) or 'none'}. Name one: "
                "?score=NAME"
            )
        numbers = {each: number for each, value in scores.items() if (number := _number(value)) is not None}
        if name not in numbers:
            raise RewardError(
                f"{self.name} scored {name} as {json.dumps(scores[name])!s:.200}, which is no number; name "
                "another score: ?score=NAME"
            )
        return finite_number(numbers[name], f"{self.name} scored {name} as", "the reward"), numbers


def _number(value: Any) -> float | None:
    """By Inspect's own `value_to_float`; None where that would give up and say 0."""
    from inspect_ai.scorer import CORRECT, INCORRECT, NOANSWER, PARTIAL, value_to_float

    if isinstance(value, str) and value not in (CORRECT, INCORRECT, NOANSWER, PARTIAL):
        try:
            float(value)
        except ValueError:
            if value.lower() not in _TEXT_VALUES:
                return None
    return value_to_float()(value) if isinstance(value, str | int | float) else None
