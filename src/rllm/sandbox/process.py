"""One warden as its owner sees it: start it, give it a program, read what the program says, end it.

    WardenProcess.run ── order + descriptors ──► warden
            │ poll: stdout, stderr, result (from the program itself), control (from the warden)
            └─► Ended(why, wait status, stdout, stderr, result, wall_s)

The warden holds the program to its wall, CPU, memory and process limits; the owner counts its output. A
warden that does not answer in time is ended, and SandboxError says so: it is never the program's fault.
"""

import array
import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from rllm.errors import ConfigError, SandboxError
from rllm.errors.machine import MACHINE_ERRNOS
from rllm.sandbox.bundle import LOADER, bundle, memory_file
from rllm.sandbox.interpreter import Interpreter
from rllm.sandbox.launch import FIRST_UID, SURROUNDINGS
from rllm.sandbox.leftovers import Register
from rllm.sandbox.packages import ENVIRONMENT, PLACE
from rllm.sandbox.spawner import spawn
from rllm.sandbox.types import GuardRules, Limits, Root

START_S = 30.0
"""The time for a warden to be ready, on a machine with much else to do."""
GRACE_S = 5.0
"""The time after a program's wall limit in which its warden may report the end."""
NOTICE_S = 0.1
"""A thread that is told to end (`ProgramStopped`, Ctrl-C) notices it in Python, not in a system call."""
CLOSE_S = 2.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """The job of a cell: `kind` as in `inside/jobs.py`, with its payload."""

    kind: str
    payload: dict[str, Any]
    stdin: bytes = b""
    limits: Limits
    output_bytes: int
    """Where stdout and stderr together are cut and the program is stopped."""
    wants_result: bool = False
    guard: GuardRules | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class Ended:
    """The end of a job."""

    why: str
    """"exit" by itself; "timeout", "cpu", "memory", "processes", "output", "result" or "killed" by the
    sandbox; "stopped" by its owner."""
    wait_status: int
    cpu_s: float
    max_rss_kb: int
    wall_s: float
    stdout: bytes
    stderr: bytes
    result: bytes
    truncated: bool


class WardenDied(SandboxError):
    """Raised when a warden ended although nobody asked it to: the job may be given to another."""


