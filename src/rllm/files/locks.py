"""Locks of files: one process writes, any number ask who it is.

    take_lock(path) ──► descriptor ──► release_lock        has_writer(path), pid_in(path)

The lock belongs to the kernel's table of open files, not to the disk: it is gone the moment its process is,
also after kill -9.
"""

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from rllm.errors import ConfigError, RunInUseError

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP)
"""The errors of a file system that has no locks; no writer was let in there."""

_held: set[int] = set()
"""Lock descriptors of this process."""


def _let_go_in_forked_child() -> None:
    """A forked worker shares the writer's lock, and would hold it on if the writer alone were killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_forked_child)


def take_lock(path: Path) -> int:
    """The descriptor of the locked file, which holds the pid of this process.

    Raises RunInUseError where another process has the lock, ConfigError for a disk without locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock_for_writing(descriptor)
        # Under the lock, so the number in the file is always that of the last process that had it.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        os.close(descriptor)
        raise RunInUseError(
            f"{path.parent} is being written by process {pid_in(path) or '(unknown)'}; "
            "wait for it, stop it, or choose another --output."
        ) from None
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_LOCKS:
            raise ConfigError(
                f"{path.parent} is on a file system without locks ({error.strerror}); "
                "choose an --output on a local disk."
            ) from error
        raise
    _held.add(descriptor)
    return descriptor


def release_lock(descriptor: int) -> None:
    """Nothing happens in a forked child, which holds none."""
    if descriptor not in _held:
        return
    _held.discard(descriptor)
    with suppress(OSError):  # on a disk that refuses writes; the pid of one who has let go misleads nobody
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def _lock_for_writing(descriptor: int) -> None:
    """Raises BlockingIOError when there is a writer; a reader that is just asking is waited for."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(
                descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB
            )  # a writer refuses this too, a reader does not
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            time.sleep(0.001)


def has_writer(lock: Path) -> bool:
    """Asks with a shared lock, let go at once: no writer is turned away by it, and no reader by another."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # not by closing alone: a child forked just now has a copy
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return False


def pid_in(lock: Path) -> int | None:
    """The process that wrote its number there; None where none did."""
    try:
        return int(lock.read_text())
    except (FileNotFoundError, ValueError):
        return None
