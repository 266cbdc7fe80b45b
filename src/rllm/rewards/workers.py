"""Functions that may hang, crash or eat memory, in processes that can be killed.

    any thread ──► WorkerPool.call(args) ──► a free worker ──► JSON over a socket ──► function(*args)
                        │                        └ limit over, died, talked nonsense: killed, replaced, reaped
                        └──► WorkerReply(status, value, detail)

A worker is a new Python process (`worker_process.py`): nothing is forked, and of the caller's environment it
has a few names only. It is started when it is first needed, serves one call at a time and keeps what it
imported. It ends with the pool, with the interpreter, and when its owner is killed.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, RewardError
from rllm.rewards import worker_process
from rllm.rewards.worker_process import BrokenFrameError, receive_message, send_message

GRACE_S = 0.1
"""The time after its limit in which a worker may still hand in an answer."""
START_TIMEOUT_S = 120.0
"""For a worker to import what it needs, on a machine that is busy with other things."""
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
_STATUSES = ("ok", "raised", "junk")


class WorkerStatus(StrEnum):
    """The result of a call by kind."""

    OK = "ok"
    RAISED = "raised"
    """The function raised: `detail` is the class, `value` the message."""
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The process ended: killed, `os._exit`, a fault in C."""
    JUNK = "junk"
    """The status of a call that returned no plain JSON or too much of it, or wrote nonsense to its socket."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerReply:
    """The result of one call."""

    status: WorkerStatus
    value: Any = None
    detail: str = ""
    cpu_s: float | None = None
    """The processor time of a call that timed out, where the system tells. Little of it means that the
    machine was busy, and says nothing about the arguments."""


class WorkerPool:
    """Calls one function, `package.module:function`, in `workers` processes of its own; from any thread.

    Arguments and result are plain JSON. A call is answered within `timeout_s` + 0.5 s from when a worker is
    free and ready, whatever the function does. `memory_mb` bounds the address space of each process.
    """

    def __init__(
        self, function: str, *, workers: int = 2, timeout_s: float = 5.0, memory_mb: int = 1024
    ) -> None:
        if workers < 1 or not timeout_s > 0 or memory_mb < 256:
            raise ConfigError(
                f"A worker pool was given workers={workers}, timeout_s={timeout_s}, memory_mb={memory_mb}; "
                "it needs at least 1 worker, a limit above 0 s and 256 MB."
            )
        self.function = function
        self.workers = workers
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self.num_replaced = 0
        """Workers that had to be killed, or were found dead."""
        self._closed = False
        self.is_warm = False
        """Whether its workers were told to start before the first call."""
        self._warming = threading.Lock()
        self._alive: set[_Worker] = set()
        self._free = self._nobody_free()
        self._ending = weakref.finalize(self, _end_all, self._alive, os.getpid())
        _POOLS.add(self)

    def call(self, *args: Any) -> WorkerReply:
        """The function's value for `args`. Waits for a free worker; the limit begins when it has one.

        Raises RewardError where no worker can be started: that says nothing about the arguments.
        """
        worker = self._free.get()
        try:
            if self._closed:
                raise RewardError(f"The workers of {self.function} were closed.")
            if worker is None or worker.has_ended():
                self._bury(worker)
                # Before the start, which may raise: the buried worker must not go back into the queue below.
                worker = None
                worker = self._start_worker()
            reply = worker.call(args, self.timeout_s)
            if worker.is_spent:
                self._bury(worker)
                worker = None
                if self._closed:
                    raise RewardError(f"The workers of {self.function} were closed in the middle of a call.")
            return reply
        finally:
            self._free.put(worker)

    def warm(self) -> None:
        """Begin to start the workers, once, and return at once; calls wait for one that is ready."""
        with self._warming:
            if self.is_warm or self._closed:
                return
            self.is_warm = True
        for _ in range(self.workers):
            threading.Thread(target=self._warm_one, name="rllm-warming", daemon=True).start()

    def _warm_one(self) -> None:
        worker = self._free.get()
        try:
            if worker is None and not self._closed:
                worker = self._start_worker()
        except RewardError:
            worker = None  # the first call that needs it tries again, and says what is wrong
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Ends all workers, also those in the middle of a call; again is harmless."""
        self._closed = True
        for worker in self._alive.copy():
            worker.end()
        with contextlib.suppress(queue.Empty):
            while True:
                self._bury(self._free.get_nowait())
        for _ in range(self.workers):
            self._free.put(None)  # so that whoever waits is told

    def forget_workers(self) -> None:
        """For a process that was forked off the owner: its workers are not ours to talk to, nor to end."""
        # The sockets are shared with the parent: to write to them would mix two conversations.
        for worker in self._alive:
            worker.let_go()
        _INHERITED.extend(self._alive)
        self._alive.clear()
        self._free = self._nobody_free()
        self.is_warm = False

    def _nobody_free(self) -> "queue.LifoQueue[_Worker | None]":
        # Last in, first out: the worker that was used last is warm, and places without one stay unstarted.
        free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.workers):
            free.put(None)
        return free

    def _start_worker(self) -> "_Worker":
        worker = _Worker(self.function, self.timeout_s, self.memory_mb)
        self._alive.add(worker)
        try:
            worker.wait_until_ready()
        except BaseException:
            self._bury(worker)
            raise
        return worker

    def _bury(self, worker: "_Worker | None") -> None:
        if worker is not None:
            self.num_replaced += not self._closed
            worker.end()
            worker.let_go()
            self._alive.discard(worker)