class WardenProcess:
    """A started warden. One job at a time; `close` may come from any thread at any time."""

    def __init__(
        self,
        backend: str,
        python: Interpreter,
        *,
        keeps_files: bool,
        disk_mb: float,
        root: Root | None = None,
    ) -> None:
        self.backend = backend
        self.read_only: tuple[str, ...] = ()
        """The parts of a writable root that are not writable."""
        self._root = root
        self._last_order = 0
        """The number of the last order. Answers bear it: those to orders whose callers were interrupted are
        still to come."""
        self._ordering = threading.RLock()
        """Held from the number of an order until it is sent: a `stop` in between would name a job that the
        warden does not know yet."""
        self._closed = threading.Event()
        self._in_use = threading.RLock()
        """Held during a run: `close` from another thread ends the run, and then waits for this."""
        try:
            self._register = Register.of_this_process()
            self._directory = self._register.new_directory() if backend == "subprocess" else ""
            self._packages = self._packages_of(python)
            # Packets keep their borders, so one `recv` is one message,
            # and descriptors arrive with the order that they belong to.
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs:
                    self._process = self._start(python, theirs, keeps_files, disk_mb)
            except BaseException:
                self._control.close()
                raise
        except OSError as error:
            raise SandboxError(f"The {backend} sandbox did not start: {error}") from error

    def _packages_of(self, python: Interpreter) -> str:
        """Where its programs find packages; nothing where there are none."""
        if not python.packages or not self._directory:
            return PLACE if python.packages else ""
        folder = os.path.join(self._directory, "packages")
        for binding in python.packages:
            link = os.path.join(folder, binding.place)
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(binding.source, link)
        return folder

    def _start(
        self, python: Interpreter, theirs: socket.socket, keeps_files: bool, disk_mb: float
    ) -> "subprocess.Popen[bytes]":
        start = SURROUNDINGS[self.backend].start(python, self._root)
        descriptors = [*start.descriptors]
        with tempfile.TemporaryFile() as errors:
            try:
                code = bundle(
                    {
                        "control": theirs.fileno(),
                        "identity": start.identity,
                        "keeps_files": keeps_files,
                        "binds": start.binds,
                        "builds_root": start.builds_root,
                        "directory": self._directory,
                        "packages": self._packages,
                        "root": asdict(self._root) if self._root else None,
                        "imports": [] if keeps_files else python.imports,
                    },
                    bytecode=python.bytecode,
                )
                descriptors.append(code)
                process = spawn(
                    [*start.command, "-c", LOADER, str(code)],
                    environment=python.environment,
                    descriptors=(theirs.fileno(), *descriptors),
                    errors=errors.fileno(),
                )
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            # From here on the warden alone holds its end, so its death is an end of file here.
            theirs.close()
            # Set here as well: `close` below needs it before `__init__` has what this returns.
            self._process = process
            try:
                self._register.add(process.pid)
                # Linux process ids have at most 22 bits; 8 more
                # number the runs, and the sum stays at most LAST_UID.
                first_uid = FIRST_UID + ((process.pid & 0x3FFFFF) << 8)
                self._send({"do": "begin", "first_uid": first_uid, "disk_mb": disk_mb})
                ready = self._hear(START_S)
            except BaseException:
                self.close()
                raise
            if ready is not None and ready["is"] == "refused":
                self.close()
                raise ConfigError(f"The sandbox cannot offer these packages: {ready['error']}")
            if ready is None:
                self.close()
                errors.seek(0)
                error_text = (
                    errors.read(4000).decode(errors="replace").strip() or f"code {process.returncode}"
                )
                hint = SURROUNDINGS[self.backend].hint()
                raise SandboxError(f"The {self.backend} sandbox did not start: {error_text}{hint}")
            self.read_only = tuple(ready["read_only"])
        return process

    @property
    def workdir(self) -> str:
        """Where programs start, as they see it."""
        if self._root is not None:
            return "/"
        return os.path.join(self._directory, "box") if self._directory else "/box"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._closed.is_set() and self._process.poll() is None

    def run(self, job: Job) -> Ended:
        """Run one job to its end. Raises WardenDied, or SandboxError where a cell could not be made or this
        machine has no room for the job."""
        try:
            return self._run(job)
        except OSError as error:
            raise SandboxError(f"The {self.backend} sandbox cannot be given a job: {error}") from error

    def _run(self, job: Job) -> Ended:
        """Raises OSError where this process has no room for the pipes of the job."""
        with self._in_use:
            wire = _Wire()
            try:
                wire.open(job)
                with self._ordering:
                    self._last_order += 1
                    self._order(job, wire)
                # With our copies of the writing ends closed, the
                # pipes end when the last process of the cell does.
                wire.handed_on()
                return self._follow(job, wire)
            except SandboxError:
                raise
            except BaseException:  # the caller was told to end, or cannot read what the job gives
                with contextlib.suppress(WardenDied):
                    self.stop()
                raise
            finally:
                wire.close()

    def stop(self) -> None:
        """End the job that runs; one that has ended meanwhile is past it. May come from any thread."""
        with self._ordering:
            self._send({"do": "kill", "number": self._last_order, "why": "stopped"})

    def change_state(self, chain: list[int] | None) -> list[int]:
        """Keep the files of the writable root as they are now (`chain` is None), or return to a kept state;
        the states that the present one stands on. Raises OSError where none can be kept."""
        with self._in_use:
            answer = self._answer_to({"do": "state", "chain": chain})
            if answer is None:
                self.close()
                raise WardenDied(f"The {self.backend} sandbox died while it changed the state of its files.")
            if "error" in answer and answer["errno"] in MACHINE_ERRNOS:
                raise SandboxError(f"The state of the sandbox's files cannot change: {answer['error']}")
            if "error" in answer:
                raise OSError(answer["errno"], answer["error"])
            return answer["chain"]

    def _order(self, job: Job, wire: "_Wire") -> None:
        order = {
            "do": "run",
            "number": self._last_order,
            "job": job.kind,
            "limits": asdict(job.limits),
            "has_result": job.wants_result,
            "guard": asdict(job.guard) if job.guard else None,
            "env": {"PYTHONPATH": self._packages, **ENVIRONMENT} if self._packages else {},
        }
        rights = array.array("i", wire.theirs)
        try:
            self._control.sendmsg(
                [json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights.tobytes())]
            )
        except OSError as error:
            raise WardenDied(f"The {self.backend} sandbox is gone: {error}") from error

    def _follow(self, job: Job, wire: "_Wire") -> Ended:
        """Read everything until the warden says that the cell has ended, then what is left in the pipes."""
        deadline_s = time.monotonic() + job.limits.wall_s + GRACE_S
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        for descriptor in wire.ours:
            poll.register(descriptor, select.POLLIN)
        stop_reason: str | None = None
        while True:
            left_s = deadline_s - time.monotonic()
            events = poll.poll(max(min(left_s, NOTICE_S), 0) * 1000)
            if not events and left_s > NOTICE_S:
                continue
            if not events:
                self.close()
                raise WardenDied(
                    f"The {self.backend} sandbox did not answer within {GRACE_S:g} s "
                    "after its program's limit."
                )
            for descriptor, _ in events:
                if descriptor == self._control.fileno():
                    continue
                if not wire.take(descriptor):
                    poll.unregister(descriptor)
            if stop_reason is None and wire.excess:
                stop_reason = wire.excess
                self._send({"do": "kill", "number": self._last_order, "why": stop_reason})
            if any(descriptor == self._control.fileno() for descriptor, _ in events):
                message = self._hear(0)
                if message is None:
                    raise WardenDied(f"The {self.backend} sandbox died while it ran a program.")
                if self._is_of_last_order(message):
                    return self._end_of(message, stop_reason, wire)

    def _end_of(self, message: dict[str, Any], stop_reason: str | None, wire: "_Wire") -> Ended:
        if message["why"] == "failed":
            raise SandboxError(f"The {self.backend} sandbox could not make a cell: {message['error']}")
        if message["why"] == "killed" and not self._directory:
            # Programs cannot end the first process of their own namespace: the machine did.
            raise SandboxError(f"The {self.backend} sandbox lost a cell: its first process was killed.")
        wire.drain()
        # A program can write too much and end before the excess is read, so it was never stopped for it.
        why = wire.excess if message["why"] == "exit" and wire.excess else message["why"]
        return Ended(
            why=stop_reason or why,
            # A cell that was killed sends no report; wait status 9 is an end by SIGKILL.
            wait_status=message.get("status", 9),
            cpu_s=message.get("cpu_s", 0.0),
            max_rss_kb=message.get("max_rss_kb", 0),
            wall_s=message["wall_s"],
            stdout=bytes(wire.output["stdout"]),
            stderr=bytes(wire.output["stderr"]),
            result=bytes(wire.output["result"]) if "result" in wire.output else b"",
            truncated=wire.excess is not None,
        )

    def listen(self, port: int, *, datagrams: bool) -> socket.socket:
        """A socket that listens at 127.0.0.1 inside. To be called between two runs."""
        with self._in_use:
            answer = self._answer_to({"do": "listen", "port": port, "datagrams": datagrams})
            if answer is None:
                raise WardenDied(f"The {self.backend} sandbox is gone.")
            if "error" in answer:
                raise SandboxError(f"Nothing can listen at port {port} inside: {answer['error']}")
            return socket.socket(fileno=answer["sockets"][0])

    def _answer_to(self, order: dict[str, Any]) -> dict[str, Any] | None:
        """The warden's answer to an order that is no job; None when it is gone or silent for too long."""
        with self._ordering:
            self._last_order += 1
            self._send({**order, "number": self._last_order})
        until_s = time.monotonic() + START_S
        while (message := self._hear(max(until_s - time.monotonic(), 0))) is not None:
            if self._is_of_last_order(message):
                return message
        return None

    def _is_of_last_order(self, message: dict[str, Any]) -> bool:
        """Whether a message is the answer to the last order. That to an earlier one is for nobody."""
        if message["number"] == self._last_order:
            return True
        for descriptor in message["sockets"]:
            os.close(descriptor)
        return False

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError as error:
            raise WardenDied(f"The {self.backend} sandbox is gone: {error}") from error

    def _hear(self, timeout_s: float) -> dict[str, Any] | None:
        """The warden's next message, with the descriptors that came with it as `sockets`; None when it is
        gone or silent for too long."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 65536, 1)
        except OSError:
            return None
        return {**json.loads(data), "sockets": descriptors} if data else None

    def close(self) -> None:
        """End the warden and with it every process of its cells."""
        if self._closed.is_set():
            return
        self._closed.set()
        # Not `close`: a run in another thread polls this descriptor. A shutdown wakes it and the warden
        # alike, and the run then gives back `_in_use`, which is taken below.
        with contextlib.suppress(OSError):  # gone already
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._in_use:
            self._control.close()
        self._register.remove(self._process.pid)
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


class _Wire:
    """The descriptors of one job: what the cell gets, and the ends that the owner reads."""

    def __init__(self) -> None:
        self.theirs: list[int] = []
        self.output: dict[str, bytearray] = {}
        self.excess: str | None = None
        self._open: dict[int, str] = {}

    def open(self, job: Job) -> None:
        """Raises OSError where there is no room for them; `close` closes what was opened until then."""
        self._job = job
        # In the order that `cell.await_order` expects: payload, then what becomes 0, 1, 2 and perhaps 3.
        payload = json.dumps(job.payload).encode("utf-8", "surrogatepass")
        self.theirs.append(memory_file(payload, name="payload"))
        self.theirs.append(memory_file(job.stdin, name="stdin"))
        for name in ("stdout", "stderr", *(["result"] if job.wants_result else [])):
            reading, writing = os.pipe()
            self._open[reading] = name
            self.output[name] = bytearray()
            self.theirs.append(writing)
            os.set_blocking(reading, False)

    @property
    def ours(self) -> list[int]:
        return list(self._open)

    def handed_on(self) -> None:
        for descriptor in self.theirs:
            os.close(descriptor)
        self.theirs = []

    def take(self, descriptor: int) -> bool:
        """Read what is there; False at the end. Beyond the limit nothing is kept, and `excess` says so."""
        try:
            block = os.read(descriptor, 65536)
        except BlockingIOError:
            return True
        if not block:
            os.close(descriptor)
            del self._open[descriptor]
            return False
        name = self._open[descriptor]
        if name == "result":
            room = self._job.output_bytes - len(self.output["result"])
        else:
            room = self._job.output_bytes - len(self.output["stdout"]) - len(self.output["stderr"])
        self.output[name] += block[: max(room, 0)]
        if len(block) > room and self.excess is None:
            self.excess = "result" if name == "result" else "output"
        return True

    def drain(self) -> None:
        """Read the rest of the pipes when every writer is dead."""
        for descriptor in self.ours:
            while descriptor in self._open:
                num_bytes = len(self.output[self._open[descriptor]])
                if not self.take(descriptor):
                    break
                if self.excess or num_bytes == len(self.output[self._open[descriptor]]):
                    break

    def close(self) -> None:
        self.handed_on()
        for descriptor in self._open:
            os.close(descriptor)
        self._open = {}
