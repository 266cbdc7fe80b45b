"""Watchdogs over the rollouts: nothing blocks the loop unseen, and nothing waits for ever.

    LoopWatchdog      thread ──ping──► event loop     no answer in time? a warning names the file and line
    ProgressWatchdog  thread ──looks at──► engine     no turn made, no episode ended for too long?
                         └─► report: stacks of threads and tasks, every live rollout
                         └─► on_stall(), such as saving a checkpoint
                         └─► StallError out of the block that it guards, naming the oldest rollouts

Both live in threads of their own, because what they look for may keep the event loop from running.
"""

import asyncio
import ctypes
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from rllm.engine.attempt_state import LiveRollout
from rllm.engine.attempts import EpisodeCounts
from rllm.engine.frames import frames_of_task, frames_of_thread, frames_text
from rllm.errors import ConfigError, StallError

_LOG = logging.getLogger("rllm.engine")
_NUM_NAMED = 3
"""Rollouts, and threads, that an error names; the report has them all."""
_MOST_TASKS = 64
"""Tasks whose stacks a report shows: thousands of workers all wait alike."""


class WatchedEngine(Protocol):
    """An engine, as a watchdog sees it."""

    @property
    def counts(self) -> EpisodeCounts: ...

    def live(self) -> list[LiveRollout]: ...


class LoopWatchdog:
    """Warns, once for each place, of code that keeps the event loop busy for longer than `limit_s`.

    `with LoopWatchdog():` in a coroutine guards the loop that runs it. Everything in that loop waits for such
    code: every rollout, every answer of the model.
    """

    def __init__(
        self,
        *,
        limit_s: float = 1.0,
        on_blocked: Callable[[str, float], None] | None = None,
        known_places: set[str] | None = None,
    ) -> None:
        """`on_blocked` gets the place and the limit, in the watchdog's thread; None logs a warning.
        `known_places` are the places that were warned of already; new ones are added to it.
        """
        if not limit_s > 0.0:
            raise ConfigError(f"`limit_s` of LoopWatchdog is {limit_s}; it must be above 0.")
        self.limit_s = limit_s
        self._on_blocked = on_blocked or _warn
        self._known_places = set[str]() if known_places is None else known_places

    def __enter__(self) -> "LoopWatchdog":
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="rllm-loop-watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self.limit_s / 4):
            answer = threading.Event()
            try:
                self._loop.call_soon_threadsafe(answer.set)
            except RuntimeError:  # the loop was closed
                return
            if answer.wait(self.limit_s / 2):
                continue
            before = _in_callback(frames_of_thread(self._loop_thread))
            if answer.wait(self.limit_s / 2):
                continue
            after = _in_callback(frames_of_thread(self._loop_thread))
            # Calls that have been running all the while. None: many short ones, one after the other.
            same = [frame for frame, later in zip(before, after, strict=False) if frame is later]
            place = frames_text(same)
            if place and place not in self._known_places:
                self._known_places.add(place)
                self._on_blocked(place, self.limit_s)
            del before, after, same  # frames keep everything in them alive
            # No second ping before the first is answered: one long call is reported once.
            while not answer.wait(self.limit_s) and not self._over.is_set():
                pass


def _warn(place: str, limit_s: float) -> None:
    _LOG.warning(
        "%s has kept the event loop busy for more than %g s, and every rollout waits for it: make it async, "
        "run it in a thread (asyncio.to_thread), or do it in the environment, which has threads.",
        place,
        limit_s,
    )


