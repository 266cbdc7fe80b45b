"""A coroutine of a user's in the engine's own loop: whatever it does, the engine goes on.

    contain(coroutine, clock) ──► ContainedEnd(value or error)     it came to an end by itself
                              ──► ContainedEnd(timed_out=True)     its clock rang, however it then ended
                              ──► ContainedEnd(is_abandoned=True)  nor did it end in the grace period

What it raises is handed over, CancelledError and SystemExit included, which would otherwise end the loop. One
that is told to end and swallows that is told again, then closed, then left behind where nobody waits for it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rllm.types.episode_clock import EpisodeClock

GRACE_S = 1.0
"""The time that a coroutine has to end when it is told to."""


@dataclass(kw_only=True, slots=True)
class ContainedEnd:
    """The end of a coroutine."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    """Its time was up, or somebody stopped it; what it returned or raised afterwards does not count."""
    is_abandoned: bool = False
    """It did not end, and runs on."""


async def contain(
    coroutine: Coroutine[Any, Any, Any],
    clock: EpisodeClock,
    on_start: Callable[[Callable[[], None]], None],
) -> ContainedEnd:
    """Run it until it ends or `clock`, which is begun here, rings.

    `on_start` gets a function that ends it at once. Whoever waits here and is cancelled ends it as well.
    """
    stop_future = asyncio.get_running_loop().create_future()

    def stop() -> None:
        if not stop_future.done():
            stop_future.set_result(None)

    on_start(stop)
    clock.begin(stop)
    running = asyncio.create_task(_run_to_end(coroutine))
    try:
        await asyncio.wait({running, stop_future}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _end(running, coroutine)
        raise
    finally:
        clock.stop()
    if running.done() and not clock.is_over() and not stop_future.done():
        return running.result()
    await _end(running, coroutine)
    return ContainedEnd(timed_out=True, is_abandoned=not running.done())


async def _run_to_end(coroutine: Coroutine[Any, Any, Any]) -> ContainedEnd:
    try:
        return ContainedEnd(value=await coroutine)
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  of a user's code, which may raise anything
        return ContainedEnd(error=error)


async def _end(running: "asyncio.Task[ContainedEnd]", coroutine: Coroutine[Any, Any, Any]) -> None:
    """Cancel it until it has ended or the grace period is over; then take it out of its task."""
    until = asyncio.get_running_loop().time() + GRACE_S
    while not running.done() and (left_s := until - asyncio.get_running_loop().time()) > 0.0:
        running.cancel()
        with suppress(asyncio.CancelledError):  # somebody is in a hurry, and gets what is left of the grace
            await asyncio.wait({running}, timeout=min(left_s, GRACE_S / 4))
    with suppress(RuntimeError):  # it swallows this as well
        coroutine.close()
    if running.done():
        return
    running.cancel()  # wakes a task whose coroutine is closed, so that it ends
    # Nobody waits for it when the loop ends; it would hold up the end of the program for ever.
    asyncio._unregister_task(running)
    running._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
