"""User programs, away from the engine's event loop: one may block, hang or raise and disturbs nobody else.

    plain function ──► a thread of its own ──────────────────────┐
    async function ──► a task in the programs' own event loop ───┴──► ProgramEnd(value, error), or OutOfTime

The engine's loop also serves the gateway that the programs call. So async programs live in another loop: one
that blocks it, say with a synchronous client, holds up its fellows but still gets its answers. A thread
cannot be killed: one that does not end in time is left behind, and whoever comes next does not wait for it.
With `stops_threads` an exception is raised in it, at the next line of Python that it comes to.

Clients that programs leave open close themselves when they are collected, in whatever loop runs there. So the
programs' loop collects before it ends, and what comes too late for its own loop is kept out of asyncio's log.
"""

import asyncio
import contextvars
import ctypes
import gc
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from rllm.engine.frames import frames_of_task, frames_of_thread, frames_text
from rllm.types.episode_clock import EpisodeClock, EpisodeLimits

GRACE_S = 1.0


@dataclass(slots=True, frozen=True)
class ProgramEnd:
    """The end of a program: exactly one of the two counts."""

    value: Any = None
    error: BaseException | None = None


class OutOfTime(Exception):
    """A program was still busy when its time was up."""

    def __init__(self, message: str, *, is_abandoned: bool) -> None:
        super().__init__(message)
        self.is_abandoned = is_abandoned
        """It did not end when it was told to, and is left behind."""


class ProgramStopped(BaseException):
    """Raised in the thread of a plain program that was cancelled, or whose time is up."""


@dataclass(slots=True)
class _Running:
    end: "Future[ProgramEnd]"
    stop: Callable[[], None]
    """Asks it to end; does nothing to a thread unless such are stopped."""
    place: Callable[[], str]
    """Where it is, as `file:line in function`; empty when nobody knows."""
    loop: "ProgramLoop | None" = None


async def _nothing() -> None:
    return


class ProgramRunner:
    """Runs functions of users, sync and async."""

    def __init__(self, *, grace_s: float = GRACE_S, stops_threads: bool = False) -> None:
        """`stops_threads` raises ProgramStopped in plain functions that are to end. A lock that one of them
        takes without `with` may stay taken, so it is for programs that share none."""
        self.num_abandoned = 0
        """Programs that were left behind since the beginning."""
        self._grace_s = grace_s
        self._stops_threads = stops_threads
        self._loop: ProgramLoop | None = None

    async def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        is_async: bool,
        timeout_s: float | None = None,
        clock: EpisodeClock | None = None,
        give_up: Callable[[], Awaitable[None]] = _nothing,
    ) -> ProgramEnd:
        """Call it and wait, for `timeout_s` or until `clock`, which is begun here, rings. Then `give_up` is
        awaited, and the function is told to end.

        Raises OutOfTime, with the line that it is at. What the function raises is returned, not raised.
        """
        clock = clock or EpisodeClock(EpisodeLimits(wall_s=timeout_s))
        rung: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = self._start(function, arguments, is_async)
        # `wait` leaves the future alone when time is up; `wait_for` would cancel it, and the end that comes
        # within the grace period would be lost.
        end = asyncio.wrap_future(running.end)
        try:
            clock.begin(lambda: rung.set_result(None))
            await asyncio.wait({end, rung}, return_when=asyncio.FIRST_COMPLETED)
            clock.stop()
            if end.done():
                return end.result()
            where = running.place()
            await give_up()
            running.stop()
            await asyncio.wait({end}, timeout=self._grace_s)
        except asyncio.CancelledError:
            clock.stop()
            running.stop()
            # A task ends when it is told to; a thread that is told nothing may take as long as it likes.
            if running.loop is not None or self._stops_threads:
                await asyncio.wait({end}, timeout=self._grace_s)
            raise
        is_abandoned = not end.done()
        if is_abandoned:
            self.num_abandoned += 1
            loop = running.loop
            # Another program may have left this loop already, and a new one may be in its place.
            if loop is not None and loop is self._loop:  # perhaps it blocks the whole loop
                loop.leave()
                self._loop = None
        raise OutOfTime(
            f"It had not returned after {clock.limit_text}{f'; it was at {where}' if where else ''}.",
            is_abandoned=is_abandoned,
        )

    async def close(self) -> None:
        """End the programs' loop and what still runs there. Threads end when their function returns."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.leave()
            await asyncio.wait({asyncio.wrap_future(loop.over)}, timeout=self._grace_s)

    def _start(self, function: Callable[..., Any], arguments: tuple[Any, ...], in_loop: bool) -> _Running:
        if not in_loop:
            return _start_thread(function, arguments, self._stops_threads)
        if self._loop is None:
            self._loop = ProgramLoop()
        return self._loop.start(lambda: function(*arguments))


def _start_thread(function: Callable[..., Any], arguments: tuple[Any, ...], can_stop: bool) -> _Running:
    end = _future()
    context = contextvars.copy_context()
    program = _StoppableCall()

    def work() -> None:
        end.set_result(program.run(lambda: context.run(_call_to_end, function, arguments)))

    thread = threading.Thread(
        target=work, name=f"rllm-program-{getattr(function, '__name__', '')}", daemon=True
    )
    thread.start()

    return _Running(
        end=end,
        stop=program.stop if can_stop else lambda: None,
        place=lambda: frames_text(frames_of_thread(thread.ident)),
    )


class _StoppableCall:
    """A call in one thread that another may stop: nothing is raised in the thread once the call has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        """None before and after the call."""

    def run(self, call: Callable[[], ProgramEnd]) -> ProgramEnd:
        end = ProgramEnd(error=ProgramStopped("It was stopped before it began."))
        try:
            with self._lock:
                self._thread_id = threading.get_ident()
            end = call()
            with self._lock:
                is_stopped = self._thread_id is None
                self._thread_id = None
            # What was to come may not have come yet: it is sent again, and awaited. Were it taken back, the
            # interpreter would wait for it on, and traced threads of Python 3.11 stand still then.
            if is_stopped:
                _raise_in_thread(threading.get_ident())
            while is_stopped:
                time.sleep(0.0)
        except ProgramStopped:
            pass  # after its end, or just before its beginning
        return end

    def stop(self) -> None:
        with self._lock:
            if self._thread_id is not None:
                _raise_in_thread(self._thread_id)
                self._thread_id = None


