"""A process that trains in the games beside this file until it is killed. conftest.py's `ask` talks to it.

    python killing.py: one JSON request a line in, one JSON answer a line out
    {"game": "letters", "run": DIR}       train, or resume, to the end           {"signal": 0, "events": […]}
    {…, "die_at_line": ["train", 2]}      kill -9 when that line is logged       {"signal": 9}
    {…, "die_at_event": 57}               kill -9 at the 57th time that a file of the run is touched
    {…, "die_at_new_place": [PLACE, …]}   kill -9 at the first line, or change of a file, whose place in the
                                          code is none of these                  {"signal": 9, "place": PLACE}
    {…, "refuse_at_new_place": [PLACE, …], "errno": 28}    from the first such change on, the disk refuses all
                                                           {"error": "StorageError", "message": …, "place": …}
    {…, "fill_disk_at_line": …}           the tmpfs around the run is made as small as what lies in it
    {…, "interrupt_at_line": …}           Ctrl-C when that line is logged        {"signal": 2}
    {…, "terminate_at_line": …}           SIGTERM when that line is logged, which is to end like Ctrl-C
    {…, "interrupt_at_answer": 40}        Ctrl-C when the model has answered 40 times
    {…, "terminate_at_answer": 40}        SIGTERM then
    {…, "die_at_answer": 40}              kill -9 then
    {…, "changes": {…}}                   every other key is an argument of the game's make function

Each request is served by a forked child, so that torch is imported once. An audit hook counts what is opened,
renamed, made and removed below the run directory, halves of checkpoints included, and SQLite's transactions.
"""

import gc
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import distill_game
import dpo_game
import letter_game
import sft_game

from rllm.errors import RllmError
from rllm.files.atomic import write_atomic
from rllm.tracking.base import Metric

GAMES = {
    "letters": letter_game.make_trainer,
    "pair": letter_game.make_pair_trainer,
    "chats": sft_game.make_trainer,
    "preferences": dpo_game.make_trainer,
    "taught": distill_game.make_trainer,
}
SQLITE_CONNECT = sqlite3.connect
SIGNALS = {
    "die_at_line": signal.SIGKILL,
    "interrupt_at_line": signal.SIGINT,
    "terminate_at_line": signal.SIGTERM,
}


class AtLine:
    """A tracker that acts as a line arrives: it is on record, and in no checkpoint yet."""

    def __init__(self, act: Callable[[str, int], None]) -> None:
        self._act = act

    def advance(self, done: int, total: int) -> None:
        pass

    def begin(self, phase: str) -> None:
        pass

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        self._act(phase, step)

    def close(self) -> None:
        """Nothing to close."""


