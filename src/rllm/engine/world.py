"""One environment as a rollout sees it: every call has a deadline, and what comes back has been checked.

plain method ──► a thread of the pool ──┐
async method ──► the engine's own loop ─┴──► checked result, or TimeoutError, or what the method raised
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rllm.engine.environment_pool import EnvironmentPool
from rllm.environments.base import BaseEnv, StepResult, call_reset, unpack_reset, unpack_step
from rllm.environments.checks import require_finite
from rllm.errors import AgentError, error_text
from rllm.rewards.clock import GradingClock

MakeEnv = Callable[[], BaseEnv] | BaseEnv


class EnvironmentWorker:
    """The environment of one rollout. Calls go one after the other; `close` may come at any time."""

    def __init__(self, make_env: MakeEnv, pool: EnvironmentPool, *, step_timeout_s: float, slot: int) -> None:
        self._make_env = make_env
        self._pool = pool
        self._step_timeout_s = step_timeout_s
        self._slot = slot
        self._env: BaseEnv | None = None
        self._steps_in_loop = False
        self._over = False
        self._lock = threading.Lock()
        """Between the thread that makes the environment and the loop that may have given it up by then."""

    async def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Make the environment and reset it."""
        try:
            start = await self._pool.call(self._open, seed, timeout_s=self._step_timeout_s)
            assert self._env is not None, "it was opened"
            # Known before the first step, so that no thread is woken to make a coroutine.
            self._steps_in_loop = _is_async(type(self._env), "step")
            if inspect.isawaitable(start):
                start = _unpack_start(self._env, await self._in_loop(start))
        except Exception as error:
            if self._env is not None:
                _note(error, type(self._env), "reset")
            raise
        return start

    async def step(self, action: Any) -> StepResult:
        assert self._env is not None, "reset came first"
        try:
            if self._steps_in_loop:
                return await self._awaited_step(self._env, self._env.step(action))
            result = await self._pool.call(self._move, action, timeout_s=self._step_timeout_s)
            return result if isinstance(result, StepResult) else await self._awaited_step(self._env, result)
        except Exception as error:
            _note(error, type(self._env), "step")
            raise

    async def _awaited_step(self, env: BaseEnv, awaitable: Any) -> StepResult:
        with GradingClock() as clock:
            result = _unpack_step(env, await self._in_loop(awaitable))
        result.grader_s = clock.seconds
        return result

    async def close(self, patience_s: float | None = None) -> Exception | None:
        """Close the environment; what it raises is returned, because a result had already been reached.

        Whoever waits may be cancelled, or run out of patience: it is closed all the same.
        """
        closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.wait({closing}, timeout=patience_s)
        except asyncio.CancelledError:
            await asyncio.wait({closing}, timeout=patience_s)
            raise
        if closing.done():
            return closing.result()
        closing.cancel()
        return TimeoutError(f"The environment had not closed after {patience_s} s.")

    async def _close(self) -> Exception | None:
        with self._lock:
            self._over = True
            env = self._env
        # The one that is inherited does nothing, so no thread is woken for it.
        if env is None or type(env).close is BaseEnv.close:
            return None
        try:
            # Shielded: what is in the pool is done, whoever waits for it.
            result: Any = await asyncio.shield(self._pool.call(env.close, timeout_s=self._step_timeout_s))
            if inspect.isawaitable(result):
                await self._in_loop(result)
        except Exception as error:  # noqa: BLE001  a user's close() may raise anything
            return error
        except (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:  # noqa: BLE001  sys.exit(), which would end the loop
            return RuntimeError(f"The environment raised {type(error).__name__}({error_text(error)}).")
        return None

    async def _in_loop(self, awaitable: Any) -> Any:
        limit = asyncio.timeout(self._step_timeout_s)
        try:
            async with limit:
                return await awaitable
        except TimeoutError as late:
            # A timeout of the environment's own calls, whose message says more.
            if not limit.expired():
                raise
            raise TimeoutError(f"The environment did not answer within {self._step_timeout_s:g} s.") from late

    # ---- in a thread -----------------------------------------------------------------------------------

    def _open(self, seed: int) -> Any:
        """The checked result of `reset`; an awaitable of the unchecked one where it is async."""
        env = self._make_env if isinstance(self._make_env, BaseEnv) else self._make_env()
        if not isinstance(env, BaseEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise AgentError(f"The environment to play in is {env!r:.200}; it must be a rllm.BaseEnv.")
        with self._lock:
            self._env, too_late = env, self._over
        # `_close` found no environment, so nobody else will close this one.
        if too_late:
            close_result: Any = env.close()
            if inspect.isawaitable(close_result):
                asyncio.run(_await_value(close_result))
            raise TimeoutError(f"{type(env).__name__} was ready only after its rollout had been given up.")
        env.idx = self._slot
        result = call_reset(env, seed)
        return result if inspect.isawaitable(result) else _unpack_start(env, result)

    def _move(self, action: Any) -> Any:
        assert self._env is not None, "reset came first"
        with GradingClock() as clock:
            result: Any = self._env.step(action)
        if inspect.isawaitable(result):
            return result
        step = _unpack_step(self._env, result)
        step.grader_s = clock.seconds
        return step


def made_of(env_class: type[BaseEnv], info: dict[str, Any]) -> BaseEnv:
    """The environment that a task describes. What goes wrong names the class that was asked."""
    try:
        env = env_class.from_dict(info)
    except Exception as error:
        _note(error, env_class, "from_dict")
        raise
    if not isinstance(env, BaseEnv):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AgentError(f"{env_class.__name__}.from_dict returned {env!r:.200}; return a rllm.BaseEnv.")
    return env


def _unpack_start(env: BaseEnv, result: Any) -> tuple[Any, dict[str, Any]]:
    observation, info = unpack_reset(env, result)
    require_finite(observation, f"{type(env).__name__}.reset")
    return observation, info


def _unpack_step(env: BaseEnv, result: Any) -> StepResult:
    step = unpack_step(env, result)
    require_finite(step.observation, f"{type(env).__name__}.step")
    return step


def _note(error: Exception, env_class: type[BaseEnv], method: str) -> None:
    """Let the record of a failure say where it came from, once: programs raise one object again and again."""
    note = f"{env_class.__name__}.{method} raised {type(error).__name__}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


async def _await_value(awaitable: Any) -> Any:
    return await awaitable


@lru_cache(maxsize=256)
def _is_async(env_class: type[BaseEnv], method: str) -> bool:
    return inspect.iscoroutinefunction(getattr(env_class, method))
