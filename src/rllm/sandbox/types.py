"""The words of a sandbox: what a program may use, how it ended, what it left.

Limits ──► Sandbox.exec ──► ExecResult(status, exit_code, stdout, stderr, …)
                │
                └── snapshot() ──► Snapshot ──► open_sandbox(…, snapshot=…)
"""

import os
import stat
from dataclasses import dataclass
from enum import StrEnum

from rllm.errors import ConfigError
from rllm.errors.machine import MACHINE_ERRNOS

MOST = 2_000_000
"""The greatest value of every limit: the calls of the kernel take no longer or larger ones."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """The resources that one program may use, with everything it starts."""

    wall_s: float = 10.0
    """Seconds from start to end."""
    cpu_s: float = 10.0
    """Seconds of processor time, over all of its processes."""
    memory_mb: int = 512
    """MiB of memory, over all of its processes; what lies in its files counts as disk. Sockets hold memory of
    the kernel's: there may be one for each MiB, and 64 in any case."""
    output_kb: int = 1024
    """KiB of stdout and stderr together; the result channel has as much again."""
    disk_mb: int = 64
    """MiB of all files that it can write."""
    processes: int = 64
    """Processes and threads alive at one time."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_mb", "output_kb", "disk_mb", "processes"):
            value = getattr(self, name)
            if not 0 < value <= MOST:
                raise ConfigError(
                    f"Sandbox limit `{name}` is {value}; it must be a finite number above 0, "
                    f"at most {MOST:,}. There is no way to say unlimited."
                )
        if self.memory_mb < 32:
            raise ConfigError(
                f"Sandbox limit `memory_mb` is {self.memory_mb}; an interpreter alone needs 32 or more."
            )


DEFAULT_LIMITS = Limits()


def machine_memory_mb() -> int:
    """The memory of this machine in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


class Status(StrEnum):
    """The end of a program. All but `OK` are about the program; a sandbox that fails raises SandboxError."""

    OK = "ok"
    """Exit code 0."""
    ERROR = "error"
    """Another exit code, such as 1 after an exception."""
    TIMEOUT = "timeout"
    """It was still running after `wall_s`, or had used `cpu_s`."""
    OUT_OF_MEMORY = "out_of_memory"
    """It held more than `memory_mb`, or more sockets than that allows, or asked for more and died of the
    refusal."""
    KILLED = "killed"
    """Ended by a signal such as SIGKILL or SIGTERM, or for having more than `processes` where the kernel does
    not refuse them."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than `output_kb`, and was stopped; the beginning is kept."""
    CRASHED = "crashed"
    """It died of a fault: SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSYS or SIGTRAP."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ExecResult:
    """The end of one program and its output."""

    status: Status
    exit_code: int | None
    """As `subprocess` has it: -9 is death by signal 9. None where the sandbox stopped the program."""
    stdout: str
    """Decoded as UTF-8; bytes that are none become U+FFFD. May hold control characters: escape before a
    terminal sees it."""
    stderr: str
    truncated: bool
    """Whether the program wrote more than is here."""
    wall_s: float
    """Seconds from start to end, as the sandbox measured them."""
    result: str | None = None
    """The bytes that a Python program wrote to the descriptor named by RLLM_RESULT_FD; None where they were
    not wanted, or nothing was written, or too much."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Root:
    """A file system that programs can write to, from `/` on, instead of one working directory.

    What they write counts as disk and goes with the sandbox; nothing of it reaches this machine. Without a
    `tree` it is this machine's system (/usr and what belongs to it) with directories of its own around it.
    """

    folders: tuple[str, ...] = ()
    """Absolute paths that are made, or of a tree taken over, for the program to own."""
    tree: str = ""
    """An unpacked image on this machine, which stays as it is: what `docker export` or a root file system's
    archive holds."""
    mounts: tuple[tuple[str, str], ...] = ()
    """(directory of this machine, path inside) of what programs read and cannot change. It is shown and not
    copied, so its files must be readable by every user. Not with a `tree`."""
    layers: tuple[str, ...] = ()
    """Directories of this machine with files from `/` on, the topmost first, that lie between its system and
    what programs write. They stay as they are, and any number of sandboxes may have the same."""
    owner: int = 0
    """The user id in the layers whose files are the program's own; it makes a difference where root opens the
    sandbox."""
    overlay: bool = True
    """Lay it over the system, the layers or the tree. Where that is False, or the kernel refuses it to this
    user, the system stays read-only (`Sandbox.read_only` says so), and layers or a tree are copied."""

    def __post_init__(self) -> None:
        for folder in (*self.folders, *(place for _, place in self.mounts)):
            parts = folder.split("/")
            if not folder.startswith("/") or ".." in parts or "\0" in folder or folder.strip("/") == "":
                raise ConfigError(
                    f"Folder {folder!r} of a writable root is no absolute path below `/` without `..`."
                )
        for source, _ in self.mounts:
            if self.tree or not (os.path.isabs(source) and _is_directory(source)):
                raise ConfigError(
                    f"`mounts` has {source!r}; give the absolute path of a directory, and no `tree`."
                )
        for layer in self.layers:
            if not (os.path.isabs(layer) and _is_directory(layer)):
                raise ConfigError(f"Layer {layer!r} of a writable root is no absolute path of a directory.")
        if self.layers and self.tree:
            raise ConfigError("`layers` are laid over this machine's system; leave `tree` out.")
        if self.tree and not (os.path.isabs(self.tree) and _is_directory(self.tree)):
            raise ConfigError(
                f"`tree` is {self.tree!r}; give the absolute path of a directory with an unpacked image."
            )


