"""The interface of an environment, and the one place that reads what it returned.

    task ──► from_dict ──► reset(seed) ──► (observation, info)
                            step(action) ──► 4- or 5-tuple ──► unpack_step ──► StepResult

Environments are user code: whatever they return is checked here before it becomes part of a trajectory, so a
reward of None or NaN stops at the class that made it and never reaches an advantage.
"""

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rllm.errors import AgentError
from rllm.types.judgements import finite_number

CUT_OFF = "TimeLimit.truncated"
"""Key of `info`: True where a limit ended the episode, in Gym's own spelling for its four-value form."""

Moved = tuple[Any, float, bool, dict[str, Any]]
"""(observation, reward, done, info)."""


class BaseEnv(ABC):
    """One world that an agent acts in, one episode at a time.

    `reset`, `step` and `close` may be `async def`: the engine then awaits them in its event loop. Plain ones
    run in a thread, where they may block.
    """

    _idx: Any = None

    @property
    def idx(self) -> Any:
        """Which slot of the engine this instance fills; set by the engine."""
        return self._idx

    @idx.setter
    def idx(self, value: Any) -> None:
        self._idx = value

    @abstractmethod
    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: the first observation, and what else there is to know about it.

        With a `seed` the episode depends on the seed and the actions alone.
        """

    @abstractmethod
    def step(
        self, action: Any
    ) -> tuple[Any, float, bool, dict[str, Any]] | tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act: (observation, reward, done, info), or Gymnasium's five with terminated and truncated apart.

        The built-in environments return four, and `info["TimeLimit.truncated"]` where a limit ended the
        episode. Raise ActionError for an action that the policy wrote and nobody can read.
        """

    def close(self) -> None:  # noqa: B027  most environments own nothing that needs closing
        """Free what the environment holds. May be called twice."""

    @staticmethod
    @abstractmethod
    def from_dict(info: dict[str, Any]) -> "BaseEnv":
        """The environment that a task describes."""

    @staticmethod
    def is_multithread_safe() -> bool:
        """True when two instances may step at the same time in two threads."""
        return True


@dataclass(kw_only=True, slots=True)
class StepResult:
    """The result of one step of an environment, checked."""

    observation: Any
    reward: float
    """Finite."""
    done: bool
    """The episode is over, whatever the reason."""
    truncated: bool
    """It is over only because a limit cut it off; never True when it came to its own end in the same step."""
    info: dict[str, Any]
    grader_s: float = 0.0
    """Seconds of the step that its graders took, where `rllm.rewards.clock` was told."""


def moved(
    observation: Any,
    reward: float,
    info: dict[str, Any],
    *,
    terminated: bool = False,
    truncated: bool = False,
) -> Moved:
    """The return value of `step`. `terminated`: the episode came to its end; `truncated`: a limit cut it
    off."""
    cut_off = {CUT_OFF: True} if truncated and not terminated else {}
    return observation, reward, terminated or truncated, {**info, **cut_off}


def call_reset(env: BaseEnv, seed: int | None) -> Any:
    """The return value of `env.reset`; an awaitable of it where `reset` is async."""
    return env.reset(seed=seed) if _reset_takes_seed(type(env)) else env.reset()


def unpack_reset(env: BaseEnv, result: Any) -> tuple[Any, dict[str, Any]]:
    """Check what `env.reset` returned. AgentError for anything but an observation and a dict."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise AgentError(
            f"{type(env).__name__}.reset returned {_short_repr(result)}; return a tuple (observation, info) "
            "with a dict as info."
        )
    return result


def unpack_step(env: BaseEnv, result: Any) -> StepResult:
    """Check what `env.step` returned. AgentError for a wrong shape, RewardError for an impossible reward."""
    name = f"{type(env).__name__}.step"
    if not isinstance(result, tuple) or len(result) not in (4, 5):
        raise AgentError(
            f"{name} returned {_short_repr(result)}; return a tuple (observation, reward, done, info) or "
            "(observation, reward, terminated, truncated, info)."
        )
    observation, reward, terminated, *rest = result
    truncated = rest[0] if len(rest) == 2 else False
    info = rest[-1]
    for flag, value in (("done" if len(rest) == 1 else "terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool | np.bool_):
            raise AgentError(f"{name} returned {_short_repr(value)} as `{flag}`; it must be True or False.")
    if not isinstance(info, dict):
        raise AgentError(f"{name} returned {_short_repr(info)} as `info`; it must be a dict.")
    cut_off = truncated and not terminated if len(rest) == 2 else terminated and info.get(CUT_OFF) is True
    return StepResult(
        observation=observation,
        reward=finite_number(reward, f"{name} returned", "the reward"),
        done=bool(terminated or truncated),
        truncated=bool(cut_off),
        info=info,
    )


@lru_cache(maxsize=256)
def _reset_takes_seed(env_class: type[BaseEnv]) -> bool:
    parameters = inspect.signature(env_class.reset).parameters.values()
    return any(each.name == "seed" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def _short_repr(value: Any) -> str:
    """The value as a message shows it: its type and the beginning of its repr."""
    text = repr(value)
    return f"{text[:200]}{'…' if len(text) > 200 else ''} (a {type(value).__name__})"
