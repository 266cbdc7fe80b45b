"""The first process of a sandbox: takes orders, makes a cell for each program, watches it, says how it ended.

    owner ══ control socket ══► warden ──fork──► init of the cell (pid 1 there) ──fork──► the program
      ▲                            │ wall, CPU, memory, processes; kills the cell                │
      └───────────── pipes: stdout, stderr, result, straight from the program ◄──────────────────┘

The warden passes descriptors on and never reads what is in them, so what it forks next knows nothing of the
programs before. It runs no line of theirs. When the owner dies, the control socket ends and so does
everything. Runs inside the sandbox, on any Python from 3.9, from source that `rllm.sandbox.bundle` sends.
"""

from __future__ import annotations

import array
import errno
import gc
import json
import os
import select
import socket
import sys
import time

from rllm.sandbox.inside import cell, cellmates, kernel

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    from typing import Any

PREIMPORTED = (
    *("ast", "base64", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses", "datetime"),
    *("decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "linecache"),
    *("math", "numbers", "operator", "random", "re", "statistics", "string", "struct", "textwrap"),
    *("threading", "time", "traceback", "types", "typing", "warnings"),
)
"""Modules that are ready when a Python program starts. All others of the standard library are there to
import; each one here makes every fork a little dearer (hashlib, with OpenSSL, by a quarter)."""

FIRST_LOOK_S, LOOK_EVERY_S = 0.02, 0.03
"""When the watch first counts memory and processes, and how often from then on."""


def main(arguments: dict[str, Any]) -> None:
    control = socket.socket(fileno=arguments["control"])
    control.setblocking(True)
    # Programs may have the same user id; a process that is not dumpable cannot be traced or read by them.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    place = cell.CellHome(arguments)
    refusal = None
    if place.root is not None:
        seal_imports()
    if not place.keeps_files:  # else it runs programs, which start with an interpreter of their own
        if arguments["packages"]:
            sys.path.append(arguments["packages"])
        for name in PREIMPORTED:
            __import__(name)
        refusal = import_ahead(arguments["imports"])
    # Objects that the collector never visits again keep their pages shared with every fork.
    gc.collect()
    gc.freeze()
    while True:
        order, descriptors = cell.receive(control)
        if order is None:
            break
        if order["do"] == "begin" and refusal is not None:
            send(control, {"is": "refused", "error": refusal})
        elif order["do"] == "begin":
            place.begin(order["first_uid"], order["disk_mb"])
            send(control, {"is": "ready", "python": sys.version.split()[0], "read_only": place.read_only})
            place.make_ahead(order["disk_mb"])
        elif order["do"] == "state":
            place.discard_spare()
            send(control, {**change_state(place, order), "number": order["number"]})
            place.make_ahead(0)  # a sandbox with states has one disk for all its cells
        elif order["do"] == "run":
            run(control, place, order, descriptors)
        elif order["do"] == "listen":
            listen(control, order)
        # what else there is, is a kill that came too late
    place.remove()


def change_state(place: cell.CellHome, order: dict[str, Any]) -> dict[str, Any]:
    """Keep the files of the writable root as they are, or return to how they were kept; says which states the
    present one stands on."""
    try:
        if place.stack is None:
            raise OSError(errno.EOPNOTSUPP, "states are kept of a writable root with layers alone")
        if order["chain"] is None:
            place.stack.keep()
        else:
            place.stack.return_to(order["chain"])
        return {"is": "state", "chain": place.stack.chain}
    except OSError as error:
        return {"is": "state", "errno": error.errno, "error": error.strerror or str(error)}


def seal_imports() -> None:
    """Load what is needed later, and nothing from then on: programs with a writable root can write to where
    modules are, and what cells run before they give up their rights must not come from there."""
    import codecs
    import importlib.machinery
    import shutil  # noqa: F401
    import tarfile  # noqa: F401
    import warnings  # noqa: F401  which os.execvpe asks for

    for name in ("ascii", "utf-8", "latin-1", "unicode_escape"):
        codecs.lookup(name)
    sys.meta_path[:] = [each for each in sys.meta_path if each is not importlib.machinery.PathFinder]
    sys.path.clear()


def import_ahead(names: list[str]) -> str | None:
    """Import packages that every program shall find ready; says why that cannot be."""
    for name in names:
        try:
            __import__(name)
        except BaseException as error:  # noqa: BLE001  a package may raise what it likes
            return f"`import {name}` raised {type(error).__name__}: {error}"
        if len(os.listdir("/proc/self/task")) > 1:
            return f"`import {name}` started a thread, which would be lost in every program"
    return None


def run(control: socket.socket, place: cell.CellHome, order: dict[str, Any], descriptors: list[int]) -> None:
    """Give one program to a fresh cell, watch it to its end, and say how it ended."""
    started_s = time.monotonic()
    disk_mb = order["limits"]["disk_mb"]
    new_cell = place.take(disk_mb, order["job"], order["guard"])
    if order["job"] == "changes" and place.stack is not None:
        order["states"] = [*place.stack.chain, place.stack.state]
    new_cell.give(order, descriptors)
    # The program alone holds the writing ends from here on, so the owner's pipes end with it.
    for descriptor in descriptors:
        os.close(descriptor)
    why = watch(control, place, new_cell, order, started_s)
    message: dict[str, Any] = {"is": "ended", "number": order["number"], "why": why or "exit"}
    message["wall_s"] = time.monotonic() - started_s
    report_line = os.read(new_cell.report, 4096).partition(b"\n")[
        0
    ]  # first speaks the truth: what follows may be a trick
    if report_line:
        message.update(json.loads(report_line))
    elif why is None:
        message["why"] = (
            "killed"  # the cell's init was killed from outside, as the kernel does without memory
        )
    place.clear(new_cell)
    send(control, message)
    if why == "owner":
        raise SystemExit
    # After the answer, so that the owner does not wait for these forks.
    place.make_ahead(disk_mb)


def watch(
    control: socket.socket,
    place: cell.CellHome,
    program_cell: cell.Cell,
    order: dict[str, Any],
    started_s: float,
) -> str | None:
    """Wait for the cell to end, or end it. Returns why it was ended, or None where it ended by itself."""
    limits = order["limits"]
    ending = os.pidfd_open(program_cell.init)
    poll = select.poll()
    poll.register(ending, select.POLLIN)
    poll.register(control, select.POLLIN)
    look_s = started_s + FIRST_LOOK_S
    deadline_s = started_s + limits["wall_s"]
    why = None
    try:
        while True:
            wait_s = max(min(look_s, deadline_s) - time.monotonic(), 0)
            events = dict(poll.poll(wait_s * 1000 + 0.5))
            if ending in events:
                return why
            if control.fileno() in events:
                message, _ = cell.receive(control)
                if message is None:
                    why = "owner"
                elif message["number"] == order["number"]:
                    why = message["why"]
            elif time.monotonic() >= deadline_s:
                why = "timeout"
            elif time.monotonic() >= look_s:
                members = cellmates.members(place.is_bare, program_cell.init)
                why = cellmates.excess(members, program_cell.init, limits, is_bare=place.is_bare)
                look_s = time.monotonic() + LOOK_EVERY_S
            if why is not None:
                place.kill(program_cell)
                while not select.select([ending], [], [], 0.05)[0]:
                    place.kill(program_cell)
                return why
    finally:
        os.close(ending)


def listen(control: socket.socket, order: dict[str, Any]) -> None:
    """Hand the owner a socket of this network, so that it can answer programs that have no other."""
    datagrams, number = order["datagrams"], order["number"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM) as server:
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", order["port"]))
            if not datagrams:
                server.listen(128)
        except OSError as error:
            send(control, {"is": "refused", "number": number, "error": str(error)})
            return
        message = json.dumps({"is": "listening", "number": number}).encode()
        rights = array.array("i", [server.fileno()]).tobytes()
        control.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def send(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(message).encode())
    except ConnectionError:
        raise SystemExit from None  # the owner is gone
