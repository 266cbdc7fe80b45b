"""Directories of a cache: made once, by one process at a time, and there whole or not at all.

part ──filled──► rename ──► NAME/        an error, or the end of the process: the part is removed, by this
process
                                         or by the next that makes something beside it
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PART = ".part-"


@contextmanager
def made_once(target: Path) -> Iterator[Path | None]:
    """An empty directory to fill, which is `target` after the block; None where that is there already.

    Waits while another process makes the same. Where the block raises, nothing stays.
    """
    if target.is_dir():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_parts(target.parent)
    lock = _lock(target.parent, target.name)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have made it while this one waited for the lock.
        if target.is_dir():
            yield None
            return
        part = target.with_name(f"{_PART}{target.name}")
        remove_tree(part)
        part.mkdir()
        try:
            yield part
            part.rename(target)
        finally:
            remove_tree(part)
    finally:
        os.close(lock)


def remove_parts(folder: Path) -> None:
    """Delete what processes that are gone left half made in a folder."""
    for part in folder.glob(f"{_PART}*"):
        lock = _lock(folder, part.name.removeprefix(_PART))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(part)
        except BlockingIOError:
            continue  # it is being made
        finally:
            os.close(lock)


def _lock(folder: Path, name: str) -> int:
    # The file stays for good: were it removed, two processes could lock two files of the same name.
    return os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)


def remove_tree(part: Path) -> None:
    """Remove a directory whatever modes are in it: overlays leave directories that nobody may enter."""
    # The walk goes top down, so a directory is opened up before it is entered.
    for folder, names, _ in os.walk(part):
        for name in names:
            if not os.path.islink(f"{folder}/{name}"):
                os.chmod(f"{folder}/{name}", 0o700)
    shutil.rmtree(part, ignore_errors=True)
