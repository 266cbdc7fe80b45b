"""Limits of minutes, by a clock that the test moves; loop, programs, disk and threads are the real ones."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from worker_files import HeldProgram, runtime

from rllm.contracts import RunStatus
from rllm.worker.admission import Admission

REQUEST = {"run_id": "a", "task": "four"}


class MovedLoop(asyncio.SelectorEventLoop):
    """Time goes on as it does, and by what the test adds."""

    added_s = 0.0

    def time(self) -> float:
        return super().time() + self.added_s

    def advance(self, seconds: float) -> None:
        """From any thread; programs have loops of their own."""
        self.added_s += seconds
        self.call_soon_threadsafe(lambda: None)  # what is due now is not waited for


def on_moved_clock(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=MovedLoop) as runner:
        runner.run(test)


def clock() -> MovedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MovedLoop)
    return loop


async def until(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait)


def test_a_run_ends_with_its_ten_minutes_and_not_before(tmp_path: Path) -> None:
    async def test() -> None:
        held = HeldProgram()
        async with runtime(tmp_path, held.solve, timeout_s=600, attempts=2) as worker:
            run = asyncio.create_task(worker.run(REQUEST))
            await until(held.began)
            clock().advance(590)
            await asyncio.sleep(0.05)
            assert not run.done()
            clock().advance(11)
            first = await run
        assert (first.status, first.code) == (RunStatus.RETRYABLE_ERROR, "timeout")
        assert 601_000 <= first.to_dict()["observability"]["duration_ms"] < 610_000

    on_moved_clock(test())


def test_attempts_share_the_ten_minutes(tmp_path: Path) -> None:
    """Of three that break the schema, the third would begin after the end. The second ends after it too:
    whether its answer or the end of its time is heard first is the machine's choice."""

    async def test() -> None:
        moved, began = clock(), list[str]()

        async def five_minutes(task: Any, config: Any) -> dict[str, Any]:
            began.append(task.id)
            moved.advance(301)
            return {"length": "four"}

        async with runtime(tmp_path, five_minutes, timeout_s=600, attempts=3) as worker:
            response = await worker.run(REQUEST)
        assert len(began) == 2
        assert response.status in (RunStatus.INVALID_OUTPUT, RunStatus.RETRYABLE_ERROR)
        assert response.to_dict()["observability"]["attempt"] == 2

    on_moved_clock(test())


def test_who_waits_for_room_is_refused_at_the_end_of_its_time(tmp_path: Path) -> None:
    async def test() -> None:
        held = HeldProgram()
        room = Admission(max_parallel=1, max_queue=4)
        async with runtime(tmp_path, held.solve, timeout_s=600, room=room) as worker:
            long = asyncio.create_task(worker.run({**REQUEST, "run_id": "long"}))
            await until(held.began)
            waiting = asyncio.create_task(worker.run(REQUEST, timeout_s=60))
            while not room.num_waiting:
                await asyncio.sleep(0)
            clock().advance(61)
            refused = await waiting
            held.go_on.set()
            assert (await long).is_ok
            assert room.mean_duration_s > 60, "what it took is what the next one is told to wait for"
        assert (refused.code, refused.http_status) == ("overloaded", 429)
        assert refused.to_dict()["observability"]["attempt"] == 0

    on_moved_clock(test())


def test_a_later_call_has_ten_minutes_of_its_own_and_the_attempts_that_are_left(tmp_path: Path) -> None:
    async def test() -> None:
        moved, began = clock(), threading.Event()

        async def slow_once(task: Any, config: Any) -> dict[str, Any]:
            if not began.is_set():
                began.set()
                await asyncio.sleep(3600)
            moved.advance(500)
            return {"length": 4}

        async with runtime(tmp_path, slow_once, timeout_s=600, attempts=2) as worker:
            run = asyncio.create_task(worker.run(REQUEST))
            await until(began)  # the program may begin before the time that it has is measured
            clock().advance(700)
            first = await run
            clock().advance(86_400)
            second = await worker.run(REQUEST)
        assert (first.code, second.status) == ("timeout", RunStatus.OK)
        assert second.to_dict()["observability"]["attempt"] == 2

    on_moved_clock(test())
