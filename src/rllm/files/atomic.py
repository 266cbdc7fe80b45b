"""Files that are whole or absent, whatever kills the process or fills the disk.

data ──► .NAME.tmp-TID ──fsync──► replace ──► NAME                                 write_atomic
fill ──► .NAME.tmp-TID/ + manifest.json ──fsync──► rename ──► NAME/                write_directory_atomic
NAME/ ──rename──► .NAME.tmp-TID/ ──► gone                                          remove_directory_atomic
NAME/ + manifest.json ──► every size and sha256 compared                           verify_manifest
.NAME.tmp-TID, .NAME.old-TID of a killed process ──► gone, or put back             remove_leftovers
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from rllm.errors import CheckpointError, ConfigError, StorageError
from rllm.files.foreign import MOST_JSON_BYTES, read_regular

MANIFEST = "manifest.json"

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-\d+")
_OS_ERROR_IN_TEXT = re.compile(r"\(os error (\d+)\)|Os \{ code: (\d+)")
"""The form of an errno in exceptions of libraries written in Rust (safetensors, tokenizers)."""

_MENDS = {
    errno.ENOSPC: "free space and run the same command: the run resumes",
    errno.EDQUOT: "free space or raise the quota, and run the same command: the run resumes",
    errno.EFBIG: "raise the file size limit (`ulimit -f`) and run the same command: the run resumes",
    errno.EROFS: "mount it writable, or choose another --output",
    errno.EACCES: "give yourself write permission, or choose another --output",
    errno.EPERM: "is it another user's, or immutable (`lsattr`)? Mend that, or choose another --output",
    errno.ESTALE: "its file server lost it; mount it again and run the same command: the run resumes",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`) and run the same command: the run resumes",
    errno.ENFILE: "close other programs, and run the same command: the run resumes",
    errno.ENOMEM: "free memory and run the same command: the run resumes",
    errno.EIO: "check the disk, free space and run the same command: the run resumes",
}


class StorageErrors:
    """Context in which a write that the disk refuses leaves as StorageError; other errors pass unchanged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        code = _refusal(error)
        if code is not None:
            raise refused_write(self.path, os.strerror(code), code) from error


def refused_write(path: Path, reason: str, code: int) -> StorageError:
    """The error for a write that ended with the errno `code`, one of those that have a mend."""
    return StorageError(f"{path} could not be written ({reason}): {_MENDS[code]}.")


def _refusal(error: BaseException | None) -> int | None:
    """The errno by which the disk refused a write; None for an error of another kind."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None and error is not None:
        os_error = _OS_ERROR_IN_TEXT.search(str(error))
        code = int(os_error.group(1) or os_error.group(2)) if os_error else None
    return code if code in _MENDS else None


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file that other processes, and the next start after a crash, see whole or not at all. One that
    is replaced keeps its permissions."""
    temporary = _beside(path, "tmp")
    with StorageErrors(path):
        try:
            with open(temporary, "wb") as file:
                if path.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                # Before the rename: a file system may write the new name to disk ahead of the contents, and
                # after a power cut the file would be there and empty.
                os.fsync(file.fileno())
            # The name is durable only once its directory is flushed too.
            os.replace(temporary, path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_directory_atomic(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a temporary sibling, seal it with a manifest, and rename it to `target`.

    A `target` that exists is replaced. It is set aside first: a crash between the two renames can be undone.
    """
    temporary, set_aside = _beside(target, "tmp"), _beside(target, "old")
    with StorageErrors(target):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            fill(temporary)
            _seal(temporary)
            # `rename` does not replace a directory that holds files.
            if target.exists():
                os.rename(target, set_aside)
            os.rename(temporary, target)
            sync_directory(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            _put_back_or_remove(set_aside, target)


def remove_directory_atomic(target: Path) -> None:
    """Remove a directory that must never be found half there: it loses its name before its files."""
    aside = _beside(target, "tmp")
    with StorageErrors(target):
        os.rename(target, aside)
        shutil.rmtree(aside)


def verify_manifest(directory: Path) -> None:
    """Raise CheckpointError unless every file of `manifest.json` is there with its size and sha256."""
    for name, entry in _manifest_files(directory).items():
        file = directory / name
        if not file.is_file():
            raise _damage(directory, name, "is missing")
        num_bytes = file.stat().st_size
        if num_bytes != entry["bytes"]:
            raise _damage(directory, name, f"has {num_bytes} bytes where the manifest says {entry['bytes']}")
        if file_sha256(file) != entry["sha256"]:
            raise _damage(directory, name, "has other contents than when it was written (sha256 differs)")


def remove_leftovers(parent: Path) -> None:
    """Delete what a killed process left half-written in `parent`. Call it while holding the run's lock."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is None:
            continue
        if leftover["kind"] == "old":
            _put_back_or_remove(path, parent / leftover["name"])
        else:
            _remove(path)


def require_free_space(path: Path, needed_bytes: int, what: str) -> None:
    """Raise ConfigError unless the disk that `path` is (or will be) on has room for `what`."""
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{path} has {_readable(free_bytes)} free; {what} needs {_readable(needed_bytes)}. "
            f"Free {_readable(needed_bytes - free_bytes)} there, or choose another --output."
        )


def _beside(path: Path, kind: str) -> Path:
    """The path of a temporary file beside it, of this thread alone: in one process several may write the same
    file."""
    return path.with_name(f".{path.name}.{kind}-{threading.get_native_id()}")


def _seal(directory: Path) -> None:
    """Flush every file to disk, and the manifest last: a directory with a manifest is complete."""
    files: dict[str, dict[str, Any]] = {}
    folders = [directory]
    for path in _walk(directory):
        if path.is_dir():
            folders.append(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        name = path.relative_to(directory).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    if MANIFEST in files:
        raise ValueError(
            f"{directory}: `{MANIFEST}` is written by `write_directory_atomic`; give your file another name."
        )
    # Inner folders first: a name is durable when the folder that holds it is.
    for folder in reversed(folders):
        sync_directory(folder)
    write_atomic(directory / MANIFEST, json.dumps({"files": files}, indent=2) + "\n")


def _walk(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        yield path
        if path.is_dir():
            yield from _walk(path)


def _manifest_files(directory: Path) -> dict[str, dict[str, Any]]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; choose one that holds a `{MANIFEST}`.")
    try:
        files = json.loads(read_regular(directory / MANIFEST, MOST_JSON_BYTES))["files"]
        complete = all({"bytes", "sha256"} <= entry.keys() for entry in files.values())
    except FileNotFoundError:
        raise _damage(directory, MANIFEST, "is missing, so it was never finished") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise _damage(directory, MANIFEST, f"cannot be read ({error})") from error
    if not complete:
        raise _damage(directory, MANIFEST, "lacks the size or sha256 of a file")
    return files


def _damage(directory: Path, name: str, what_is_wrong: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: `{name}` {what_is_wrong}. Delete {directory} to fall back to the one before."
    )


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(directory: Path) -> None:
    """A new name survives a power cut only once its directory is on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_back_or_remove(set_aside: Path, target: Path) -> None:
    if not set_aside.exists():
        return
    if target.exists():
        _remove(set_aside)
    else:
        os.rename(set_aside, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _readable(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
