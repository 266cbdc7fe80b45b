"""The worth of an answer to an environment: a grader by name, or a reward function of one's own.

    task + answer ──► grader (rllm.rewards)                 ──┐
                  └──► reward_fn(task, answer), published   ──┴─► Verdict: reward, is_correct, info

Graders may hold processes, so those of one name and options are one object for the whole process. It is
closed when the interpreter ends.
"""

import atexit
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

from rllm.errors import ConfigError, RewardError, RllmError
from rllm.rewards.clock import grading
from rllm.types.judgements import finite_number

RewardFn = Callable[[dict[str, Any], Any], Any]
"""(task, answer) -> a number, a Grade, or anything with `reward`."""

GRADER_KEYS = ("grader", "grader_args", "grading")
"""The keys by which a task describes its judge: name, options, and the fields that the grader reads."""


class GraderFailure(RllmError):
    """Raised when a grader could not judge an answer: its row, or its own machinery, is at fault.

    That fails one episode. A reward function that returns no number is a RewardError, which ends the run.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class Verdict:
    """The worth of one answer."""

    reward: float
    is_correct: bool
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """The explanation for people: `reason`, `extracted`, and the judge's additions."""


Judge = Callable[[str], Verdict]


def judge_of(task: Mapping[str, Any], reward_fn: RewardFn | None = None) -> Judge | None:
    """The judge of answers to a task; None where there is none.

    Raises ConfigError for a grader that there is not, or options that it does not have.
    """
    if reward_fn is not None:
        return _with_time(lambda answer: _verdict_of(reward_fn(dict(task), answer)))
    name = task.get("grader")
    if not name:
        return None
    if not isinstance(name, str):
        raise ConfigError(f"`grader` of a task is {name!r:.80}; it must be the name of a grader.")
    grader = shared_grader(name, **(task.get("grader_args") or {}))
    fields = task.get("grading")
    if not isinstance(fields, Mapping):
        raise ConfigError(
            f"The task's `grading` is {fields!r:.80}; the grader `{name}` reads "
            f"{', '.join(grader.task_fields)} there."
        )
    prepare(grader, fields)
    # Judges by a model read the question, which a task holds once, beside its `grading`.
    if isinstance(question := task.get("question"), str):
        fields = {"question": question, **fields}
    return _with_time(lambda answer: _verdict_of(_grade(grader, answer, fields)))


def _with_time(judge: Judge) -> Judge:
    def judge_on_the_clock(answer: str) -> Verdict:
        with grading():
            return judge(answer)

    return judge_on_the_clock


def _grade(grader: Any, answer: str, fields: Mapping[str, Any]) -> Any:
    try:
        return grader.grade(answer, fields)
    except RewardError as error:
        raise GraderFailure(f"The {grader.name} grader could not judge: {error}") from error


def prepare(grader: Any, fields: Mapping[str, Any]) -> None:
    """Let a grader that holds slow processes start them while the model is still writing."""
    if callable(start := getattr(grader, "prepare", None)):
        start(fields)


def shared_grader(name: str, **options: Any) -> Any:
    """The one grader of this process with that name and those options."""
    return _grader(name, json.dumps(options, sort_keys=True))


@lru_cache(maxsize=256)
def _grader(name: str, options: str) -> Any:
    from rllm.rewards.graders import grader_named

    grader = grader_named(name, **json.loads(options))
    atexit.register(grader.close)
    return grader


def _verdict_of(grade: Any) -> Verdict:
    if isinstance(grade, Real | np.bool_):
        reward = finite_number(grade, "The reward function returned", "the reward")
        return Verdict(reward=reward, is_correct=reward > 0.0)
    for name in ("score", "reward"):
        value = getattr(grade, name, None)
        if value is not None:
            reward = finite_number(value, "The judge returned", f"`{name}`")
            correct = getattr(grade, "is_correct", None)
            return Verdict(
                reward=reward,
                is_correct=reward > 0.0 if correct is None else bool(correct),
                info=_info_of(grade),
            )
    raise RewardError(
        f"The reward function returned {grade!r:.200} (a {type(grade).__name__}); return a number, or "
        "something with `reward`."
    )


def _info_of(grade: Any) -> dict[str, Any]:
    info = {name: getattr(grade, name) for name in ("reason", "extracted") if getattr(grade, name, None)}
    return {**(getattr(grade, "metadata", None) or {}), **info}
