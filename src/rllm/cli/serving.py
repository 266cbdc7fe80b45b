"""A process that serves until it is stopped: its event loop, its garbage, its threads."""

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_SWITCH_INTERVAL_S = 0.001


def run_server(server: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a server to its end, on uvloop where it is installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(server)


def settle_process() -> None:
    """Make room for many requests at once; to be called when all that serves them is in memory.

    Thousands of open requests are many objects and hardly any garbage: to look through them all the time is a
    third of the CPU of a model call. Threads give the interpreter back within a millisecond, so that one with
    long work holds up no other.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
