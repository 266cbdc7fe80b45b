"""A process that has everything imported and forks the ranks of a run. conftest.py's `ranks` talks to it.

    one JSON request a line in:  {"program": "letters", "words": […], "places": [ENVIRONMENT of each rank]}
    one JSON answer a line out:  [{"code": 0, "errors": "…", "ended_s": 12.3} of each rank]

Codes are those of a command: an error of ours has its exit code, kill -9 is -9.
"""

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import allocated
import late
import letters
import moved
import peft
import recorded
import words
from torch.distributed import fsdp
from torch.distributed.tensor import parallel

from rllm.distributed import torch_ranks
from rllm.errors import RllmError
from rllm.trainer import loop

PROGRAMS: dict[str, Any] = {
    "allocated": allocated.main,
    "late": late.main,
    "letters": letters.main,
    "replayed": letters.replay_again,
    "moved": moved.main,
    "recorded": recorded.main,
    "words": words.main,
}
IMPORTED_BEFORE_A_FORK = (loop, torch_ranks, peft, fsdp, parallel)


def start(request: dict[str, Any], place: dict[str, str], errors: Path) -> int:
    """The process id of a rank."""
    if pid := os.fork():
        return pid
    code = 0
    os.environ.update(place)
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    try:
        PROGRAMS[request["program"]](*request["words"])
    except RllmError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except BaseException:  # noqa: BLE001  the test reads it
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def serve(request: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    began_s = time.monotonic()
    files = [directory / f"rank-{number}" for number in range(len(request["places"]))]
    pids = [start(request, place, file) for place, file in zip(request["places"], files, strict=True)]
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < len(pids):
        pid, status = os.wait()
        ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic() - began_s
    return [
        {"code": ended[pid][0], "errors": file.read_text(), "ended_s": ended[pid][1]}
        for pid, file in zip(pids, files, strict=True)
    ]


def main() -> None:
    gc.collect()
    gc.freeze()  # ranks do not look through what they share
    print("ready", flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(serve(json.loads(line), Path(directory))), flush=True)


if __name__ == "__main__":
    main()
