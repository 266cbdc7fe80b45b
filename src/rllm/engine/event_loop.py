"""Run a coroutine to its end, also from a notebook, where an event loop is running already.

SIGTERM, which schedulers send, does what Ctrl-C does: the coroutine is cancelled, so that it can save what it
has, and KeyboardInterrupt is raised when it has ended. A second one ends it at once.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run `coroutine` to its end and return its value: `asyncio.run`, also where a loop is running.

    There, as in the cells of a notebook, it gets a thread and a loop of its own, and the caller waits.
    """
    if _is_in_loop():
        return _run_in_thread(coroutine)
    return asyncio.run(_cancelled_by_sigterm(coroutine))


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def on_sigterm(act: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Meanwhile SIGTERM does this; outside the main thread, where Python has no signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, act)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


async def _cancelled_by_sigterm(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Cancel the coroutine at SIGTERM, as asyncio does at SIGINT; a shell's background job may ignore the
    latter."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    is_terminated = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal is_terminated
        if is_terminated:
            raise KeyboardInterrupt
        is_terminated = True
        # A signal does not wake a loop that waits for I/O; a call from a thread does.
        loop.call_soon_threadsafe(task.cancel)

    try:
        with on_sigterm(terminate):
            return await coroutine
    except asyncio.CancelledError:
        # Where somebody else has cancelled the task as well, the cancellation is theirs to see.
        if is_terminated and task.uncancel() == 0:
            raise KeyboardInterrupt from None
        raise


def _run_in_thread(coroutine: Coroutine[Any, Any, Result]) -> Result:
    results: list[Result] = []
    errors: list[BaseException] = []
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()
    context = copy_context()

    async def main() -> Result:
        running.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    def work() -> None:
        try:
            results.append(context.run(asyncio.run, main()))
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread, below
            errors.append(error)

    thread = threading.Thread(target=work, name="rllm-run")
    thread.start()
    try:
        # Python handles signals in the main thread, which waits here; the loop's own thread sees none.
        with on_sigterm(signal.default_int_handler):
            thread.join()
    except KeyboardInterrupt:
        loop, task = running.result()
        assert task is not None, "a coroutine runs in a task"
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
