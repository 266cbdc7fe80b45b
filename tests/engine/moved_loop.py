"""An event loop whose clock a test moves, and scripted models that take their time by it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rllm.inference.scripted import ScriptedAnswer


class MovedLoop(asyncio.SelectorEventLoop):
    """Time passes as it does, and by what the test adds."""

    added_s = 0.0

    def time(self) -> float:
        return super().time() + self.added_s


def on_moved_clock(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=MovedLoop) as runner:
        runner.run(test)


async def advance(seconds: float) -> None:
    """Let so much time pass, and what is due by then happen."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MovedLoop)
    loop.added_s += seconds
    for _ in range(5):
        await asyncio.sleep(0)


def takes(seconds: float, text: str = "a") -> ScriptedAnswer:
    """An answer that comes after so much time."""
    return ScriptedAnswer(text=text, wait_for=lambda: advance(seconds))


def hangs(seconds: float = 0.0) -> ScriptedAnswer:
    """An answer that never comes; so much time passes meanwhile."""

    async def wait() -> None:
        await advance(seconds)
        await asyncio.Event().wait()

    wait_for: Callable[[], Awaitable[object]] = wait
    return ScriptedAnswer(text="", wait_for=wait_for)
