"""Where file tools read and write: a directory of this machine, or a sandbox. Never outside of it.

path that a model wrote ──► parts, none of them `..` ──► Place ──► bytes
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Protocol

from rllm.errors import ConfigError
from rllm.sandbox.base import Sandbox
from rllm.tools.base import ToolError

MAX_FILE_BYTES = 2 * 1024 * 1024
"""The size of a file that is shown or edited."""
MAX_ENTRIES = 500
"""The number of entries of a directory that is listed."""
_BLOCKED = (errno.ELOOP, errno.ENOTDIR)


class Workspace(Protocol):
    """Files below one root. Paths are relative to it; what is wrong with one is a ToolError."""

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file and the directories it is in."""
        ...

    def entries(self, path: str, depth: int) -> list[str] | None:
        """Names of the files and directories (`name/`) below a directory, sorted; None if it is none."""
        ...


def inner_path(path: str) -> PurePosixPath:
    """A model's path, relative to the root. A leading `/` means the root."""
    if not path.strip() or "\0" in path:
        raise ToolError("`path` is empty; give a path such as src/main.py.")
    parts = [part for part in PurePosixPath(path.lstrip("/") or ".").parts if part != "."]
    if ".." in parts:
        raise ToolError(f"`{path}` has `..` in it; give a path below the root, without `..`.")
    return PurePosixPath(*parts)


def _file_path(path: str) -> PurePosixPath:
    inner = inner_path(path)
    if not inner.name:
        raise ToolError(f"`{path}` is a directory.")
    return inner


class DirectoryPlace:
    """Files below a directory. Links, hard ones too, are not followed, whoever made them and whenever.

    Every directory on the way is opened by name inside the one before, refusing links: a path that is changed
    while it is walked leads nowhere else.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise ConfigError(
                f"There is no directory {self.root} for the file tool; make it or name another."
            )

    def read(self, path: str) -> bytes:
        inner = inner_path(path)
        with _explain(path), self._directory(inner.parent, make=False) as directory:
            # Without O_NONBLOCK the opening of a named pipe waits until somebody writes to it.
            file = os.open(inner.name or ".", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            with os.fdopen(file, "rb") as stream:
                _check_plain(path, os.fstat(file))
                return stream.read(MAX_FILE_BYTES + 1)

    def write(self, path: str, data: bytes) -> None:
        inner = _file_path(path)
        with _explain(path), self._directory(inner.parent, make=True) as directory:
            # Not O_TRUNC: the file is cut only after the check, so that a refused file keeps its content.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(inner.name, flags, 0o644, dir_fd=directory)
            with os.fdopen(file, "wb") as stream:
                _check_plain(path, os.fstat(file))
                stream.write(data)
                stream.truncate()

    def entries(self, path: str, depth: int) -> list[str] | None:
        inner = inner_path(path)
        with _explain(path):
            try:
                with self._directory(inner, make=False) as directory:
                    return sorted(_walk(directory, "", depth))[: MAX_ENTRIES + 1]
            except NotADirectoryError:
                return None

    @contextmanager
    def _directory(self, inner: PurePosixPath, *, make: bool) -> Iterator[int]:
        """A descriptor of a directory below the root."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        here = os.open(self.root, flags)
        try:
            # One part at a time, because O_NOFOLLOW is about the last part of a path alone.
            for part in inner.parts:
                if make:
                    _make_directory(part, here)
                below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=here)
                os.close(here)
                here = below
            yield here
        finally:
            os.close(here)


def _make_directory(name: str, inside: int) -> None:
    with suppress(FileExistsError):  # that it is a directory, and no link to one, shows when it is opened
        os.mkdir(name, 0o755, dir_fd=inside)


def _walk(directory: int, before: str, depth: int) -> Iterator[str]:
    with os.scandir(directory) as scan:
        visible = [entry for entry in scan if not entry.name.startswith(".")]
    for entry in sorted(visible, key=lambda entry: entry.name)[: MAX_ENTRIES + 1]:
        name = before + entry.name
        if not entry.is_dir(follow_symlinks=False):
            yield name
            continue
        yield f"{name}/"
        if depth > 1:
            below = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            try:
                yield from _walk(below, f"{name}/", depth - 1)
            finally:
                os.close(below)


def _check_plain(path: str, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise ToolError(f"`{path}` is a directory.")
    if not stat.S_ISREG(status.st_mode):
        raise ToolError(f"`{path}` is not a plain file.")
    if status.st_nlink > 1:  # the other name may be anywhere, and what is written here is written there
        raise ToolError(f"`{path}` has another name somewhere (a hard link); put a copy in its place first.")


@contextmanager
def _explain(path: str) -> Iterator[None]:
    """Turn the system's refusals into words for the model. NotADirectoryError passes: it may be no
    mistake."""
    try:
        yield
    except FileNotFoundError:
        raise ToolError(f"There is no `{path}`.") from None
    except IsADirectoryError:
        raise ToolError(f"`{path}` is a directory.") from None
    except OSError as error:
        why = "a link or a file on the way" if error.errno in _BLOCKED else error.strerror
        raise ToolError(f"`{path}` cannot be used: {why}.") from None


class SandboxPlace:
    """Files in a sandbox, below its working directory. The sandbox itself follows no links."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def read(self, path: str) -> bytes:
        with _explain(path):
            return self.sandbox.read(str(inner_path(path)))[: MAX_FILE_BYTES + 1]

    def write(self, path: str, data: bytes) -> None:
        with _explain(path):
            self.sandbox.write(str(_file_path(path)), data)

    def entries(self, path: str, depth: int) -> list[str] | None:
        result = self.sandbox.exec(["sh", "-c", _FIND, "sh", f"./{inner_path(path)}", str(depth)])
        if result.exit_code == _NO_DIRECTORY:
            return None
        if result.exit_code:
            raise ToolError(f"`{path}` cannot be listed: {result.stderr.strip() or result.status.value}.")
        directories, _, files = result.stdout.partition("\0\0")
        names = [f"{name}/" for name in directories.split("\0") if name]
        names += [name for name in files.split("\0") if name]
        return sorted(names)[: MAX_ENTRIES + 1]


_NO_DIRECTORY = 66
_FIND = f"""
[ -e "$1" ] || {{ echo 'there is no such file' >&2; exit 65; }}
[ -d "$1" ] && ! [ -L "$1" ] || exit {_NO_DIRECTORY}
cd "$1" || exit 65
find . -mindepth 1 -maxdepth "$2" -name '.*' -prune -o -type d -print0 | sed -z 's,^[.]/,,'
printf '\\0'
find . -mindepth 1 -maxdepth "$2" -name '.*' -prune -o ! -type d -print0 | sed -z 's,^[.]/,,'
"""
