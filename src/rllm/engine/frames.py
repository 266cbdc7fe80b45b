"""The line of user code at which a thread or a task is, for messages about it."""

import asyncio
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any


def frames_of_thread(thread_id: int | None) -> list[FrameType]:
    """From the outermost to the innermost; none when the thread has ended."""
    frame = None if thread_id is None else sys._current_frames().get(thread_id)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def frames_of_task(task: "asyncio.Task[Any]") -> list[FrameType]:
    """Frames of a task that waits, from its own function to what that waits in."""
    awaiting: Any = task.get_coro()
    frames: list[FrameType] = []
    # Ends at a future, or at a generator, which have no such frame.
    while (frame := getattr(awaiting, "cr_frame", None)) is not None:
        frames.append(frame)
        awaiting = awaiting.cr_await
    return frames


def frames_text(frames: Sequence[FrameType]) -> str:
    """`file:line in function` of the innermost line outside of the engines, of installed packages and the
    standard library; of the outermost one where there is none."""
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(_FOREIGN)]
    frames_shown = [*frames[:1], *own][-1:]
    return "".join(f"{at.f_code.co_filename}:{at.f_lineno} in {at.f_code.co_name}" for at in frames_shown)


_FOREIGN = (
    str(Path(threading.__file__).parent),
    str(Path(sys.prefix) / "lib"),
    str(Path(__file__).parent),
)
