"""An environment's calls: in threads, in the loop, too late, or where no thread can start."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rllm.engine.environment_pool import EnvironmentPool
from rllm.engine.world import EnvironmentWorker
from rllm.environments.base import BaseEnv


class Env(BaseEnv):
    def __init__(self, closed: list[str], *, is_async: bool = False, error: Exception | None = None) -> None:
        self.closed, self.is_async, self.error = closed, is_async, error

    def reset(self, seed: int | None = None) -> Any:
        return "go", {}

    async def step(self, action: Any) -> Any:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    def close(self) -> Any:
        if not self.is_async:
            self.closed.append("sync")
            return None
        return self._close()

    async def _close(self) -> None:
        self.closed.append("async")

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Env":
        raise NotImplementedError


async def test_an_environment_that_is_ready_too_late_is_closed_by_its_thread(
    release: threading.Event, settled: Callable[[Callable[[], bool]], Any]
) -> None:
    for is_async in (False, True):
        closed: list[str] = []
        pool, begun, may_go_on = EnvironmentPool(2), threading.Event(), threading.Event()

        def make() -> Env:
            begun.set()  # noqa: B023
            may_go_on.wait(20)  # noqa: B023
            return Env(closed, is_async=is_async)  # noqa: B023

        world = EnvironmentWorker(make, pool, step_timeout_s=20.0, slot=0)
        starting = asyncio.ensure_future(world.reset(0))
        await asyncio.to_thread(begun.wait, 20)
        assert await world.close() is None
        may_go_on.set()
        with pytest.raises(TimeoutError, match=r"ready .*after"):
            await starting
        assert closed == ["async" if is_async else "sync"]
        pool.close()


async def test_an_environments_own_timeout_is_its_own_error_and_ours_names_the_limit() -> None:
    for error, limit_s, message in (
        (TimeoutError("its own"), 20.0, "its own"),
        (None, 0.01, r"within 0\.01 s"),
    ):
        closed: list[str] = []
        pool = EnvironmentPool(1)
        world = EnvironmentWorker(lambda: Env(closed, error=error), pool, step_timeout_s=limit_s, slot=3)  # noqa: B023
        await world.reset(0)
        with pytest.raises(TimeoutError, match=message):
            await world.step("right")
        assert await world.close() is None
        assert closed == ["sync"]
        pool.close()


async def test_a_close_that_takes_too_long_is_told_to_end(
    settled: Callable[[Callable[[], bool]], Any],
) -> None:
    events: list[str] = []

    class NeverCloses(Env):
        async def _close(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                events.append("told to end")

    pool = EnvironmentPool(1)
    world = EnvironmentWorker(lambda: NeverCloses([], is_async=True), pool, step_timeout_s=20.0, slot=0)
    await world.reset(0)
    error = await world.close(0.02)
    assert isinstance(error, TimeoutError)
    assert "after 0.02 s" in str(error)
    await settled(lambda: events == ["told to end"])
    pool.close()


async def test_a_call_that_no_thread_can_be_started_for_is_refused_and_not_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, made = EnvironmentPool(2), list[str]()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.call(made.append, "refused", timeout_s=20.0)
    await pool.call(made.append, "made", timeout_s=20.0)
    assert made == ["made"]
    pool.close()


async def test_a_call_that_a_thread_does_not_end_leaves_its_place_to_another(
    release: threading.Event,
) -> None:
    pool = EnvironmentPool(1)
    stuck = pool.call(release.wait, timeout_s=0.02)
    later = pool.call(lambda: "answered", timeout_s=20.0)
    with pytest.raises(TimeoutError, match=r"within 0\.02 s"):
        await stuck
    assert await later == "answered"
    pool.close()
