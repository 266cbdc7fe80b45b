import asyncio
import threading

import pytest

from rllm import run


async def _thread_of_the_loop() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def _fails() -> None:
    raise LookupError("the coroutine's own")


def test_without_a_loop_a_coroutine_runs_here() -> None:
    assert run(_thread_of_the_loop()) == threading.current_thread().name
    with pytest.raises(LookupError, match="own"):
        run(_fails())


async def test_inside_a_running_loop_a_coroutine_gets_a_thread_of_its_own() -> None:
    assert run(_thread_of_the_loop()) == "rllm-run"
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
