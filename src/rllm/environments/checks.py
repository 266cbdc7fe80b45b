"""Does an environment keep the contract? Run once while it is written; engines do not pay for it.

env, a sample action ──► two openings with one seed ──► every problem found ──► one AgentError
"""

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from rllm.environments.base import BaseEnv, call_reset, unpack_reset, unpack_step
from rllm.errors import AgentError, RewardError


def check_env(env: BaseEnv, action: Any, *, seed: int = 0) -> None:
    """Reset `env` twice with `seed`, take `action` each time, and raise an AgentError listing what is wrong.

    Async methods are awaited in an event loop of their own, so check such an environment where none is
    running. What the environment itself raises is not caught: its own traceback says more.
    """
    name = type(env).__name__
    if not isinstance(env, BaseEnv):
        raise AgentError(f"{name} is not an environment; derive it from rllm.environments.BaseEnv.")
    problems: list[str] = []
    first, second = _openings(env, action, seed, problems)
    for part, value in first.items():
        if (problem := lost_in_json(value)) is not None:
            problems.append(f"{part} {problem}")
        elif part in second and lost_in_json(second[part]) is None and value != second[part]:
            problems.append(
                f"{part} differs between two episodes with seed {seed}: {value!r} and {second[part]!r}; let "
                "`reset` take `seed`, clear all state, and draw every random number from the seed"
            )
    if not isinstance(env.is_multithread_safe(), bool):
        problems.append(
            f"is_multithread_safe() returned {env.is_multithread_safe()!r}; it must be True or False"
        )
    env.idx = 7
    if env.idx != 7:
        problems.append(f"idx is {env.idx!r} after it was set to 7; engines keep their slot number in it")
    raise_problems(name, problems)


def _openings(env: BaseEnv, action: Any, seed: int, problems: list[str]) -> list[dict[str, Any]]:
    """Two of them, in one event loop where the environment needs any."""
    if not any(inspect.iscoroutinefunction(method) for method in (env.reset, env.step)):
        return [_opening(env, action, lambda: call_reset(env, seed), env.step, problems) for _ in range(2)]
    with asyncio.Runner() as loop:

        def reset() -> Any:
            return _run_if_async(call_reset(env, seed), loop)

        def step(action: Any) -> Any:
            return _run_if_async(env.step(action), loop)

        return [_opening(env, action, reset, step, problems) for _ in range(2)]


def _opening(
    env: BaseEnv,
    action: Any,
    reset: Callable[[], Any],
    step: Callable[[Any], Any],
    problems: list[str],
) -> dict[str, Any]:
    """The parts of a reset and of one step, by the name that a message gives them."""
    parts: dict[str, Any] = {}
    try:
        start = unpack_reset(env, reset())
        parts["the observation of reset()"], parts["the info of reset()"] = start
        result = unpack_step(env, step(action))
    except (AgentError, RewardError) as error:
        if str(error) not in problems:
            problems.append(str(error))
        return parts
    return parts | {
        "the observation of step()": result.observation,
        "the reward of step()": result.reward,
        "`done` of step()": result.done,
        "the info of step()": result.info,
    }


def _run_if_async(result: Any, loop: asyncio.Runner) -> Any:
    """The value of an async method's awaitable, or of a plain method."""
    return loop.run(result) if inspect.iscoroutine(result) else result


def lost_in_json(value: Any) -> str | None:
    """The damage of storing `value` as JSON and reading it again; None when it comes back equal."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"cannot be stored as JSON: {error}; use text, finite numbers, lists and dicts"
    if type(value) is not type(copy := json.loads(text)) or copy != value:
        return f"comes back from JSON as {text[:200]}; use lists instead of tuples, and text as keys"
    return None


def require_finite(observation: Any, method: str) -> None:
    """Raises AgentError for an observation that is or holds NaN or an infinity: nobody can read it, and no
    store keeps it."""
    part = None if isinstance(observation, str) else _part_not_finite(observation, _MAX_DEPTH)
    if part is not None:
        raise AgentError(
            f"{method} returned the observation {observation!r:.200}; it must not hold {part!r:.80}: say "
            "in words what there is to see, or mend what computed it."
        )


_MAX_DEPTH = 100
"""An observation that is nested deeper, or holds itself, is not looked through to its end."""


def _part_not_finite(value: Any, depth: int) -> Any:
    """The first number or array in it that is not finite; None where there is none."""
    if isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
        results = (_part_not_finite(part, depth - 1) for part in parts if type(part) is not str)
        return next((part for part in results if part is not None), None) if depth else None
    if isinstance(value, np.ndarray) and value.dtype.kind not in "fc":
        return None
    is_number = isinstance(value, float | np.ndarray | np.floating)
    return value if is_number and not np.isfinite(value).all() else None


def raise_problems(name: str, problems: list[str]) -> None:
    """Raise one AgentError that lists all `problems` of the class `name`; nothing when there are none."""
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise AgentError(f"{name} breaks the contract in {len(problems)} place(s):{lines}")
