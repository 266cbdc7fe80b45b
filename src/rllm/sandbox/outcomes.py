"""From the way a process ended to one of seven words: pure functions, because rewards hang on them."""

import errno
import os
import re
import signal

from rllm.errors import SandboxError
from rllm.errors.machine import MACHINE_ERRNOS
from rllm.sandbox.process import Ended
from rllm.sandbox.types import ExecResult, Limits, Status

FAULTS = {
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSYS,
    signal.SIGTRAP,
}
STOPPED = {
    "timeout": Status.TIMEOUT,
    "cpu": Status.TIMEOUT,
    "memory": Status.OUT_OF_MEMORY,
    "processes": Status.KILLED,
    "output": Status.OUTPUT_LIMIT,
    "result": Status.OUTPUT_LIMIT,
    "killed": Status.KILLED,
    "stopped": Status.KILLED,
    "owner": Status.KILLED,
}
"""The reason for which the sandbox ended a program -> its name."""
REFUSED_ALLOCATION = re.compile(rb"(?:[\w.]+\._ArrayMemoryError|MemoryError)\b")
"""The last lines of a traceback of Python, and of numpy, after a refused allocation."""
NEAR_THE_LIMIT = 0.8
"""The share of its memory limit from which on a process's fault is taken for a refused allocation."""


def file_error(kind: str, number: int, message: str, path: str) -> OSError | SandboxError:
    """The error of a file job: OSError for what a program's files caused, SandboxError for this machine."""
    # A disk that is full where a program's files go is the program's own.
    is_full = number == errno.ENOSPC and kind in ("write", "upload", "unpack")
    if number in MACHINE_ERRNOS and not is_full:
        return SandboxError(f"`{kind}` of `{path}` failed: {message}")
    return OSError(number, message, path)


def status_of(
    why: str, exit_code: int, *, cpu_s: float, max_rss_kb: int, stderr: bytes, limits: Limits
) -> Status:
    """`why` as `process.Ended` has it, `exit_code` as `subprocess` has it."""
    if why != "exit":
        return STOPPED[why]
    if exit_code == 0:
        return Status.OK
    if exit_code < 0:
        number = -exit_code
        # RLIMIT_CPU sends SIGXCPU at the soft limit, and SIGKILL
        # at the hard one a second later (`set_rlimits`).
        if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= limits.cpu_s):
            return Status.TIMEOUT
        if number in FAULTS:
            near = max_rss_kb >= NEAR_THE_LIMIT * limits.memory_mb * 1024
            return Status.OUT_OF_MEMORY if near else Status.CRASHED
        return Status.KILLED
    last_line = stderr.rstrip().rpartition(b"\n")[2]
    return Status.OUT_OF_MEMORY if REFUSED_ALLOCATION.match(last_line) else Status.ERROR


def exec_result(end: Ended, limits: Limits, *, wants_result: bool) -> ExecResult:
    """From what a warden said to what a caller is told."""
    code = os.waitstatus_to_exitcode(end.wait_status)
    status = status_of(
        end.why,
        code,
        cpu_s=end.cpu_s,
        max_rss_kb=end.max_rss_kb,
        stderr=end.stderr,
        limits=limits,
    )
    return ExecResult(
        status=status,
        exit_code=code if end.why == "exit" and status is not Status.TIMEOUT else None,
        stdout=end.stdout.decode("utf-8", "replace"),
        stderr=end.stderr.decode("utf-8", "replace"),
        truncated=end.truncated,
        wall_s=end.wall_s,
        result=end.result.decode("utf-8", "replace") if wants_result and end.result else None,
    )
