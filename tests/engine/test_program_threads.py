"""Functions of users in threads, below the engine that starts them."""

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm.engine.program_threads import _LATE_CLOSES, OutOfTime, ProgramLoop, ProgramRunner, _future

sys.path.insert(0, str(Path(__file__).parent))
from bad_tasks import play, program_engine, tasks

TRACED = """
import asyncio, sys, threading, time
from rllm.engine.program_threads import ProgramRunner

def trace(*_):
    return trace

begun = threading.Event()

def spins():
    begun.set()
    while True:
        pass

async def main():
    runner = ProgramRunner(stops_threads=True)
    for number in range(3):
        end = await runner.run(lambda: number, is_async=False, timeout_s=20)
        print(end.value)
    stopped = asyncio.create_task(runner.run(spins, is_async=False, timeout_s=20))
    await asyncio.to_thread(begun.wait, 20)
    stopped.cancel()
    await asyncio.wait({stopped})
    print((await runner.run(lambda: "after", is_async=False, timeout_s=20)).value)

threading.settrace(trace)
sys.settrace(trace)
asyncio.run(main())
"""


def test_a_program_under_a_debugger_or_with_coverage_ends_as_without() -> None:
    """A request to interrupt a thread that is left open makes Python 3.11 stand still where it is traced."""
    traced = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=60)
    assert (traced.stdout.split(), traced.stderr) == (["0", "1", "2", "after"], "")


async def test_a_program_whose_time_is_up_is_given_up_told_to_end_and_awaited(
    advance: Callable[[float], None], settled: Callable[[Callable[[], bool]], Any]
) -> None:
    events: list[str] = []

    async def endless() -> None:
        events.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            events.append("told to end")

    async def give_up() -> None:
        events.append("given up")

    runner = ProgramRunner()
    running = asyncio.create_task(runner.run(endless, is_async=True, timeout_s=600.0, give_up=give_up))
    await settled(lambda: events == ["begun"])
    advance(601.0)
    with pytest.raises(OutOfTime, match=r"600 s; .*in endless") as raised:
        await running
    assert events == ["begun", "given up", "told to end"]
    assert (raised.value.is_abandoned, runner.num_abandoned) == (False, 0)
    await runner.close()


async def test_what_does_not_end_is_left_behind_and_counted_and_the_next_runs(
    release: threading.Event,
    advance: Callable[[float], None],
    settled: Callable[[Callable[[], bool]], Any],
) -> None:
    has_begun, ends = list[bool](), list[str]()

    def blocks() -> None:
        has_begun.append(True)
        end = "stopped, with whatever lock it held"
        try:
            release.wait()
            end = "by itself"
        finally:
            ends.append(end)

    async def blocks_the_loop() -> None:
        blocks()

    before = set(threading.enumerate())
    runner = ProgramRunner(grace_s=0.01)
    for number, (program, is_async) in enumerate(((blocks, False), (blocks_the_loop, True)), start=1):
        running = asyncio.create_task(runner.run(program, is_async=is_async, timeout_s=600.0))
        await settled(lambda: len(has_begun) == number)  # noqa: B023
        advance(601.0)
        with pytest.raises(OutOfTime, match=r"in blocks") as raised:
            await running
        assert (raised.value.is_abandoned, runner.num_abandoned) == (True, number)
    assert (await runner.run(asyncio.sleep, 0, "slept", is_async=True, timeout_s=20)).value == "slept"
    assert (await runner.run(lambda: "ran", is_async=False, timeout_s=20)).value == "ran"
    await runner.close()
    release.set()
    await settled(
        lambda: not {each for each in threading.enumerate() if each.name == "rllm-programs"} - before
    )
    await settled(lambda: len(ends) == 2)
    assert ends == ["by itself"] * 2


