"""An environment's calls: in threads, in the loop, too late, or where no thread can start."""

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from rllm.engine import environment_pool
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.engine.environment_pool import EnvironmentPool
from rllm.engine.rollout import run_trajectory
from rllm.engine.world import EnvironmentWorker
from rllm.environments.base import BaseEnv
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Outcome
from rllm.workflows import Workflow


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


async def test_a_call_that_ends_as_its_time_is_up_leaves_the_next_one_its_limit(
    release: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    settled: Callable[[Callable[[], bool]], Any],
) -> None:
    may_go_on = threading.Event()

    class HeldUp(deque[Any]):
        """Keeps a thread between the end of its call and the next."""

        def append(self, item: Any) -> None:
            super().append(item)
            may_go_on.wait(20)

    pool = EnvironmentPool(1)
    pool._done = HeldUp()
    with monkeypatch.context() as patched:
        patched.setattr(environment_pool, "TICK_S", 3600.0)
        call = pool.call(str, timeout_s=0.0)
        await settled(lambda: bool(pool._done))
        pool._tick()
    may_go_on.set()
    await asyncio.gather(call, return_exceptions=True)
    await settled(lambda: not pool._done)
    with pytest.raises(TimeoutError, match=r"within 0\.02 s"):
        await pool.call(release.wait, 0.3, timeout_s=0.02)
    pool.close()


async def test_what_an_async_method_returns_too_late_is_closed(
    release: threading.Event, settled: Callable[[Callable[[], bool]], Any]
) -> None:
    async def step() -> None:
        return None

    coroutine, pool = step(), EnvironmentPool(1)
    with pytest.raises(TimeoutError):
        await pool.call(lambda: release.wait() and coroutine, timeout_s=0.02)
    release.set()
    await settled(lambda: inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED)
    pool.close()


def _threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "rllm-environment"}


async def test_a_pool_looks_after_its_calls_and_no_longer(
    release: threading.Event, settled: Callable[[Callable[[], bool]], Any]
) -> None:
    pool = EnvironmentPool(2)
    for limit_s in (20.0, 0.02):
        calls = [pool.call(release.wait, 0.05, timeout_s=limit_s), pool.call(str, timeout_s=20.0)]
        assert pool._timer is not None
        await asyncio.wait(calls)
        assert (calls[0].exception() is None) == (limit_s == 20.0)
        await settled(lambda: pool._timer is None)
    pool.close()


async def test_quick_calls_share_a_thread_at_once_and_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment_pool, "TICK_S", 3600.0)
    pool, threads = EnvironmentPool(8), list[threading.Thread]()
    for _ in range(3):
        calls = [pool.call(threading.current_thread, timeout_s=20.0) for _ in range(4)]
        threads += await asyncio.gather(*calls)
        while threads[0] in _threads() and not pool._idle:
            await asyncio.sleep(0)
    assert len(set(threads)) == 1
    pool.close()


async def test_results_of_more_calls_than_are_settled_at_once_all_arrive() -> None:
    number = 2 * environment_pool.MOST_A_SLICE + 3
    pool, ends = EnvironmentPool(1), threading.Event()
    calls = [pool.call(int, each, timeout_s=20) for each in range(number)]
    last = pool.call(ends.set, timeout_s=20)
    assert ends.wait(20)  # meanwhile the loop settles nothing
    async with asyncio.timeout(20):
        assert await asyncio.gather(*calls, last) == [*range(number), None]
    pool.close()


async def test_environments_that_may_not_run_side_by_side_get_one_thread(
    release: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    settled: Callable[[Callable[[], bool]], Any],
) -> None:
    for name in ("TICK_S", "SLOW_S"):
        monkeypatch.setattr(environment_pool, name, 0.0)
    threads_before, pool = _threads(), EnvironmentPool(1)
    begun = threading.Event()
    calls = [pool.call(lambda: begun.set() or release.wait(), timeout_s=20.0) for _ in range(3)]
    await settled(begun.is_set)
    for _ in range(100):
        await asyncio.sleep(0)
    (thread,) = _threads() - threads_before
    assert thread.daemon, "one that hangs does not hold up the end of the process"
    release.set()
    assert await asyncio.gather(*calls) == [True] * 3
    pool.close()


async def test_what_an_async_method_returns_to_nobody_is_closed(
    release: threading.Event, settled: Callable[[Callable[[], bool]], Any]
) -> None:
    async def step() -> None:
        return None

    begun, coroutine, pool = threading.Event(), step(), EnvironmentPool(1)

    def late() -> Any:
        begun.set()
        release.wait()
        return coroutine

    call = pool.call(late, timeout_s=20.0)
    await settled(begun.is_set)
    call.cancel()
    release.set()
    await settled(lambda: inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED)
    pool.close()


async def test_no_thread_of_an_engine_outlives_its_run(
    env_class: type[BaseEnv], agent_class: Any, settled: Callable[[Callable[[], bool]], Any]
) -> None:
    class Visits(Workflow):
        def __init__(self, rollout_engine: Any, **kwargs: Any) -> None:
            super().__init__(rollout_engine, **kwargs)
            self.env = env_class()

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            await self.run_in_executor(self.env.reset)

    threads_before = _threads()
    client = ScriptedClient(lambda messages: "go")
    workflows = AgentWorkflowEngine(Visits, {}, client)
    await workflows.initialize_pool()
    for engine in (workflows, AgentExecutionEngine(agent_class, env_class, rollout_engine=client)):
        assert [each.outcome async for each in engine.run([{"task_id": "t"}])] == [Outcome.SCORED]
    await run_trajectory(agent_class(), lambda: env_class(), client)
    await settled(lambda: _threads() <= threads_before)
    assert env_class.world.num_open == 0  # type: ignore[attr-defined]
    assert len(env_class.world.made) == 4  # type: ignore[attr-defined]