def _in_callback(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """The frames of what the event loop runs at the moment; none when it waits."""
    if frames and frames[-1].f_code.co_name == "select":
        return []
    starts = [
        place
        for place, frame in enumerate(frames)
        if frame.f_code.co_name in ("_run_once", "run_forever", "run_until_complete")
    ]
    return frames[starts[-1] + 1 :] if starts else frames


class ProgressWatchdog:
    """Ends what it guards with a StallError when an engine has not moved for `limit_s`.

        async with ProgressWatchdog(engine, limit_s=600, on_stall=save_checkpoint):
            await train()

    Moving is a turn made, an episode ended, or a step of the model (`model_steps` of the engine, where it has
    them); an engine without episodes has nothing to move. So the limit has to be longer than the longest turn
    of a model that does not count its steps.
    """

    def __init__(
        self,
        engine: WatchedEngine,
        *,
        limit_s: float,
        on_stall: Callable[[], object] | None = None,
        report_path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        check_every_s: float | None = None,
        grace_s: float = 5.0,
    ) -> None:
        """`on_stall` is called in the event loop; in the watchdog's thread if that does not react for
        `grace_s`. The report goes to the log, and to `report_path`.
        """
        if not limit_s > 0.0:
            raise ConfigError(f"`limit_s` of ProgressWatchdog is {limit_s}; it must be above 0.")
        self.engine = engine
        self.limit_s = limit_s
        self._on_stall = on_stall
        self._report_path = report_path
        self._clock = clock
        self._check_every_s = check_every_s or min(1.0, limit_s / 10)
        self._grace_s = grace_s
        self._over = threading.Event()
        self._report_once = threading.Lock()
        """Taken by whoever calls `on_stall`: the loop, or the thread if the loop does not react."""
        self._error: StallError | None = None
        self._cancelled = False

    async def __aenter__(self) -> "ProgressWatchdog":
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="rllm-progress-watchdog", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        # The cancellation was the watchdog's own: left in the count, an `asyncio.timeout` around it would
        # take it for somebody else's.
        if self._cancelled:
            self._task.uncancel()
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        last_moves, since = self._moves(), self._clock()
        while not self._over.wait(self._check_every_s):
            moves, now = self._moves(), self._clock()
            if moves != last_moves or not self.engine.counts.in_flight:
                last_moves, since = moves, now
            elif now - since >= self.limit_s:
                self._report_stall(now - since)
                return

    def _moves(self) -> tuple[int, ...]:
        return self.engine.counts.turns, self.engine.counts.settled, getattr(self.engine, "model_steps", 0)

    def _report_stall(self, for_s: float) -> None:
        live = self.engine.live()
        error = StallError(self._message(live, for_s))
        report = f"{error}\n\n{_report(live, self._loop)}"
        _LOG.error("%s", report)
        if self._report_path is not None:
            try:
                self._report_path.write_text(report)
            except (OSError, ValueError) as write_error:  # a full disk, or text that is no Unicode
                error.add_note(f"The stacks are only in the log: {write_error}")
        reaction = threading.Event()

        def end() -> None:
            reaction.set()
            if self._over.is_set():
                return
            if self._report_once.acquire(blocking=False):
                self._save(error)
            self._cancelled = True
            self._task.cancel()

        self._loop.call_soon_threadsafe(end)
        if reaction.wait(self._grace_s) or not self._report_once.acquire(blocking=False):
            return
        # The loop itself is what hangs. Python code in it is interrupted, and then `end` has its turn; a call
        # into C cannot be.
        self._save(error)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._loop_thread), ctypes.py_object(StallError)
        )

    def _save(self, error: StallError) -> None:
        self._error = error
        if self._on_stall is not None:
            try:
                self._on_stall()
            except Exception as save_error:  # noqa: BLE001  whatever it is, the stall is what has to be told
                error.add_note(f"What was to be done about it failed too: {save_error!r}")

    def _message(self, live: Sequence[LiveRollout], for_s: float) -> str:
        counts = self.engine.counts
        oldest = "; ".join(map(str, live[:_NUM_NAMED])) or "nobody knows which"
        places = _busy_places()
        threads = f" Environments are at {'; '.join(places[:_NUM_NAMED])}." if places else ""
        where = f" The stacks are in {self._report_path}." if self._report_path is not None else ""
        return (
            f"No rollout has moved for {for_s:.0f} s: {counts.in_flight} episodes are in flight, {len(live)} "
            f"of them played. The oldest: {oldest}.{threads}{where}"
        )


def _busy_places() -> list[str]:
    """Where the environments' threads are that have something to do."""
    places: list[str] = []
    for thread in threading.enumerate():
        frames = frames_of_thread(thread.ident)
        if thread.name == "rllm-environment" and frames and frames[-1].f_code.co_name != "_next":
            places.append(frames_text(frames))
    return places


def _report(live: Sequence[LiveRollout], loop: asyncio.AbstractEventLoop) -> str:
    """Every live rollout, and the stacks of all threads and of the tasks of the loop."""
    parts = ["Rollouts, the oldest first:", *(f"  {each}" for each in live)]
    for thread in threading.enumerate():
        parts += [f"\nThread {thread.name}:", _stack(frames_of_thread(thread.ident))]
    tasks: list[asyncio.Task[Any]] = list(asyncio.all_tasks(loop))
    for task in tasks[:_MOST_TASKS]:
        parts += [f"\nTask {task.get_name()}:", _stack(frames_of_task(task))]
    if len(tasks) > _MOST_TASKS:
        parts.append(f"\n… and {len(tasks) - _MOST_TASKS} more tasks")
    return "\n".join(parts)


def _stack(frames: Sequence[FrameType]) -> str:
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return "".join(summary.format()).rstrip()