class _Worker:
    """One process, and our end of the socket to it. Used by one thread at a time."""

    def __init__(self, function: str, timeout_s: float, memory_mb: int) -> None:
        self.function = function
        self.owner = os.getpid()
        self.is_spent = False
        """Whether it cannot be called again."""
        self._number = 0
        self._cpu_s = 0.0
        self._socket, theirs = socket.socketpair()
        their_lifeline, self._lifeline = os.pipe()
        # -P keeps this folder off `sys.path`: its `code` would be found before the library's.
        command = [sys.executable, "-P", worker_process.__file__, str(theirs.fileno()), str(their_lifeline)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), their_lifeline),
                start_new_session=True,
                env=_environment(),
            )
        except OSError as error:
            self.let_go()
            raise RewardError(f"No worker process for {function} can be started: {error}") from error
        finally:
            theirs.close()
            os.close(their_lifeline)
        self._limits = {"timeout_s": timeout_s, "memory_mb": memory_mb}

    def wait_until_ready(self) -> None:
        """Raises RewardError where the process does not come up."""
        start = {"function": self.function, "path": sys.path, **self._limits}
        try:
            send_message(self._socket, start)
            message = receive_message(self._socket, deadline=time.monotonic() + START_TIMEOUT_S)
        except TimeoutError:
            message = {"detail": f"it was not ready after {START_TIMEOUT_S:g} s"}
        except (OSError, BrokenFrameError) as error:
            message = {"detail": str(error)}
        if message is None or message.get("ready") is not True:
            why = self._cause_of_death() if message is None else message.get("detail")
            raise RewardError(f"The worker process for {self.function} did not start: {why}")

    def call(self, args: tuple[Any, ...], timeout_s: float) -> WorkerReply:
        """The reply to a call; where that cannot be trusted, `is_spent` is set."""
        self._number += 1
        deadline = time.monotonic() + timeout_s + GRACE_S
        # A worker that reads nothing would block the sending for ever.
        self._socket.settimeout(timeout_s + GRACE_S)
        try:
            send_message(self._socket, {"number": self._number, "args": args})
            message = receive_message(
                self._socket, deadline=deadline, max_bytes=worker_process.MAX_REPLY_BYTES
            )
        except TimeoutError:
            return self._reply(WorkerStatus.TIMEOUT, f"no answer within {timeout_s:g} s", self._cpu_of_call())
        except BrokenFrameError as error:
            return self._reply(WorkerStatus.JUNK, str(error))
        except OSError:
            message = None  # it went away while we wrote
        if message is None:
            why = self._cause_of_death()
            timed_out = why == _SIGALRM
            return self._reply(WorkerStatus.TIMEOUT if timed_out else WorkerStatus.CRASHED, why)
        # The function may write to the socket itself; only the number of this call is believed.
        if message.get("number") != self._number or message.get("status") not in _STATUSES:
            return self._reply(WorkerStatus.JUNK, "not the answer to what was asked")
        self._cpu_s = float(message.get("cpu_s") or 0.0)
        self.is_spent = message.get("left_children") is not False
        return WorkerReply(
            status=WorkerStatus(message["status"]),
            value=message.get("value"),
            detail=str(message.get("detail", "")),
        )

    def has_ended(self) -> bool:
        """Without taking its exit code: until then nobody else can get its process id."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True  # `close` took it from another thread

    def end(self) -> None:
        """Kills the process and all of its session."""
        if self._process.returncode is None and os.getpid() == self.owner:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # Its session, not it alone: what the function has started must not outlive the call.
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()

    def let_go(self) -> None:
        """Closes our ends of socket and lifeline."""
        self._socket.close()
        os.close(self._lifeline)

    def _reply(self, status: WorkerStatus, detail: str, cpu_s: float | None = None) -> WorkerReply:
        self.is_spent = True
        return WorkerReply(status=status, detail=detail, cpu_s=cpu_s)

    def _cause_of_death(self) -> str:
        """Cause of death of a process that closed its socket, which it does a moment before it ends."""
        for _ in range(20):
            if self.has_ended():
                code = self._process.wait()
                return signal.Signals(-code).name if code < 0 else f"it ended with exit code {code}"
            time.sleep(0.005)
        return "it closed its socket"

    def _cpu_of_call(self) -> float | None:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None  # no /proc on this system
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") - self._cpu_s


_SIGALRM = "SIGALRM"
_POOLS: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()
_INHERITED: "list[_Worker]" = []
"""Workers of the process that this one was forked from; kept, because their end is none of our business."""
_SHARED: dict[tuple[str, int, float, int], WorkerPool] = {}
_SHARED_LOCK = threading.Lock()


def shared_pool(
    function: str, *, workers: int = 2, timeout_s: float = 5.0, memory_mb: int = 1024
) -> WorkerPool:
    """The one pool of this process with these settings. It lives as long as the interpreter."""
    key = (function, workers, timeout_s, memory_mb)
    with _SHARED_LOCK:
        if key not in _SHARED:
            _SHARED[key] = WorkerPool(function, workers=workers, timeout_s=timeout_s, memory_mb=memory_mb)
        return _SHARED[key]


def _environment() -> dict[str, str]:
    """Few names, none of them secret; a fixed hash seed, so that the same question has the same answer."""
    variables = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return variables | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def _end_all(alive: "set[_Worker]", owner: int) -> None:
    if os.getpid() == owner:
        for worker in alive.copy():
            worker.end()
            worker.let_go()


def _after_fork() -> None:
    for pool in _POOLS:
        pool.forget_workers()


os.register_at_fork(after_in_child=_after_fork)