def _raise_in_thread(thread_id: int) -> None:
    """At the next line of Python that the thread runs."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(ProgramStopped))


def _call_to_end(function: Callable[..., Any], arguments: tuple[Any, ...]) -> ProgramEnd:
    try:
        value = function(*arguments)
        # A plain function may hand on what an async one returned: it gets a loop of its own.
        return ProgramEnd(value=asyncio.run(_await_value(value)) if isawaitable(value) else value)
    except BaseException as error:  # noqa: BLE001  a program may raise anything, SystemExit included
        return ProgramEnd(error=error)


async def _await_value(value: Awaitable[Any]) -> Any:
    return await value


class ProgramLoop:
    """An event loop in a thread of its own, for the async programs of one engine."""

    def __init__(self) -> None:
        self.over = _future()
        """Done when the thread ends."""
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._work, name="rllm-programs", daemon=True)
        self._thread.start()
        self._loop = self._ready.result()

    def _work(self) -> None:
        try:
            asyncio.run(self._main())
        finally:
            self.over.set_result(ProgramEnd())

    async def _main(self) -> None:
        self._left = asyncio.Event()
        self._ready.set_result(asyncio.get_running_loop())
        await self._left.wait()
        gc.collect()  # clients that nobody closed close their connections now, while their loop runs
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=GRACE_S / 10)

    def start(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> _Running:
        end = _future()
        tasks: list[asyncio.Task[ProgramEnd]] = []

        async def work() -> ProgramEnd:
            try:
                return ProgramEnd(value=await make())
            except BaseException as error:  # noqa: BLE001  a program may raise anything, SystemExit included
                return ProgramEnd(error=error)

        def settle(task: asyncio.Task[ProgramEnd]) -> None:  # cancelled before it began, it has no result
            end.set_result(ProgramEnd(error=asyncio.CancelledError()) if task.cancelled() else task.result())

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(work())
            tasks.append(task)
            task.add_done_callback(settle)

        # A task copies the context in which it is made: so `begin` runs in the caller's.
        self._loop.call_soon_threadsafe(begin, context=contextvars.copy_context())

        def stop() -> None:
            # Behind `begin` in the queue of the loop, so the task is there by then.
            self._call(lambda: [task.cancel() for task in tasks])

        return _Running(end=end, stop=stop, place=lambda: self._place_of(tasks), loop=self)

    def leave(self) -> None:
        """Whoever is still in it is cancelled, and the loop ends as soon as nobody blocks it."""
        self._call(self._left.set)

    def _call(self, what: Callable[[], Any]) -> None:
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(what)

    def _place_of(self, tasks: list["asyncio.Task[ProgramEnd]"]) -> str:
        """Where the task waits; where the loop's thread is, when the task is what keeps it busy."""
        coroutine: Any = tasks[0].get_coro() if tasks else None
        if coroutine is None or coroutine.cr_running:
            return frames_text(frames_of_thread(self._thread.ident))
        return frames_text(frames_of_task(tasks[0]))


class _LateCloses(logging.Filter):
    """Drops what asyncio logs when a client that a program left open is collected in another program's loop,
    after its own has ended: it cannot close itself, and its sockets were closed with its loop."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        return not (is_late and _CLOSES.search(record.getMessage()))


_CLOSES = re.compile(r"coro=<[\w.]*\b(aclose|close)\(\)")
"""Coroutines that clients run when they are collected."""
_LATE_CLOSES = _LateCloses()


def hush_late_closes() -> None:
    """Keep asyncio's log, of every loop, free of clients that cannot close themselves any more."""
    logging.getLogger("asyncio").addFilter(_LATE_CLOSES)


def _future() -> "Future[ProgramEnd]":
    """One that can no longer be cancelled, so that it is safe to settle from another thread."""
    future: Future[ProgramEnd] = Future()
    future.set_running_or_notify_cancel()
    return future
