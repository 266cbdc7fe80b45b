"""The other end of `workers.py`: a process that calls one function, again and again.

    socket ──► {"number", "args"} ──► function(*args) ──► {"number", "status", "value", …} ──► socket

It imports nothing but the standard library and what the function needs. It is ended by the kernel, whatever
the function is doing: by an alarm a moment after the limit, by a signal when the owner's end of the lifeline
closes (Linux), and by the limit of memory. A child that the function forks off ends at once.
"""

import fcntl
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

MAX_REPLY_BYTES = 1 << 20
ALARM_AFTER_S = 0.4
"""The time after the limit at which the process ends itself; its owner has given up on it by then."""
_LENGTH = struct.Struct("!I")


class BrokenFrameError(Exception):
    """Bytes from the socket that are no message."""


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Raises TypeError or ValueError for what is no plain JSON, before anything is sent."""
    data = json.dumps(message, allow_nan=False).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(
    connection: socket.socket, *, deadline: float | None = None, max_bytes: int = 1 << 30
) -> dict[str, Any] | None:
    """The next message, None where the other side closed. Raises TimeoutError, OSError, BrokenFrameError."""
    head = _exactly(connection, _LENGTH.size, deadline)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > max_bytes:
        raise BrokenFrameError(f"a message of {length} bytes; the limit is {max_bytes}")
    data = _exactly(connection, length, deadline)
    if data is None:
        return None
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenFrameError(f"a message that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise BrokenFrameError("a message that is no object")
    return message


def _exactly(connection: socket.socket, length: int, deadline: float | None) -> bytes | None:
    parts: list[bytes] = []
    while length:
        if deadline is not None:
            # Never 0: that would mean not to wait at all, and raise another error than TimeoutError.
            connection.settimeout(max(deadline - time.monotonic(), 1e-6))
        part = connection.recv(min(length, 1 << 16))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def serve(connection: socket.socket, lifeline: int) -> None:
    """Answers calls until the owner closes the socket. The first message says what to call."""
    start = receive_message(connection)
    if start is None:
        return
    _end_with_the_owner(lifeline)
    sys.path[:] = start["path"]
    try:
        module, _, attribute = start["function"].partition(":")
        function = getattr(importlib.import_module(module), attribute)
    except BaseException as error:  # noqa: BLE001  the owner is told, whatever an import raises
        send_message(connection, {"ready": False, "detail": f"{type(error).__name__}: {error}"})
        return
    _limit(start["memory_mb"])
    send_message(connection, {"ready": True})
    while (request := receive_message(connection)) is not None:
        # By the signal's default action the kernel ends the process, also in the middle of a call in C.
        signal.setitimer(signal.ITIMER_REAL, start["timeout_s"] + ALARM_AFTER_S)
        reply = _call(function, request["args"]) | {"number": request["number"]}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _answer(connection, reply | {"cpu_s": time.process_time(), "left_children": _has_children()})


def _call(function: Callable[..., Any], args: list[Any]) -> dict[str, Any]:
    try:
        return {"status": "ok", "value": function(*args)}
    except BaseException as error:  # noqa: BLE001  whatever it raises is the answer, SystemExit included
        return {"status": "raised", "detail": type(error).__name__, "value": str(error)[:1000]}


def _answer(connection: socket.socket, reply: dict[str, Any]) -> None:
    try:
        length = len(json.dumps(reply, allow_nan=False))
        why = (
            f"a result of {length} bytes; the limit is {MAX_REPLY_BYTES}" if length > MAX_REPLY_BYTES else ""
        )
    except (TypeError, ValueError, RecursionError) as error:
        why = f"a result that is no plain JSON: {error}"
    if why:
        reply = {**reply, "status": "junk", "value": None, "detail": why[:1000]}
    send_message(connection, reply)


def _limit(memory_mb: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.register_at_fork(after_in_child=lambda: os._exit(0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))


def _end_with_the_owner(lifeline: int) -> None:
    """Nobody writes to the lifeline; when its other end closes, the kernel sends SIGIO, which ends us."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # `select` takes no descriptor above 1023, and this one has the number that it had in the owner.
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):
        os._exit(0)  # the owner went while we were starting


def _has_children() -> bool:
    """Whether the function left a child that still runs. Takes the exit codes of those that do not."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
