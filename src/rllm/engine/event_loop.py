"""Run a coroutine to its end, also from a notebook, where an event loop is running already."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run `coroutine` to its end and return its value: `asyncio.run`, also where a loop is running.

    There, as in the cells of a notebook, it gets a thread and a loop of its own, and the caller waits. Ctrl-C
    cancels it, so that it can save what it has, and is raised when it has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return _run_in_thread(coroutine)


def _run_in_thread(coroutine: Coroutine[Any, Any, Result]) -> Result:
    results: list[Result] = []
    errors: list[BaseException] = []
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def main() -> None:
        asyncio.set_event_loop(loop)
        try:
            results.append(loop.run_until_complete(task))
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread, below
            errors.append(error)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    thread = threading.Thread(target=main, name="rllm-run")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
