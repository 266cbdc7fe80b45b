"""The words of messages about user code: the line at which a thread or a task is, the text of an error."""

import asyncio
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rllm.redaction import without_keys


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


MAX_SHOWN_CHARS = 4000
"""The length of one message: an exception may hold a whole page, and every episode that meets it would."""
_MAX_KEY_CHARS = 1000


def error_text(error: BaseException) -> str:
    """The text of any error and its notes, also of one whose own `__str__` raises; of a long one the
    beginning."""
    try:
        notes = "; ".join(getattr(error, "__notes__", ()))
        return shorten(f"{error} ({notes})" if notes else str(error))
    except Exception as repr_error:  # noqa: BLE001  user code, which may raise anything
        return (
            f"a {type(error).__name__} that cannot be shown: its __str__ raises {type(repr_error).__name__}"
        )


def shorten(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """The text without keys; where it is longer than `max_chars`, its beginning and its whole length."""
    clean = without_keys(text[: max_chars + _MAX_KEY_CHARS])  # a key that the cut would halve is whole here
    if len(text) <= max_chars:
        return clean
    return f"{clean[:max_chars]}… ({len(text):,} characters in all)"


_FOREIGN = (
    str(Path(threading.__file__).parent),
    str(Path(sys.prefix) / "lib"),
    str(Path(__file__).parent),
)
