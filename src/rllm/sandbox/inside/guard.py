"""Programs of an agent's that its tests start: they neither see nor change the tests, nor what these write.

    init of the cell ──ptrace──► bash /tests/test.sh ─┬─ python3 /tests/check.py     as it is
                                                      └─ bash /app/run.sh            an agent's: held

A held program is stopped before its first instruction, and landlock_restrict_self(2) is called in its name:
from then on the kernel holds it and all that it starts. It reads everything but the tests (and of those what
its words name), and writes to the folders of the agent's world and to temporary ones.

Who is an agent's is seen at each exec, by files: the program itself, or the first file among its words, is
one that the agent left or that a held program made; or it is a builder such as `make`, which reads the folder
that it is started in. Code that a process of the tests imports, or reads from a pipe, is in that process, and
nothing here tells it apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import stat
import struct
import time

from rllm.errors.machine import MACHINE_ERRNOS
from rllm.sandbox.inside import kernel

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    import resource
    from typing import Any

COPIERS = (
    *("chmod", "chown", "cp", "dd", "gzip", "install", "ln", "mkdir", "mv", "rm", "rsync", "tar", "tee"),
    *("touch", "unzip", "zip"),
)
"""Run no code of what they are given, and tests copy results by them."""
BUILDERS = (
    *("ant", "bun", "bundle", "cargo", "cmake", "deno", "dotnet", "gmake", "go", "gradle", "just", "make"),
    *("meson", "mvn", "ninja", "nox", "npm", "npx", "pnpm", "rake", "sbt", "tox", "yarn"),
)
"""Run code of the folder that they are started in."""
CODE_OPTION = re.compile(r"-[a-z]*c")
"""The option of shells and Python after which the next word is code."""
CLOCK_GRAIN_S = 0.02
"""The age that a file which was just written may seem to have."""

_WALL = 0x40000000
_CONT, _SYSCALL, _LISTEN, _EVENT_MESSAGE = 7, 24, 0x4208, 0x4201
_GET_REGISTERS, _SET_REGISTERS, _SEIZE, _GENERAL = 0x4204, 0x4205, 0x4206, 1
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x100000
"""TRACESYSGOOD, TRACEFORK, TRACEVFORK, TRACECLONE, TRACEEXEC, EXITKILL."""
_BIRTHS, _EXEC, _STOP, _SYSCALL_STOP = (1, 2, 3), 4, 128, signal.SIGTRAP | 0x80
_STOPPING = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_LANDLOCK = (444, 445, 446)
"""landlock_create_ruleset, landlock_add_rule, landlock_restrict_self."""
_READ_FILE, _READ_FOLDER, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
_READ = _READ_FILE | _READ_FOLDER
_CHANGE = _WRITE_FILE | sum(1 << bit for bit in range(4, 15))
_OF_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE
_SCOPES = 3
"""No signal and no abstract socket reaches a process that is not held."""
_SCRATCH_BELOW_STACK = 16_384


class _Machine:
    """Where a call's number, arguments and result are among the registers."""

    def __init__(
        self, size: int, call: int, arguments: tuple[int, ...], pointers: tuple[int, int], code: bytes
    ):
        self.size, self.call, self.arguments, self.code = size, call, arguments, code
        self.instruction, self.stack = pointers
        self.result = 10 if call == 10 else 0


_MACHINES = {
    "x86_64": _Machine(27, 10, (14, 13, 12, 7, 9, 8), (16, 19), b"\x0f\x05"),
    "aarch64": _Machine(34, 8, (0, 1, 2, 3, 4, 5), (32, 31), b"\x01\x00\x00\xd4"),
}
_CALLS = {"x86_64": {"openat": 257, "close": 3}, "aarch64": {"openat": 56, "close": 57}}
_ORIGINAL_CALL_X86 = 15


class _RefusedCallError(OSError):
    """A call that was made in the name of a process."""


