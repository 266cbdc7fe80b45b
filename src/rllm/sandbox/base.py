"""One protocol for every sandbox: run programs in it, put files in, take files out.

open_sandbox("bubblewrap") ──► Sandbox ── write, upload ──► exec ──► read, download
                                  └── close: every process, mount and file of it is gone
"""

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from rllm.errors import ConfigError
from rllm.sandbox.types import ExecResult, FileState, GuardRules, Limits, Scope, Snapshot


class Sandbox(ABC):
    """A machine of one's own with a working directory, until it is closed.

    Files stay from one `exec` to the next; processes do not: whatever a program leaves running is ended with
    it. Calls block and may come from any thread, one after another; different sandboxes work side by side.
    Paths are relative to the working directory, or absolute inside the sandbox. A path that a program has
    made into a link is not followed: OSError. A sandbox that fails itself raises SandboxError.
    """

    backend: str
    """Its name, as in `open_sandbox`."""
    limits: Limits
    """The limits of every program that brings none of its own."""
    workdir: str
    """Where programs start, as they see it."""
    read_only: tuple[str, ...] = ()
    """The directories of a writable root that are not writable after all."""

    @abstractmethod
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
        """Run a program to its end, or to the end of its limits. A string goes through `/bin/sh -c`.

        Its environment is `env` and a handful of plain values (PATH, HOME, LANG): nothing of the caller's.
        The disk is the sandbox's: `limits.disk_mb` here is the size of the largest file that may be written.
        `guard` is held over programs of somebody else's that this one starts; ConfigError where the backend
        cannot.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the program that runs, from another thread: its `exec` returns with KILLED. Files stay."""

    @abstractmethod
    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """The bytes of a plain file. OSError for what is missing, a link, a directory, a FIFO or a device, or
        has more than `most_bytes`."""

    @abstractmethod
    def write(self, path: str, data: bytes | str) -> None:
        """Write a file, making its directories. OSError where a link or the disk limit is in the way."""

    @abstractmethod
    def upload(self, source: Path, path: str) -> None:
        """Copy a file or a directory of this machine to `path`. Links in it are not followed: OSError."""

    @abstractmethod
    def download(self, path: str, target: Path) -> list[str]:
        """Copy a file or a directory to `target`, which must not exist yet.

        Only plain files and directories are copied. Returns what was left out: links, FIFOs, sockets,
        devices.
        """

    @abstractmethod
    def snapshot(self, scope: Scope | None = None) -> Snapshot:
        """All files of the working directory, or with a `scope` those of a writable root, for
        `open_sandbox(..., snapshot=...)`.

        Files with holes keep them. Raises OSError where there is more in them than the disk holds, as files
        of several names can be, or where it takes too long.
        """

    @abstractmethod
    def restore(self, snapshot: Snapshot) -> None:
        """Put the files of a snapshot where they were. OSError where something is in the way."""

    @abstractmethod
    def listen(self, port: int, *, datagrams: bool = False) -> socket.socket:
        """A listening TCP socket, or with `datagrams` a UDP one, at 127.0.0.1 of the sandbox's own network.

        Whoever holds it answers programs inside, which reach nothing else. To be called while no program
        runs. SandboxError where the port is taken; ConfigError where the backend has no network of its own.
        """

    def keep_state(self) -> FileState:
        """Keep all files as they are now, to return to any number of times: nothing is copied. Files in
        /dev/shm are not kept; processes never are.

        Raises ConfigError where the sandbox has no writable root with layers, or this machine no overlays.
        """
        raise ConfigError(
            f"A sandbox of backend `{self.backend}` keeps no states of its files here; open it by bubblewrap "
            "or unshare with `root=Root(layers=...)`, or take a `snapshot`."
        )

    def return_to(self, state: FileState) -> None:
        """Make all files what they were when `state` was kept here. States that were kept after it stay."""
        raise ConfigError(f"This sandbox kept no states; {state!r:.80} is another's.")

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it can still be used."""

    @abstractmethod
    def close(self) -> None:
        """End every process and remove every file. Closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
