"""Files and processes that a kill with -9 may leave, and their removal by the next process.

    /tmp/rllm-sandboxes-UID/owner-PID-STARTED/   held by flock while the owner lives
        ├── warden-PID-STARTED                   a process to end
        └── files-…/                             working directories of the `subprocess` backend

Wardens notice by themselves that their owner is gone; this is for those that could not, because they were
stopped or starved. `reap` is run once by every process before its first sandbox, and by `rllm sandbox reap`.
"""

import atexit
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Self

from rllm.errors import SandboxError

_lock = threading.Lock()
_register: "Register | None" = None


class Register:
    """The directory of this process."""

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self.path = folder / f"owner-{self._pid}-{started_at(self._pid)}"
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    @classmethod
    def of_this_process(cls) -> Self:
        """Made on first use, after what others left is gone."""
        global _register
        with _lock:
            if _register is None or _register._pid != os.getpid() or not _register.path.is_dir():
                folder = state_folder()
                _register = cls(folder)
                reap()
                atexit.register(_register.close)
            assert isinstance(_register, cls)
            return _register

    def add(self, pid: int) -> None:
        (self.path / f"warden-{pid}-{started_at(pid)}").touch()

    def remove(self, pid: int) -> None:
        for entry in self.path.glob(f"warden-{pid}-*"):
            entry.unlink(missing_ok=True)

    def new_directory(self) -> str:
        return tempfile.mkdtemp(prefix="files-", dir=self.path)

    def close(self) -> None:
        # A forked process inherits this exit handler, and the directory is its parent's.
        if self._pid == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)


def state_folder() -> Path:
    """A directory of this user alone. Raises SandboxError where somebody else made it."""
    folder = Path(tempfile.gettempdir()) / f"rllm-sandboxes-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if about.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
        raise SandboxError(f"`{folder}` belongs to somebody else; remove it, or set TMPDIR to another place.")
    return folder


def reap() -> int:
    """Remove what owners left that are dead; returns how many processes and directories that were."""
    num_removed = 0
    for entry in state_folder().glob("owner-*"):
        _, pid, start_time = entry.name.split("-")
        if started_at(int(pid)) == start_time:
            continue  # alive, and perhaps about to lock it
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # somebody else was quicker
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(descriptor)
        num_removed += sum(_end(warden.name) for warden in entry.glob("warden-*"))
        shutil.rmtree(entry, ignore_errors=True)
        num_removed += 1
    return num_removed


def _end(name: str) -> bool:
    """Kill the warden of that name if it still is that process."""
    _, pid, start_time = name.split("-")
    if started_at(int(pid)) != start_time:
        return False
    try:
        os.kill(int(pid), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def started_at(pid: int) -> str:
    """When a process started, in ticks since boot; "gone" for one that is not there. A pid alone is used
    again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    # Field 22 of proc(5). The name before it is in parentheses and may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()[19]