class Guard:
    """Follows one program and all that it starts."""

    def __init__(self, rules: dict[str, Any]) -> None:
        """`rules`: see `rllm.sandbox.types.GuardRules`."""
        self._hidden_paths: list[str] = rules["hidden"]
        self._homes = (rules["home"].encode(), rules["their_home"].encode())
        with open(rules["left"], encoding="utf-8") as stream:
            self._left: set[str] = set(json.load(stream))
        self._tids: set[int] = set()
        """Threads that are held."""
        self._spans: list[list[float]] = []
        """Seconds from and to which some were: what was written to their folders then may be theirs."""
        tops = [f"/{name}" for name in os.listdir("/")]
        readable = [each for top in tops for each in self._without_hidden(top)]
        own = [each for each in readable if each not in rules["system"] and os.path.realpath(each) == each]
        self._writable = [*dict.fromkeys([*own, *rules["writable"]])]
        self._access = dict.fromkeys(readable, _READ) | dict.fromkeys(self._writable, _READ | _CHANGE)
        self._machine = _MACHINES[os.uname().machine]
        self._calls = _CALLS[os.uname().machine]
        self._trace = ctypes.CDLL(None, use_errno=True).ptrace
        self._trace.argtypes, self._trace.restype = [ctypes.c_long] * 2 + [ctypes.c_void_p] * 2, ctypes.c_long

    def _without_hidden(self, top: str) -> list[str]:
        """A directory at the top, or what is in it where something hidden is."""
        if top in self._hidden_paths:
            return []
        if any(each.startswith(f"{top}/") for each in self._hidden_paths):
            return [
                each
                for each in (f"{top}/{name}" for name in os.listdir(top))
                if each not in self._hidden_paths
            ]
        return [top]

    def seize(self, program: int) -> None:
        self._ptrace(_SEIZE, program, 0, _OPTIONS)

    def await_program(self, program: int) -> tuple[int, resource.struct_rusage]:
        """As `cell.await_program`."""
        while True:
            # __WALL: threads, and children that send no SIGCHLD, are waited for as well.
            pid, status, usage = os.wait4(-1, _WALL)
            if os.WIFSTOPPED(status):
                with contextlib.suppress(ProcessLookupError):  # killed while it stood still
                    self._go_on(pid, status)
                continue
            self._tids.discard(pid)
            if self._spans and not self._tids:
                self._spans[-1][1] = min(self._spans[-1][1], time.time())
            if pid == program:
                return status, usage

    def _go_on(self, pid: int, status: int) -> None:
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == _EXEC:
            self._begin(pid)
        elif event in _BIRTHS and pid in self._tids:
            self._tids.add(self._message(pid))
        elif event == _STOP and number in _STOPPING:
            # A stop signal holds the whole process. LISTEN leaves
            # it stopped until SIGCONT, where CONT would resume it.
            self._ptrace(_LISTEN, pid, 0, 0)
            return
        # Signals are delivered. The SIGTRAP of a stop that
        # tracing itself made is not: it would kill the program.
        is_signal = not event and number != _SYSCALL_STOP
        self._ptrace(_CONT, pid, 0, number if is_signal else 0)

    # ---- who is an agent's ---------------------------------------------------------------------------------

    def _begin(self, pid: int) -> None:
        thread = self._message(pid)
        if thread in self._tids:
            # Of a thread that becomes another program no end is told: it goes on under its process's id.
            self._tids.remove(thread)
            self._tids.add(pid)
        if pid in self._tids:
            return
        program, folder = os.readlink(f"/proc/{pid}/exe"), os.readlink(f"/proc/{pid}/cwd")
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            words = [os.fsdecode(each) for each in stream.read().split(b"\0")[:-1]]
        if not self._is_agents(program, words, folder):
            return
        if not self._tids:  # else the last span is still open, and stays so until the last of them ends
            self._spans.append([time.time() - CLOCK_GRAIN_S, float("inf")])
        self._tids.add(pid)
        try:
            self._hold(pid, self._access_of(words, folder))
        except ProcessLookupError:
            raise
        except OSError as error:
            # What this process is refused is this machine's fault, and ends the cell. What the held one is
            # refused may be its own doing, by limits that it sets: it could not be held, so it does not run.
            if error.errno in MACHINE_ERRNOS and not isinstance(error, _RefusedCallError):
                raise
            os.kill(pid, signal.SIGKILL)

    def _is_agents(self, program: str, words: list[str], folder: str) -> bool:
        names = [os.path.basename(each) for each in (program, *words[:2])]
        # First, because a program of the agent's may be called `cp`.
        if self._is_of_agent(program):
            return True
        if names[0] in COPIERS:
            return False
        module = words[words.index("-m") + 1] if "-m" in words[1:-1] else ""
        for place in range(1, len(words)):
            before, word = words[place - 1], words[place]
            path = os.path.normpath(os.path.join(folder, word))
            if CODE_OPTION.fullmatch(before):
                return self._is_of_agent(path)
            is_stdin = word == "-" and not names[0].endswith("sh")  # of shells it is the end of options
            if is_stdin or self._is_hidden(path):
                return False
            if not word.startswith("-") and self._is_of_agent(path):
                return True
        if self._is_hidden(folder):
            return False
        source = os.path.join(folder, module.replace(".", "/"))
        return any(each in BUILDERS for each in names) or (bool(module) and self._has_module(source))

    def _has_module(self, source: str) -> bool:
        return any(self._is_of_agent(f"{source}{end}") for end in (".py", "/__main__.py", "/__init__.py"))

    def _is_hidden(self, path: str) -> bool:
        return any(f"{path}/".startswith(f"{each}/") for each in self._hidden_paths)

    def _is_of_agent(self, path: str) -> bool:
        """Whether a file is one that the agent left, or that a program of its may have made since."""
        real = os.path.realpath(path)
        if real in self._left:
            return True
        if not any(real.startswith(f"{each}/") for each in self._writable):
            return False
        try:
            about = os.stat(real)
        except OSError:
            return False
        is_file = stat.S_ISREG(about.st_mode)
        return is_file and any(start <= about.st_ctime <= end for start, end in self._spans)

    def _access_of(self, words: list[str], folder: str) -> dict[str, int]:
        """Path -> rights below it: of the tests it reads what it was given by name."""
        # The part after "=" is for options such as --input=/tests/data.txt.
        paths = [os.path.realpath(os.path.join(folder, each.rpartition("=")[2])) for each in words[1:]]
        return self._access | {
            path: _READ for path in paths if self._is_hidden(path) and path != self._hidden_paths[0]
        }

    # ---- calls in the name of a process --------------------------------------------------------------------

    def _hold(self, pid: int, access: dict[str, int]) -> None:
        """Call Landlock for a process that stands at its exec, from the end of that call on."""
        pending = self._to_next_call(pid)
        registers = self._registers(pid)
        machine, version = self._machine, kernel.landlock_version()
        # Version 1 knows 13 rights, 2 and 3 one more each. Scopes exist from version 6 on; older kernels
        # refuse bytes that they do not know, and get the first field alone.
        rights_mask = (_READ | _CHANGE) & ((1 << (13 + min(version - 1, 2))) - 1)
        ruleset = struct.pack("=QQQ", rights_mask, 0, _SCOPES)[: 24 if version >= 6 else 8]
        at = registers[machine.instruction]
        # execve(2) maps 128 KiB below the stack pointer, and
        # the program has not run yet: nothing there is in use.
        scratch = (registers[machine.stack] - _SCRATCH_BELOW_STACK) & ~0xF
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:

            def put(data: bytes, place: int = scratch) -> int:
                memory.seek(place)
                memory.write(data)
                return place

            def call(number: int, *arguments: int) -> int:
                return self._call(pid, registers, pending, number, arguments)

            memory.seek(at)
            code = memory.read(len(machine.code))
            # The first instruction of the program becomes a system
            # call, and is put back when all calls are made.
            put(machine.code, at)
            rules = call(_LANDLOCK[0], put(ruleset), len(ruleset), 0)
            for path, rights in access.items():
                if not os.path.exists(path):
                    continue
                # Landlock refuses a rule for a plain file that has rights of directories.
                rights &= rights_mask if os.path.isdir(path) else rights_mask & _OF_FILES
                flags = os.O_PATH | os.O_CLOEXEC
                entry = call(self._calls["openat"], kernel.AT_FDCWD, put(os.fsencode(path) + b"\0"), flags)
                call(_LANDLOCK[1], rules, 1, put(struct.pack("=Qi", rights, entry)), 0)
                call(self._calls["close"], entry)
            # Needs no_new_privs, which the process has since `kernel.install_filter`.
            call(_LANDLOCK[2], rules, 0)
            call(self._calls["close"], rules)
            put(code, at)
            self._change_home(pid, memory)
        self._set_registers(pid, registers)
        for number in pending:
            os.kill(pid, number)

    def _change_home(self, pid: int, memory: Any) -> None:
        """Another home, of as many letters, than that of the tests, which they may read settings in."""
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            # env_start and env_end, fields 50 and 51 of proc(5).
            start, end = map(int, stream.read().rpartition(")")[2].split()[47:49])
        memory.seek(start)
        variables = b"\0" + memory.read(end - start)
        old, new = (b"\0HOME=" + each + b"\0" for each in self._homes)
        if old in variables:
            memory.seek(start + variables.index(old))
            memory.write(new[1:])

    def _call(
        self, pid: int, registers: list[int], pending: list[int], number: int, arguments: tuple[int, ...]
    ) -> int:
        machine = self._machine
        call_registers = list(registers)
        call_registers[machine.call] = number
        if machine.size == _MACHINES["x86_64"].size:
            call_registers[_ORIGINAL_CALL_X86] = (1 << 64) - 1  # nothing to begin anew
        for place, register in enumerate(machine.arguments):
            call_registers[register] = (arguments[place] if place < len(arguments) else 0) & ((1 << 64) - 1)
        self._set_registers(pid, call_registers)
        # Once to where the call begins, once to where it ends.
        pending += self._to_next_call(pid)
        pending += self._to_next_call(pid)
        (result,) = struct.unpack("=q", struct.pack("=Q", self._registers(pid)[machine.result]))
        if result < 0:
            raise _RefusedCallError(-result, os.strerror(-result))
        return result

    def _to_next_call(self, pid: int) -> list[int]:
        """Let it run to where a call begins or ends; signals that come meanwhile are for later."""
        signals: list[int] = []
        while True:
            self._ptrace(_SYSCALL, pid, 0, 0)
            _, status = os.waitpid(pid, _WALL)
            if not os.WIFSTOPPED(status):
                raise ProcessLookupError(3, "it was killed")
            if os.WSTOPSIG(status) == _SYSCALL_STOP:
                return signals
            if not status >> 16:
                signals.append(os.WSTOPSIG(status))

    def _registers(self, pid: int) -> list[int]:
        buffer = ctypes.create_string_buffer(8 * self._machine.size)
        self._move_registers(_GET_REGISTERS, pid, buffer)
        return list(struct.unpack(f"={self._machine.size}Q", buffer.raw))

    def _set_registers(self, pid: int, registers: list[int]) -> None:
        data = struct.pack(f"={self._machine.size}Q", *registers)
        self._move_registers(_SET_REGISTERS, pid, ctypes.create_string_buffer(data, len(data)))

    def _move_registers(self, request: int, pid: int, buffer: Any) -> None:
        vector = ctypes.create_string_buffer(struct.pack("=QQ", ctypes.addressof(buffer), len(buffer)), 16)
        self._ptrace(request, pid, _GENERAL, ctypes.addressof(vector))

    def _message(self, pid: int) -> int:
        """The process id that an event tells of."""
        buffer = ctypes.create_string_buffer(8)
        self._ptrace(_EVENT_MESSAGE, pid, 0, ctypes.addressof(buffer))
        return int.from_bytes(buffer.raw, "little")

    def _ptrace(self, request: int, pid: int, address: int, data: int) -> None:
        if self._trace(request, pid, address, data) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"ptrace {request:#x}: {os.strerror(number)}")