class FileEvents:
    """Notes what is done to the files of a run, and may end the process at the n-th time."""

    WATCHED = frozenset(
        {
            "open",
            "os.rename",
            "os.mkdir",
            "os.remove",
            "os.rmdir",
            "os.truncate",
            "shutil.rmtree",
            "sqlite3.connect",
        }
    )

    def __init__(
        self,
        run: Path,
        *,
        last: int | None = None,
        known_places: Sequence[str] | None = None,
        refusal: int | None = None,
    ) -> None:
        """`last`: the event to die at. `known_places`: to die at the first change elsewhere, or with
        `refusal` to raise that errno from there on."""
        self.seen: list[str] = []
        self.refused_place = ""
        self._below, self._last, self._known_places, self._refusal = str(run), last, known_places, refusal

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self.WATCHED and arguments and self._below in str(arguments[0]):
            reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            self._note(event, str(arguments[0]), reads=reads)

    def connect(self, *args: Any, **options: Any) -> sqlite3.Connection:
        """In place of sqlite3.connect."""
        connection = SQLITE_CONNECT(*args, **options)
        connection.set_trace_callback(self._note_transaction)
        return connection

    def at_line(self, phase: str, step: int) -> None:
        self._die_if_new(f"line {phase} {step}")

    def _note_transaction(self, statement: str) -> None:
        if statement.startswith(("BEGIN", "COMMIT")):
            self._note(f"sqlite3 {statement}", "", reads=statement == "BEGIN")

    def _note(self, event: str, path: str, *, reads: bool) -> None:
        self.seen.append(f"{event} {path}")
        if len(self.seen) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._known_places is None or reads:
            return
        if self._refusal is not None and event in ("shutil.rmtree", "sqlite3.connect"):
            return  # rmtree: each file and folder in it is refused; SQLite has errors of its own
        place = f"{event} {_place()}"
        if self._refusal is None:
            self._die_if_new(place)
        elif path and (self.refused_place or place not in self._known_places):
            self.refused_place = self.refused_place or place
            raise OSError(self._refusal, os.strerror(self._refusal), path)

    def _die_if_new(self, place: str) -> None:
        if self._known_places is not None and self._refusal is None and place not in self._known_places:
            print(json.dumps({"signal": int(signal.SIGKILL), "place": place}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def _place() -> str:
    """Where in the library the file operation is that is running now: its line, and the line that led there
    from the nearest other file."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(lines) < 2:
        name = frame.f_code.co_filename
        if f"{os.sep}rllm{os.sep}" in name and not (lines and lines[-1].startswith(Path(name).name)):
            lines.append(f"{Path(name).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


def _send_at_answer(number: int, how: signal.Signals) -> None:
    """Send a signal as the model has answered for the n-th time."""
    from rllm.inference.local.client import LocalSession

    answered, run = itertools.count(1), LocalSession.run

    async def run_and_count(self: LocalSession, *args: Any, **kwargs: Any) -> Any:
        request = await run(self, *args, **kwargs)
        if next(answered) == number:
            os.kill(os.getpid(), how)
        return request

    LocalSession.run = run_and_count


def _signal_at(line: tuple[str, int], how: signal.Signals, phase: str, step: int) -> None:
    if (phase, step) == line:
        os.kill(os.getpid(), how)


def _fill_at(line: tuple[str, int], disk: Path, phase: str, step: int) -> None:
    if (phase, step) == line:
        facts = os.statvfs(disk)
        size = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def _write_no_curve(*values: Any, **options: Any) -> None:
    """Write the file of a curve without a picture, as conftest.py of all tests does: drawing takes long."""
    (path,) = (each for each in values if isinstance(each, Path))
    write_atomic(path, b"")


def _serve(request: dict[str, Any]) -> None:
    """In the child: train, and tell what was done to files."""
    make, run = GAMES[request.pop("game")], Path(request.pop("run"))
    die_at, refuse_at = (request.pop(f"{fate}_at_new_place", None) for fate in ("die", "refuse"))
    events = FileEvents(
        run,
        last=request.pop("die_at_event", None),
        known_places=die_at if refuse_at is None else refuse_at,
        refusal=request.pop("errno", None),
    )
    tracker = AtLine(events.at_line)
    for fate, how in SIGNALS.items():
        if fate in request:
            tracker = AtLine(partial(_signal_at, tuple(request.pop(fate)), how))
    if "fill_disk_at_line" in request:
        tracker = AtLine(partial(_fill_at, tuple(request.pop("fill_disk_at_line")), run.parent))
    for way, how in (("interrupt", signal.SIGINT), ("terminate", signal.SIGTERM), ("die", signal.SIGKILL)):
        if f"{way}_at_answer" in request:
            _send_at_answer(request.pop(f"{way}_at_answer"), how)
    trainer = make(run, tracker=tracker, **request)
    sys.addaudithook(events)
    sqlite3.connect = events.connect
    try:
        trainer.train()
    except KeyboardInterrupt:
        print(json.dumps({"signal": int(signal.SIGINT)}), flush=True)
    except RllmError as error:
        ended = {"error": type(error).__name__, "message": str(error), "place": events.refused_place}
        print(json.dumps({"signal": 0, **ended}), flush=True)
    else:
        print(json.dumps({"signal": 0, "events": events.seen}), flush=True)


def main() -> None:
    # Imported before the first fork: children then have them for nothing.
    import rllm.inference.local.client
    import rllm.models.builtin
    import rllm.trainer.loop
    import rllm.trainer.preference_job  # noqa: F401
    from rllm.tracking import picture

    picture.draw_learning_curve = picture.draw_loss_curve = _write_no_curve
    gc.collect()
    gc.freeze()  # children do not look through what they share
    # A shell's background job, as CI may be one, hands on that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("ready", flush=True)
    for line in sys.stdin:
        if "lora" in line:
            import peft  # noqa: F401  two seconds, once for all that need it
        child = os.fork()
        if child == 0:
            try:
                _serve(json.loads(line))
                os._exit(0)
            except BaseException:  # noqa: BLE001  a child must never go on as its parent
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        was_killed = status & 0x7F  # a child that dies at a new place has said so itself
        if status and not (was_killed and "die_at_new_place" in line):
            print(json.dumps({"signal": status & 0x7F, "code": status >> 8}), flush=True)


if __name__ == "__main__":
    main()
