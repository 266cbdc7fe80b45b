import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator
from contextvars import ContextVar

import pytest

from rllm import run
from rllm.engine.event_loop import on_sigterm


async def _thread_of_the_loop() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


NAME = ContextVar("NAME", default="nobody's")


async def _name() -> str:
    return NAME.get()


async def _fails() -> None:
    raise LookupError("the coroutine's own")


def test_without_a_loop_a_coroutine_runs_here() -> None:
    assert run(_thread_of_the_loop()) == threading.current_thread().name
    with pytest.raises(LookupError, match="own"):
        run(_fails())


async def test_inside_a_running_loop_a_coroutine_gets_a_thread_of_its_own() -> None:
    assert run(_thread_of_the_loop()) == "rllm-run"
    NAME.set("the caller's")
    assert run(_name()) == "the caller's"
    with pytest.raises(LookupError, match="own"):
        run(_fails())
    assert "rllm-run" not in {each.name for each in threading.enumerate()}


async def test_ctrl_c_cancels_what_runs_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started, events = threading.Event(), list[str]()

    async def saves_when_cancelled() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("saved")
            raise

    join = threading.Thread.join

    def interrupted_once(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name == "rllm-run" and "interrupted" not in events:
            started.wait()
            events.append("interrupted")
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        run(saves_when_cancelled())
    assert events == ["interrupted", "saved"]


def test_sigterm_does_something_else_meanwhile_and_only_in_the_main_thread() -> None:
    received, before = list[int](), signal.getsignal(signal.SIGTERM)
    with on_sigterm(lambda number, _: received.append(number)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]

        def elsewhere() -> None:
            with on_sigterm(lambda *_: None):
                received.append(0)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert received == [signal.SIGTERM, 0]
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM, 0, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_was_not_pythons_becomes_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in ((None, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)):
        handlers: list[object] = []
        monkeypatch.setattr(signal, "signal", lambda _, act, was=before: (handlers.append(act), was)[1])  # noqa: B023
        with on_sigterm(print):
            pass
        assert handlers == [print, after]


def test_sigterm_ends_a_coroutine_as_ctrl_c_would_and_a_second_one_at_once() -> None:
    events: list[str] = []

    async def ends_itself() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            events.append("told to end")
            raise

    with pytest.raises(KeyboardInterrupt):
        run(ends_itself())
    assert events == ["told to end"]

    async def hears_twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        events.append("went on")

    with pytest.raises(KeyboardInterrupt):
        run(hears_twice())
    assert events == ["told to end"]


def test_a_coroutine_that_cancels_itself_is_no_signal() -> None:
    async def gives_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(gives_up())


async def test_a_loop_of_its_own_leaves_no_generator_thread_or_loop_open() -> None:
    closed: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            closed.append("generator")

    kept = numbers()

    async def leaves_everything_open() -> str:
        loops.append(asyncio.get_running_loop())
        assert await anext(kept) == 1
        assert asyncio.get_event_loop() is loops[0]
        return (await asyncio.to_thread(threading.current_thread)).name

    name = run(leaves_everything_open())
    assert closed == ["generator"]
    assert loops[0].is_closed()
    assert name not in {each.name for each in threading.enumerate()}


async def test_a_loop_of_its_own_ends_what_runs_beside_the_coroutine() -> None:
    ends: list[str] = []

    async def beside() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def leaves_a_task() -> "asyncio.Task[None]":
        task = asyncio.create_task(beside())
        await asyncio.sleep(0)
        return task

    task = run(leaves_a_task())
    assert (ends, task.cancelled()) == (["cancelled"], True)
