"""Reward functions of verifiers that fail: verifiers logs them and goes on with 0.0; here they are kept.

rubric.funcs ──► each wrapped ──► an exception, or no finite number ──► ScorerErrors of this rollout
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from rllm.errors import RewardError
from rllm.types.judgements import finite_number

_ERRORS: ContextVar[list[tuple[str, Exception]]] = ContextVar("scorer_errors")


def watch_rubric(rubric: Any) -> None:
    """Wrap every reward function of a rubric, of those in it and of the environments that it chooses from."""
    rubric.funcs = [_with_notes(function) for function in rubric.funcs]
    for each in getattr(rubric, "rubrics", ()):
        watch_rubric(each)
    for environment in getattr(rubric, "env_map", {}).values():
        watch_rubric(environment.rubric)


async def score(rubric: Any, state: Any) -> None:
    """Let the rubric score a rollout. Raises RewardError where one of its functions failed."""
    errors: list[tuple[str, Exception]] = []
    # A context variable, because one rubric scores several rollouts at the same time.
    token = _ERRORS.set(errors)
    try:
        await rubric.score_rollout(state)
        await rubric.cleanup(state)
    except Exception as error:
        raise RewardError(f"The rubric {type(rubric).__name__} raised {error!r:.500}") from error
    finally:
        _ERRORS.reset(token)
    for name, error in errors:
        raise RewardError(f"The reward function {name} failed: {error!r:.500}") from error


def _with_notes(function: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(function, "__name__", repr(function))

    def note(error: Exception) -> None:
        _ERRORS.get([]).append((name, error))

    def check(value: Any) -> Any:
        try:
            return finite_number(value, f"{name} returned", "the reward")
        except RewardError as error:
            note(error)
            raise

    async def check_later(result: Any) -> Any:
        try:
            value = await result
        except Exception as error:
            note(error)
            raise
        return check(value)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            note(error)
            raise
        return check_later(result) if inspect.isawaitable(result) else check(result)

    return call
