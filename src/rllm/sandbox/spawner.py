"""One thread that starts all wardens of this process, and lives as long as the process does.

bubblewrap asks the kernel to end it with its parent, and to the kernel the parent is the thread that started
it: started by a thread of some pool, a sandbox would die with that thread. A process that was forked has a
thread of its own.
"""

import os
import queue
import subprocess
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class _Request:
    command: list[str]
    environment: dict[str, str]
    descriptors: tuple[int, ...]
    errors: int
    process: "Future[subprocess.Popen[bytes]]" = field(default_factory=Future)


class _Spawner:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="sandbox-spawner", daemon=True).start()

    def spawn(self, request: _Request) -> "subprocess.Popen[bytes]":
        self._requests.put(request)
        return request.process.result()

    def _serve(self) -> None:
        while True:
            request = self._requests.get()
            try:
                process = subprocess.Popen(
                    request.command,
                    env=request.environment,
                    pass_fds=request.descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=request.errors,
                    cwd="/",
                    start_new_session=True,  # Ctrl-C in a terminal is the owner's to answer
                )
            except BaseException as error:  # noqa: BLE001  the caller waits, and the thread serves the next one
                request.process.set_exception(error)
            else:
                request.process.set_result(process)


_lock = threading.Lock()
_spawner: _Spawner | None = None


def spawn(
    command: list[str], *, environment: dict[str, str], descriptors: tuple[int, ...], errors: int
) -> "subprocess.Popen[bytes]":
    """Start a program with `descriptors` open under their own numbers, stderr to `errors`, no stdin.

    Raises OSError where there is no such program.
    """
    global _spawner
    with _lock:
        if _spawner is None or _spawner.pid != os.getpid():
            _spawner = _Spawner()
        spawner = _spawner
    return spawner.spawn(
        _Request(command=command, environment=environment, descriptors=descriptors, errors=errors)
    )
