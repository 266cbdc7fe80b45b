"""Checks of a user's classes before the first rollout, and of the values that they return.

agent_class, env_class, arguments ──► signatures and properties ──► nothing, or an AgentError with the mend
Episode of a workflow or program  ──► types of what it holds    ──┘
"""

import inspect
from collections.abc import Mapping
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.environments.base import BaseEnv
from rllm.errors import AgentError, shorten
from rllm.types.episode import Episode, Step, TerminationReason, Trajectory
from rllm.types.messages import FinishReason, ModelOutput


def require_agent_class(agent_class: Any, agent_args: Mapping[str, Any]) -> None:
    """Raises AgentError unless agents can be made and called as engines do."""
    if not (isinstance(agent_class, type) and issubclass(agent_class, BaseAgent)):
        raise AgentError(f"agent_class is {agent_class!r}; it must be a subclass of rllm.BaseAgent.")
    _require_whole(agent_class)
    _require_takes(agent_class, "__init__", (), agent_args, "agent_args")
    _require_takes(agent_class, "reset", ())
    _require_takes(agent_class, "update_from_env", ("observation", "reward", "done", "info"))
    _require_takes(agent_class, "update_from_model", ("response",))
    for name in ("reset", "update_from_env", "update_from_model"):
        if inspect.iscoroutinefunction(getattr(agent_class, name)):
            raise AgentError(
                f"{agent_class.__name__}.{name} is async, but agents are called and not awaited; write it as "
                "a plain `def`, and let the environment do what waits."
            )
    for name in ("chat_completions", "trajectory"):
        if inspect.isfunction(inspect.getattr_static(agent_class, name, None)):
            raise AgentError(
                f"{agent_class.__name__}.{name} is a method; make it a property: put @property above it."
            )


def require_env_class(env_class: Any) -> None:
    """Raises AgentError unless environments can be made of tasks and called as engines do."""
    if not (isinstance(env_class, type) and issubclass(env_class, BaseEnv)):
        raise AgentError(f"env_class is {env_class!r}; it must be a subclass of rllm.BaseEnv.")
    _require_whole(env_class)
    _require_takes(env_class, "reset", ())
    _require_takes(env_class, "step", ("action",))
    _require_takes(env_class, "close", ())
    if inspect.isfunction(inspect.getattr_static(env_class, "from_dict")):
        raise AgentError(
            f"{env_class.__name__}.from_dict is a plain method, but there is no environment yet when it is "
            "called; put @staticmethod above it."
        )
    _require_takes(env_class, "from_dict", ("info",))
    if not isinstance(env_class.is_multithread_safe(), bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AgentError(
            f"{env_class.__name__}.is_multithread_safe() is {env_class.is_multithread_safe()!r}; it must be "
            "True or False."
        )


def require_episode(episode: Episode, source: str) -> None:
    """Raises AgentError for an episode of a user's that holds something else than trajectories of steps."""
    for name, kind in (("trajectories", list), ("artifacts", dict), ("metrics", dict), ("info", dict)):
        _require_is(getattr(episode, name), kind, f"{source}: `Episode.{name}`")
    _require_is(episode.termination_reason, TerminationReason, f"{source}: `Episode.termination_reason`")
    for place, trajectory in enumerate(episode.trajectories):
        require_trajectory(trajectory, f"{source}: trajectory {place}")


def require_trajectory(trajectory: Trajectory, where: str) -> None:
    """Raises AgentError for one of a user's that holds something else than steps."""
    _require_is(trajectory, Trajectory, where)
    for name, kind in _OF_TRAJECTORIES:
        if not isinstance(value := getattr(trajectory, name), kind):
            _require_is(value, kind, f"{where}, its `{name}`,")
    for number, step in enumerate(trajectory.steps):
        if not isinstance(step, Step):  # pyright: ignore[reportUnnecessaryIsInstance]
            _require_is(step, Step, f"{where}, step {number}")
        # The text of an error takes longer than the checks, and every turn of a run comes through here twice.
        for name in ("info", "timings", "usage"):
            if not isinstance(value := getattr(step, name), dict):
                _require_is(value, dict, f"{where}, step {number}, its `{name}`,")
        for name, value in step.timings.items():
            if not isinstance(value, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
                _require_is(value, float, f"{where}, step {number}, its `timings[{name!r}]`,")
        output = step.model_output
        if output is not None and not (
            isinstance(output, ModelOutput)  # pyright: ignore[reportUnnecessaryIsInstance]
            and isinstance(output.finish_reason, FinishReason)  # pyright: ignore[reportUnnecessaryIsInstance]
        ):
            label = f"{where}, step {number}, its `model_output`"
            _require_is(output, ModelOutput, label)
            _require_is(output.finish_reason, FinishReason, f"{label}, its `finish_reason`")


_OF_TRAJECTORIES = (
    ("name", str),
    ("uid", str),
    ("termination_reason", TerminationReason),
    ("steps", list),
    ("signals", dict),
    ("info", dict),
)


def _require_is(value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise AgentError(
            f"{what} is {shorten(repr(value), 200)} (a {type(value).__name__}); it must be a {kind.__name__}."
        )


def _require_whole(user_class: type) -> None:
    left = sorted(getattr(user_class, "__abstractmethods__", ()))
    if left:
        raise AgentError(f"{user_class.__name__} does not define {', '.join(left)}; write it.")


def _require_takes(
    user_class: type,
    method: str,
    arguments: tuple[str, ...],
    keywords: Mapping[str, Any] | None = None,
    named_by: str = "",
) -> None:
    """Raise AgentError unless the method takes `arguments` by position and `keywords` by name."""
    callee = user_class if method == "__init__" else getattr(user_class, method)
    is_bound = method == "__init__" or not inspect.isfunction(inspect.getattr_static(user_class, method))
    try:
        signature = inspect.signature(callee)
    except ValueError:  # made in C: it says what it takes when it is called
        return
    try:
        signature.bind(*(() if is_bound else ("self",)), *arguments, **(keywords or {}))
    except TypeError as error:
        call = ", ".join([*arguments, *(f"{name}=…" for name in keywords or ())])
        call_text = f"{user_class.__name__}({call})" if method == "__init__" else f"{method}({call})"
        mend = f"change `{named_by}` or the class" if named_by else "change the method's parameters"
        raise AgentError(
            f"{user_class.__name__}.{method}{signature} cannot be called as {call_text}: {error}; {mend}."
        ) from error
