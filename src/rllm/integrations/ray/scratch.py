"""A directory for one process that may be killed at any time: what such ones left is removed by the next."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX, LOCK = "rllm-worker-", "lock"


def scratch_directory() -> Path:
    """A new directory, this process's for as long as it lives."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if _is_left_behind(path):
            shutil.rmtree(path, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(path / f"{LOCK}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the process ends
    # The lock gets its name once it is held, so nobody finds it free and takes the directory for a leftover.
    os.rename(path / f"{LOCK}.new", path / LOCK)
    return path


def _is_left_behind(path: Path) -> bool:
    """Whether nobody holds its lock any more; one without a lock is being made, or another user's."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