async def test_a_plain_function_may_be_stopped_and_what_it_makes_of_that_is_its_end(
    advance: Callable[[float], None], settled: Callable[[Callable[[], bool]], Any]
) -> None:
    has_begun = list[bool]()

    def spins() -> None:
        has_begun.append(True)
        while True:
            pass

    def returns_when_told() -> str:
        try:
            spins()
        except BaseException:  # noqa: BLE001  as careless programs do
            return "done"

    runner = ProgramRunner(grace_s=20.0, stops_threads=True)
    for number, program in enumerate((spins, returns_when_told), start=1):
        running = asyncio.create_task(runner.run(program, is_async=False, timeout_s=600.0))
        await settled(lambda: len(has_begun) == number)  # noqa: B023
        advance(601.0)
        with pytest.raises(OutOfTime, match=r"in spins") as raised:
            await running
        assert not raised.value.is_abandoned
    assert runner.num_abandoned == 0


async def test_a_cancelled_wait_ends_an_async_program_before_it_returns() -> None:
    begun, is_over = threading.Event(), list[bool]()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            is_over.append(True)

    runner = ProgramRunner()
    waiting = asyncio.create_task(runner.run(endless, is_async=True, timeout_s=20))
    await asyncio.to_thread(begun.wait, 20)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert is_over == [True]
    begun.clear()
    waiting = asyncio.create_task(runner.run(endless, is_async=True, timeout_s=20))
    await asyncio.to_thread(begun.wait, 20)
    loop = runner._loop
    assert loop is not None
    await runner.close()
    assert loop.over.done(), "programs that still run end with their loop"
    assert isinstance((await waiting).error, asyncio.CancelledError)


def test_no_thread_of_a_program_holds_up_the_end_of_the_process_and_no_end_is_cancelled() -> None:
    assert not _future().cancel()

    async def threads() -> list[threading.Thread]:
        runner = ProgramRunner()
        mine = [
            (await runner.run(threading.current_thread, is_async=False, timeout_s=20)).value,
            (await runner.run(current_thread, is_async=True, timeout_s=20)).value,
        ]
        await runner.close()
        return mine

    async def current_thread() -> threading.Thread:
        return threading.current_thread()

    assert [each.daemon for each in asyncio.run(threads())] == [True, True]


def test_only_closes_that_come_too_late_are_kept_out_of_the_log() -> None:
    def record(message: str, error: BaseException | None) -> logging.LogRecord:
        return logging.LogRecord(
            "asyncio", logging.ERROR, "", 0, message, None, error and (type(error), error, None)
        )

    log = logging.getLogger("asyncio")
    log.removeFilter(_LATE_CLOSES)
    asyncio.run(play(program_engine(lambda: None), tasks(1)))
    assert _LATE_CLOSES in log.filters
    late = RuntimeError("Event loop is closed")
    close, other = "Task exception: coro=<AsyncClient.aclose() done>", "Task exception: coro=<work() done>"
    for message, error, is_kept in (
        (close, late, False),
        (other, late, True),
        (close, RuntimeError("other"), True),
        (close, OSError("Event loop is closed"), True),
        (close, None, True),
    ):
        assert bool(_LATE_CLOSES.filter(record(message, error))) is is_kept, (message, error)


def test_a_client_that_nobody_closed_has_the_time_to_close_its_connections() -> None:
    """It does so in the loop that it was used in, when it is collected."""
    log: list[str] = []

    class Client:
        def __init__(self) -> None:
            self.itself = self  # so that only the collector finds it
            self.loop = asyncio.get_running_loop()

        async def close(self) -> None:
            try:
                await asyncio.sleep(0)
                log.append("closed")
            except asyncio.CancelledError:
                log.append("was cancelled")
                raise

        def __del__(self) -> None:
            self.loop.create_task(self.close())

    async def program() -> str:
        Client()
        return "answer"

    loop = ProgramLoop()
    assert loop.start(program).end.result(20).value == "answer"
    loop.leave()
    loop.over.result(20)
    assert log == ["closed"]
