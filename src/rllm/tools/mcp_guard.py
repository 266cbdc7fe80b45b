"""A program that stands between us and a server's process, so that none outlives us. Standard library alone.

    we (owner) ──stdin, stdout──► server        the guard gives both away and only watches
        └─ starts ─► guard ─ starts ──┘
                       │  the server ended, the owner is gone, or SIGTERM:
                       └─ kills every descendant (Linux: also those that made themselves independent) and ends

Run as `python -I -S mcp_guard.py OWNER_PID COMMAND ARG …`. On stderr it writes two lines that begin with
MARK: the server's process id when it has started, and how it ended.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

MARK = "\x1erllm-guard "
LOOK_EVERY_S = 1.0
"""The interval at which the guard looks whether its owner is alive."""
GRACE_S = 0.5
"""From SIGTERM to SIGKILL."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGALRM}


def main(owner: int, command: list[str]) -> int:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a descendant leaves behind becomes our child
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)

    def in_the_server() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the guard itself is killed

    try:
        server = subprocess.Popen(command, preexec_fn=in_the_server)
    except OSError as error:
        _say(f"failed {error.strerror}: {command[0]}")
        return 127
    _say(f"started {server.pid}")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)  # so that the owner sees the end of the server's output when the server ends

    # An owner that is killed sends no signal, so the alarm makes the loop look.
    signal.setitimer(signal.ITIMER_REAL, LOOK_EVERY_S, LOOK_EVERY_S)
    while server.poll() is None and os.getppid() == owner:
        if signal.sigwait(_WATCHED) in (signal.SIGTERM, signal.SIGINT):
            break
        _reap(server)
    exit_status = server.poll()
    _end_all(server)
    _say("stopped" if exit_status is None else f"ended {exit_status}")
    return 0 if exit_status is None else exit_status & 0xFF


def _end_all(server: "subprocess.Popen[bytes]") -> None:
    """Ask, wait GRACE_S, kill; again for as long as there is one left."""
    if server.poll() is None:
        server.terminate()
    until = time.monotonic() + GRACE_S
    while server.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    while True:
        left = _descendants(os.getpid()) or ([server.pid] if server.poll() is None else [])
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(server)
        time.sleep(0.005)


def _reap(server: "subprocess.Popen[bytes]") -> None:
    """Wait for the dead among those that others left to us. The server itself is `poll`'s."""
    for pid in _children().get(os.getpid(), []):
        if pid != server.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    server.poll()


def _descendants(root: int) -> list[int]:
    """Children, their children and so on, as the kernel lists them now."""
    children = _children()
    pids: list[int] = []
    ahead = [root]
    while ahead:
        below = children.get(ahead.pop(), [])
        pids += below
        ahead += below
    return pids


def _children() -> dict[int, list[int]]:
    """Parent to children, of all processes that can be seen; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else []:
        if name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    return children


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{MARK}{text}\n".encode())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