def _is_directory(path: str) -> bool:
    """Raises OSError where this machine cannot say, which `os.path.isdir` takes for a no."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        if error.errno in MACHINE_ERRNOS:
            raise
        return False


@dataclass(kw_only=True, slots=True, frozen=True)
class GuardRules:
    """Limits of programs of somebody else's that a program starts; see `inside/guard.py`."""

    hidden: tuple[str, ...]
    """Absolute paths, at most two folders deep, that they neither read nor change. Of the first they read
    what is named in their command."""
    left: str
    """A file inside with a JSON list of the paths of their files."""
    system: tuple[str, ...]
    """Directories at the top that they cannot change; all others they can."""
    writable: tuple[str, ...]
    """Absolute paths elsewhere that they can change."""
    home: str
    """HOME of who starts them."""
    their_home: str
    """Theirs instead; of as many bytes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Scope:
    """Which files a snapshot of a writable root holds."""

    folders: tuple[str, ...] = ()
    """Absolute paths that alone are in it; empty for everything from `/` on."""
    left_out: tuple[str, ...] = ()
    """Absolute paths that are not in it, with all below them."""
    named: tuple[str, ...] = ()
    """Absolute paths that are in it although they lie below one that is not."""
    loose_suffixes_left_out: tuple[str, ...] = ()
    """The suffixes of files directly in `/` that are left out."""
    link_homes: tuple[str, ...] | None = None
    """Folders that links may lead to, beside what is in the snapshot; None for all."""
    changes: bool = False
    """Only what differs from the layers of the root, with what was removed of them; everything where the
    sandbox has no overlay of layers (`Snapshot.is_whole` says so)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Snapshot:
    """The files of a sandbox at one moment."""

    tar: bytes
    """An uncompressed tar archive with paths relative to `base`: plain files, directories and links. FIFOs,
    sockets and devices are left out; a file of two names is in it twice."""
    base: str = "."
    """The working directory, or `/` of a snapshot with a scope."""
    left_out: tuple[str, ...] = ()
    """The first names of what is not in it."""
    is_whole: bool = True
    """False for changes alone: then a character device 0:0 in `tar` stands for what was removed."""
    exempt: tuple[str, ...] = ()
    """Absolute paths that stay as they are where changes remove what is around them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FileState:
    """All files of one sandbox at one moment, kept in it until it is closed."""

    sandbox: int
    """Which one, by the process id of its warden."""
    chain: tuple[int, ...]
    """The states inside that it is made of, the oldest first."""
