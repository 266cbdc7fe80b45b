"""A sandbox whose files stay from one program to the next: what `open_sandbox` gives for all local backends.

    exec, read, write, upload, download, snapshot ──► a Job ──► WardenProcess ──► a cell over the same files

Also reading and writing is done by a process in a cell with the program's own rights, so a link or a FIFO
that a program left for us leads nowhere and blocks nobody.
"""

import errno
import io
import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox.archive import pack_tree, unpack_tree
from rllm.sandbox.base import Sandbox
from rllm.sandbox.interpreter import interpreter
from rllm.sandbox.outcomes import exec_result, file_error
from rllm.sandbox.packages import package_names
from rllm.sandbox.process import Ended, Job, WardenProcess
from rllm.sandbox.types import ExecResult, FileState, GuardRules, Limits, Root, Scope, Snapshot

FILE_LIMITS_S = 60.0
"""The time of a file job."""
SEVERAL_NAMES = 1.5
"""The factor by which the content of a snapshot may be larger than the disk: files of several names."""
EXCESSES = ("timeout", "cpu", "memory", "output")
"""Limits at which a file job is stopped."""


class WardenSandbox(Sandbox):
    """One warden, kept for one user of it."""

    def __init__(
        self,
        backend: str,
        *,
        limits: Limits,
        snapshot: Snapshot | None = None,
        packages: Sequence[str] = (),
        root: Root | None = None,
    ) -> None:
        self.backend = backend
        self.limits = limits
        self._lock = threading.Lock()
        python = interpreter(packages=package_names(packages))
        self._warden = WardenProcess(backend, python, keeps_files=True, disk_mb=limits.disk_mb, root=root)
        self.workdir = self._warden.workdir
        self.read_only = self._warden.read_only
        self._has_root = root is not None
        self._is_layered = root is not None and bool(root.layers) and not self.read_only
        if snapshot is not None:
            try:
                self.restore(snapshot)
            except BaseException:
                self.close()
                raise

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: str = "",
        env: Mapping[str, str] = {},
        cwd: str = "",
        limits: Limits | None = None,
        guard: GuardRules | None = None,
    ) -> ExecResult:
        argv = checked_command(command)
        limits = limits or self.limits
        job = Job(
            kind="exec",
            payload={"argv": argv, "env": checked_environment(env), "cwd": cwd},
            stdin=stdin.encode("utf-8", "surrogatepass"),
            limits=limits,
            output_bytes=limits.output_kb * 1024,
            guard=guard,
        )
        return exec_result(self._run(job), limits, wants_result=False)

    def stop(self) -> None:
        self._warden.stop()

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        return self._file_job("read", path, most_bytes=most_bytes).stdout

    def write(self, path: str, data: bytes | str) -> None:
        self._file_job(
            "write", path, data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        )

    def upload(self, source: Path, path: str) -> None:
        if source.is_dir() and not source.is_symlink():
            self._file_job("unpack", path, pack_tree(source))
        else:
            # O_NONBLOCK, because opening a FIFO would wait for a writer.
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as stream:
                self.write(path, stream.read())

    def download(self, path: str, target: Path) -> list[str]:
        end = self._file_job("pack", path)
        return sorted([*_names(end), *unpack_tree(io.BytesIO(end.stdout), target)])

    def snapshot(self, scope: Scope | None = None) -> Snapshot:
        if scope is not None and not self._has_root:
            raise ConfigError(
                "A snapshot with a scope is one of a writable root; open the sandbox with `root`."
            )
        base = "." if scope is None else "/"
        is_whole = scope is None or not (scope.changes and self._is_layered)
        details = asdict(scope or Scope())
        end = self._file_job(
            "snapshot" if is_whole else "changes",
            base,
            base=base,
            most_bytes=int(self.limits.disk_mb * 2**20 * SEVERAL_NAMES),
            **details,
        )
        return Snapshot(
            tar=end.stdout,
            base=base,
            left_out=tuple(_names(end)),
            is_whole=is_whole,
            exempt=() if is_whole or scope is None else scope.left_out,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Put the files of a snapshot where they were."""
        self._file_job("unpack", snapshot.base, snapshot.tar, exempt=snapshot.exempt)

    def keep_state(self) -> FileState:
        if not self._is_layered:
            return super().keep_state()
        with self._lock:
            chain = self._warden.change_state(None)
        return FileState(sandbox=self._warden.pid, chain=tuple(chain))

    def return_to(self, state: FileState) -> None:
        if state.sandbox != self._warden.pid:
            super().return_to(state)
        with self._lock:
            self._warden.change_state([*state.chain])

    def listen(self, port: int, *, datagrams: bool = False) -> socket.socket:
        if self.backend == "subprocess":
            raise ConfigError(
                "Backend `subprocess` has no network of its own to listen in; use bubblewrap or unshare."
            )
        with self._lock:
            return self._warden.listen(port, datagrams=datagrams)

    @property
    def is_alive(self) -> bool:
        return self._warden.is_alive

    def close(self) -> None:
        self._warden.close()

    def _file_job(self, kind: str, path: str, stdin: bytes = b"", **details: Any) -> Ended:
        """A job on files. Raises the OSError that it met."""
        # a tar of many small files is larger than they
        output_bytes = int(self.limits.disk_mb * 2**20) * 2 + 2**20
        limits = Limits(
            wall_s=FILE_LIMITS_S,
            cpu_s=FILE_LIMITS_S,
            memory_mb=max(self.limits.memory_mb, 256),
            disk_mb=self.limits.disk_mb,
            processes=max(self.limits.processes, 4),
        )
        job = Job(
            kind=kind,
            payload={"path": path, **details},
            stdin=stdin,
            limits=limits,
            output_bytes=output_bytes,
            wants_result=kind in ("pack", "snapshot", "changes"),
        )
        end = self._run(job)
        code = os.waitstatus_to_exitcode(end.wait_status)
        if end.why == "exit" and code == 0:
            return end
        if end.why in EXCESSES:  # of what its programs left there: the job itself is small
            raise OSError(errno.EFBIG, f"{kind}: stopped at the limit `{end.why}`", path)
        answer = refusal(end.stderr) if end.why == "exit" else None
        if answer is None:
            error_output = end.stderr[-500:].decode(errors="replace")
            raise SandboxError(f"`{kind}` of `{path}` failed: {end.why}, exit code {code}. {error_output}")
        raise file_error(kind, answer["errno"], answer["message"], path)

    def _run(self, job: Job) -> Ended:
        with self._lock:
            return self._warden.run(job)


def _names(end: Ended) -> list[str]:
    """The files that a packing job left out."""
    return json.loads(end.result) if end.result else []


def refusal(stderr: bytes) -> dict[str, Any] | None:
    """The reason that a file job gave before it gave up."""
    try:
        answer = json.loads(stderr)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "errno" in answer else None


def checked_command(command: Sequence[str] | str) -> list[str]:
    """The words of a command; a string is the shell's to read. Raises ConfigError for an empty one."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv or not argv[0]:
        raise ConfigError("The command is empty; give at least the name of a program.")
    return argv


def checked_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Raises ConfigError for what no environment can hold."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(
                f"Environment variable {name!r} is empty, or it or its value has a = or a NUL in it."
            )
    return dict(env)
