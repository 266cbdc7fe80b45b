"""Rewards under the names that published programs import; each is one of the graders.

    math_reward_fn(task_info, action)  ──► MathGrader ──► RewardOutput(reward, is_correct, metadata)

`task_info` is the task's row, whose right answer may also be called `ground_truth`. `action` is what the
model wrote, or an Action that holds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Protocol

from rllm.errors import ConfigError, RewardError
from rllm.rewards.evaluators import with_own_names
from rllm.rewards.grade import Grader
from rllm.rewards.graders import grader_named
from rllm.types.episode import Action


@dataclass(slots=True)
class RewardInput:
    """The input of a reward function."""

    task_info: Mapping[str, Any]
    action: Any


@dataclass(slots=True)
class RewardOutput:
    """The output of a reward function. By position the last two may come either way round, as published
    programs have both."""

    reward: float
    is_correct: bool = False
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if isinstance(self.is_correct, Mapping):
            self.is_correct, self.metadata = self.metadata is True, self.is_correct


class RewardFunction(Protocol):
    """Anything that is called with a task's row and an action, and says what that is worth."""

    def __call__(self, task_info: Mapping[str, Any], action: Any) -> RewardOutput: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardConfig:
    """The payments of a reward function. The keys of `_ONLY_DEFAULTS` are kept for programs that name them,
    and honoured at their defaults alone."""

    correct_reward: float = 1.0
    incorrect_reward: float = 0.0
    format_error_reward: float = 0.0
    """For an answer in which none was found."""
    unk_error_reward: float = 0.0
    toolcall_bonus: float = 0.5
    """Added to what a right answer is paid where the row has `has_toolcall`."""
    apply_format_reward: bool = False
    math_reward_weight: float = 1.0
    use_math_orm: bool = False
    code_reward_weight: float = 1.0
    cot_reward_weight: float = 0.0
    use_together_code_interpreter: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name in _ONLY_DEFAULTS and getattr(self, each.name) != each.default:
                raise ConfigError(
                    f"`RewardConfig.{each.name}` is {getattr(self, each.name)!r}, and only {each.default!r} "
                    f"is honoured: {_ONLY_DEFAULTS[each.name]}."
                )

    def payment(self, output: RewardOutput, task_info: Mapping[str, Any]) -> float:
        """The reward for what a grader said; what is partly right is paid in proportion."""
        if output.is_correct:
            return self.correct_reward + (self.toolcall_bonus if task_info.get("has_toolcall") else 0.0)
        if not output.metadata["extracted"]:
            return self.format_error_reward
        return self.incorrect_reward + output.reward * (self.correct_reward - self.incorrect_reward)


_ONLY_DEFAULTS = {
    "apply_format_reward": "pay for the format with a `composite` grader",
    "math_reward_weight": "weigh several graders with a `composite` grader",
    "use_math_orm": "let a model judge with the `judge` grader",
    "code_reward_weight": "weigh several graders with a `composite` grader",
    "cot_reward_weight": "judge thoughts with the `judge` grader",
    "use_together_code_interpreter": "programs run in the sandbox of this machine",
    "unk_error_reward": "a grader that fails raises, and is never a reward",
}


class _RewardFn:
    """A grader as an object that is called, with a RewardInput or with what it is made of."""

    def __init__(self, grader: str, config: RewardConfig | None, options: Mapping[str, Any]) -> None:
        self._grader = grader_named(grader, **options)
        self._config = config

    def __call__(self, task_info: RewardInput | Mapping[str, Any], action: Any = None) -> RewardOutput:
        if isinstance(task_info, RewardInput):
            task_info, action = task_info.task_info, task_info.action
        output = grade_output(self._grader, task_info, action)
        if self._config is not None:
            output.reward = self._config.payment(output, task_info)
        return output


class RewardMathFn(_RewardFn):
    """The math grader, with its options; `config` says what its judgements pay."""

    def __init__(self, config: RewardConfig | None = None, **options: Any) -> None:
        super().__init__("math", config, options)


class RewardCodeFn(_RewardFn):
    """The code grader, with its options; `config` says what its judgements pay."""

    def __init__(self, config: RewardConfig | None = None, **options: Any) -> None:
        super().__init__("code", config, options)


class RewardSearchFn(_RewardFn):
    """The search grader, with its options; `config` says what its judgements pay."""

    def __init__(self, config: RewardConfig | None = None, **options: Any) -> None:
        super().__init__("search", config, options)


def math_reward_fn(task_info: Mapping[str, Any], action: Any) -> RewardOutput:
    """1 for a right mathematical answer."""
    return grade_output(_shared_grader("math"), task_info, action)


def code_reward_fn(task_info: Mapping[str, Any], action: Any) -> RewardOutput:
    """1 for a program that passes the tests of the row."""
    return grade_output(_shared_grader("code"), task_info, action)


def search_reward_fn(task_info: Mapping[str, Any], action: Any) -> RewardOutput:
    """1 for an exact match, a token F1 of 0.3 or more for a part of it."""
    return grade_output(_shared_grader("search"), task_info, action)


def f1_reward_fn(task_info: Mapping[str, Any], action: Any) -> RewardOutput:
    """The token F1; correct where it is 1."""
    return grade_output(_shared_grader("f1"), task_info, action)


def countdown_reward_fn(task_info: Mapping[str, Any], action: Any) -> RewardOutput:
    """1 for an expression of the row's numbers, `nums` or `numbers`, that comes to its `target`."""
    return grade_output(_shared_grader("countdown"), task_info, action)


def zero_reward(task_info: Mapping[str, Any], action: Any) -> RewardOutput:
    """Nothing, for environments that pay themselves."""
    return RewardOutput(reward=0.0)


def grade_output(grader: Grader, task_info: Mapping[str, Any], action: Any) -> RewardOutput:
    """A grader's verdict on an action. Raises RewardError where the row lacks a field that it needs."""
    answer = action.action if isinstance(action, Action) else action
    if not isinstance(answer, str):
        raise RewardError(
            f"A reward function was given {answer!r:.200} (a {type(answer).__name__}) as the action; "
            "it must be text."
        )
    grade = grader.grade(answer, with_own_names(task_info, grader.name))
    metadata = {"extracted": grade.extracted, "reason": grade.reason, **grade.metadata}
    return RewardOutput(reward=grade.score, is_correct=grade.is_correct, metadata=metadata)


@cache
def _shared_grader(name: str) -> Grader:
    return grader_named(name)
