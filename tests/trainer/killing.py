"""A process that trains in the games beside this file until it is killed. conftest.py's `ask` talks to it.

    python killing.py: one JSON request a line in, one JSON answer a line out
    {"game": "letters", "run": DIR}       train, or resume, to the end           {"signal": 0, "events": […]}
    {…, "die_at_line": ["train", 2]}      kill -9 when that line is logged       {"signal": 9}
    {…, "die_at_event": 57}               kill -9 at the 57th time that a file of the run is touched
    {…, "interrupt_at_line": …}           Ctrl-C when that line is logged        {"signal": 2}
    {…, "interrupt_at_answer": 40}        Ctrl-C when the model has answered 40 times
    {…, "changes": {…}}                   every other key is an argument of the game's make function

Each request is served by a forked child, so that torch is imported once. An audit hook counts what is opened,
renamed, made and removed below the run directory, halves of checkpoints included.
"""

import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dpo_game
import letter_game
import sft_game

from rllm.tracking.base import Metric

GAMES = {
    "letters": letter_game.make_trainer,
    "pair": letter_game.make_pair_trainer,
    "chats": sft_game.make_trainer,
    "preferences": dpo_game.make_trainer,
}
SIGNALS = {"die_at_line": signal.SIGKILL, "interrupt_at_line": signal.SIGINT}


class EndAtLine:
    """A tracker that ends the process as a line arrives: it is on record, and in no checkpoint yet."""

    def __init__(self, place: tuple[str, int], how: signal.Signals) -> None:
        self._place = place
        self._how = how

    def advance(self, done: int, total: int) -> None:
        pass

    def begin(self, phase: str) -> None:
        pass

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        if (phase, step) == self._place:
            os.kill(os.getpid(), self._how)

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

    def __init__(self, run: Path, last: int | None) -> None:
        self.seen: list[str] = []
        self._below, self._last = str(run), last

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self.WATCHED and arguments and self._below in str(arguments[0]):
            self.seen.append(f"{event} {arguments[0]}")
            if len(self.seen) == self._last:
                os.kill(os.getpid(), signal.SIGKILL)


def _interrupt_at(number: int) -> None:
    """Ctrl-C as the model has answered for the n-th time."""
    from rllm.inference.local.client import LocalSession

    answered, run = itertools.count(1), LocalSession.run

    async def run_and_count(self: LocalSession, *args: Any, **kwargs: Any) -> Any:
        request = await run(self, *args, **kwargs)
        if next(answered) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return request

    LocalSession.run = run_and_count


def _serve(request: dict[str, Any]) -> None:
    """In the child: train, and tell what was done to files."""
    make, run = GAMES[request.pop("game")], Path(request.pop("run"))
    events = FileEvents(run, request.pop("die_at_event", None))
    tracker = None
    for fate, how in SIGNALS.items():
        if fate in request:
            tracker = EndAtLine(tuple(request.pop(fate)), how)
    if "interrupt_at_answer" in request:
        _interrupt_at(request.pop("interrupt_at_answer"))
    trainer = make(run, tracker=tracker, **request)
    sys.addaudithook(events)
    try:
        trainer.train()
    except KeyboardInterrupt:
        print(json.dumps({"signal": int(signal.SIGINT)}), flush=True)
    else:
        print(json.dumps({"signal": 0, "events": events.seen}), flush=True)


def main() -> None:
    # Imported before the first fork: children then have them for nothing.
    from matplotlib import backends, figure, font_manager, ticker  # noqa: F401
    from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast  # noqa: F401

    import rllm.inference.local.client
    import rllm.models.builtin
    import rllm.trainer.loop
    import rllm.trainer.preference_job  # noqa: F401

    # A shell's background job, as CI may be one, hands on that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                _serve(json.loads(line))
                os._exit(0)
            except BaseException:  # noqa: BLE001  a child must never go on as its parent
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"signal": status & 0x7F, "code": status >> 8}), flush=True)


if __name__ == "__main__":
    main()
