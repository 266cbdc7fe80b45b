"""Files in and out of a sandbox, with the rights of the program itself: read, write, pack, unpack, snapshot.

A link leads nowhere that the program could not go, and is not followed all the same. Nothing here loads a
module or asks for a user's name once a program has run: both would read files that it may have written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat

from rllm.errors.machine import MACHINE_ERRNOS

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    import tarfile
    from typing import Any, BinaryIO

CHUNK = 1 << 20
MOST_NAMED = 500
"""The number of names that are told of what was left out."""
NAMELESS = 4096
"""Bytes that a file without any counts for: a million empty ones are too many as well."""


def do(kind: str, payload: dict[str, Any], box: str, *, root: str) -> None:
    """One file job. Raises OSError with what is in its way."""
    if kind == "snapshot":
        snapshot(payload, box, root)
    elif kind == "changes":
        changes(payload)
    elif kind == "unpack":
        os.lseek(0, 0, os.SEEK_SET)
        with os.fdopen(0, "rb", closefd=False) as stream:
            unpack(stream, payload["path"], box, root, exempt=payload.get("exempt", ()))
    elif kind == "read":
        read(payload["path"], box, root, most_bytes=payload.get("most_bytes"))
    else:
        {"write": write, "pack": pack}[kind](payload["path"], box, root)


def read(path: str, box: str, root: str, *, most_bytes: int | None = None) -> None:
    """The bytes of a plain file to stdout. OSError EFBIG for more than `most_bytes`."""
    folder, name = _folder_of(path, box, root, makes=False)
    # O_NONBLOCK, because opening a FIFO would wait for a writer.
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, f"`{path}` is not a plain file")
    if most_bytes is not None and about.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"`{path}` has {about.st_size} bytes; at most {most_bytes} are read")
    _copy(file, 1)


def write(path: str, box: str, root: str) -> None:
    """stdin to a plain file, which is replaced: what a link of that name points to stays as it is."""
    folder, name = _folder_of(path, box, root, makes=True)
    # Written beside it and renamed, so that a full disk leaves the old file as it was.
    part = os.fsencode(f".{name}.part")[:255]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):  # as it should be
        os.unlink(part, dir_fd=folder)
    file = os.open(part, flags, 0o644, dir_fd=folder)
    try:
        os.lseek(0, 0, os.SEEK_SET)
        _copy(0, file)
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(part, dir_fd=folder)
        raise


def pack(path: str, box: str, root: str) -> None:
    """A tar of a file or directory, named ".", to stdout, and to the result channel what is not in it."""
    folder, name = _folder_of(path, box, root, makes=False)
    os.fchdir(folder)
    top = os.lstat(name)
    if not (stat.S_ISREG(top.st_mode) or stat.S_ISDIR(top.st_mode)):
        raise OSError(errno.EINVAL, f"`{path}` is neither a plain file nor a directory")
    with _Packer(most_bytes=None, link_homes=None) as packer:
        packer.add(name, ".")


def snapshot(payload: dict[str, Any], box: str, root: str) -> None:
    """A tar to stdout, relative to `payload["base"]`: everything there, or `folders` alone, but `left_out`,
    and what is `named`.

    With `link_homes`, links stay only where they lead to one of those folders or to what is in the snapshot.
    Raises OSError EFBIG for more than `most_bytes`.
    """
    base = os.path.normpath(os.path.join(box, payload["base"]))
    everything = [f"{base.rstrip('/')}/{name}" for name in sorted(os.listdir(base))]
    tops = payload["folders"] or everything
    paths = [top for top in tops if top not in payload["left_out"]]
    suffixes = tuple(payload["loose_suffixes_left_out"])
    paths = [top for top in paths if not top.endswith(suffixes) or os.path.isdir(top)]
    paths += [path for path in payload["named"] if not _is_below(path, paths)]
    homes = payload["link_homes"]
    with _Packer(
        most_bytes=payload["most_bytes"],
        link_homes=None if homes is None else [*homes, *paths],
        left_out=payload["left_out"],
    ) as packer:
        for path in paths:
            try:
                folder, name = _folder_of(path, box, root, makes=False)
                os.fchdir(folder)
                os.close(folder)
                packer.add(name, f"./{os.path.relpath(path, base)}", path=path)
            except FileNotFoundError:
                continue  # the program removed it
            except OSError as error:
                if error.errno == errno.EFBIG or error.errno in MACHINE_ERRNOS:
                    raise
                packer.leave_out(path)


def changes(payload: dict[str, Any]) -> None:
    """A tar to stdout, relative to `/`, of what the upper directories of overlays hold: where `/` is the
    directory of all states, and `states` are those that count, the oldest first.

    The scope is a snapshot's. What was removed, or is no directory and may replace one, comes first, as
    character devices 0:0.
    """
    scope = _ChangesScope(payload)
    present, absent = merged_states([f"/{state}" for state in payload["states"]])
    removals = {each for path in absent for each in scope.removals(path)}
    with _Packer(most_bytes=payload["most_bytes"], link_homes=None) as packer:
        for path in sorted(removals):
            packer.add_removal(f".{path}")
        for path, here in sorted(present.items()):
            about = os.lstat(here)
            if not scope.holds(path, is_directory=stat.S_ISDIR(about.st_mode)):
                continue
            if stat.S_ISLNK(about.st_mode) and not scope.may_link(os.readlink(here), path):
                packer.leave_out(f".{path}")
            else:
                packer.add_alone(here, f".{path}", about)


def merged_states(states: list[str]) -> tuple[dict[str, str], set[str]]:
    """Path -> the file that is there after the last of `states`, which hold upper directories of overlays;
    and every path that is removed, or is no directory and may replace one."""
    latest: dict[str, tuple[int, str]] = {}
    cuts: dict[str, int] = {}
    for number, state in enumerate(states):
        for name in sorted(os.listdir(state)):
            _merge(f"{state}/{name}", "" if name == "root" else f"/{name}", number, latest, cuts)
    present = {
        path: here
        for path, (number, here) in latest.items()
        if all(cuts.get(above, number) <= number for above in _paths_above(path))
    }
    return present, {*cuts}


def _merge(
    top: str, place: str, number: int, latest: dict[str, tuple[int, str]], cuts: dict[str, int]
) -> None:
    """Lay what is below `top`, the upper directory of an overlay on `place` in state `number`, over `latest`;
    `cuts` has the last state in which nothing is left of what earlier ones have below a path."""
    stack = [(f"{top}/{name}", f"{place}/{name}") for name in os.listdir(top)]
    while stack:
        here, path = stack.pop()
        about = os.lstat(here)
        is_directory = stat.S_ISDIR(about.st_mode)
        if not is_directory or _is_opaque(here):
            cuts[path] = number
        if stat.S_ISCHR(about.st_mode):
            latest.pop(path, None)
            continue
        latest[path] = (number, here)
        if is_directory:
            try:
                stack += [(f"{here}/{name}", f"{path}/{name}") for name in os.listdir(here)]
            except PermissionError:
                continue  # its program made it unreadable


def _paths_above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:place]) for place in range(2, len(parts))]


def _is_opaque(path: str) -> bool:
    """Whether a directory of an overlay hides what is below it."""
    try:
        return os.getxattr(path, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError as error:
        if error.errno in MACHINE_ERRNOS:
            raise
        return False


class _ChangesScope:
    """Which paths are of a snapshot of changes."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self._folders, self._inclusions = payload["folders"], payload["named"]
        self._left_out, self._homes = payload["left_out"], payload["link_homes"]
        self._suffixes = tuple(payload["loose_suffixes_left_out"])

    def holds(self, path: str, *, is_directory: bool = True) -> bool:
        if _is_below(path, self._inclusions):
            return True
        if _is_below(path, self._left_out) or (self._folders and not _is_below(path, self._folders)):
            return False
        return is_directory or path.count("/") > 1 or not path.endswith(self._suffixes)

    def removals(self, path: str) -> list[str]:
        """The paths of the scope that go with `path`: itself, or folders of the scope that lay below it."""
        if self.holds(path):
            return [path]
        return [each for each in (*self._folders, *self._inclusions) if _is_below(each, [path])]

    def may_link(self, target: str, path: str) -> bool:
        if self._homes is None or may_lead(target, path, self._homes):
            return True
        return may_lead(target, path, ["/"]) and self.holds(landing(target, path))


class _Packer:
    """A tar on stdout; what is no plain file, directory or link is told on the result channel."""

    def __init__(
        self, *, most_bytes: int | None, link_homes: list[str] | None, left_out: list[str] | None = None
    ) -> None:
        import tarfile

        self._room = most_bytes
        self._link_homes = link_homes
        self._paths_left_out = set(left_out or ())
        self._names: list[str] = []
        self._stream: BinaryIO = os.fdopen(1, "wb", closefd=False)
        self._tar = tarfile.TarFile.open(fileobj=self._stream, mode="w|")

    def __enter__(self) -> _Packer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._tar.close()
            self._stream.flush()
            if self._names:
                write_all(3, json.dumps(self._names).encode())

    def leave_out(self, name: str) -> None:
        if len(self._names) < MOST_NAMED:
            self._names.append(name[:100])

    def add(self, name: str, place: str, path: str = "") -> None:
        """`name`, as it is found from here, and all below it; `path` is where it lies from the root on."""
        stack = [(name, place, path)]
        while stack:
            here, place, path = stack.pop()
            if path and path in self._paths_left_out:
                continue
            try:
                about = os.lstat(here)
                if stat.S_ISDIR(about.st_mode):
                    below = sorted(os.listdir(here), reverse=True)
                    stack.extend(
                        (f"{here}/{each}", f"{place}/{each}", path and f"{path}/{each}") for each in below
                    )
                if (
                    stat.S_ISLNK(about.st_mode)
                    and self._link_homes is not None
                    and not may_lead(os.readlink(here), path, self._link_homes)
                ):
                    self.leave_out(place)
                else:
                    self.add_alone(here, place, about)
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EFBIG) or error.errno in MACHINE_ERRNOS:
                    raise
                self.leave_out(place)  # its program made it unreadable

    def add_alone(self, here: str, place: str, about: os.stat_result) -> None:
        """One file, directory or link, and nothing below it."""
        try:
            if stat.S_ISREG(about.st_mode):
                with open(here, "rb") as file:
                    self._entry(place, about, b"0", file)
            elif stat.S_ISDIR(about.st_mode):
                self._entry(place, about, b"5")
            elif stat.S_ISLNK(about.st_mode):
                self._entry(place, about, b"2", linkname=os.readlink(here))
            else:
                self.leave_out(place)
        except PermissionError:
            self.leave_out(place)  # its program made it unreadable

    def add_removal(self, place: str) -> None:
        import tarfile

        entry = tarfile.TarInfo(place)
        entry.type = tarfile.CHRTYPE
        self._tar.addfile(entry)

    def _entry(
        self, place: str, about: os.stat_result, kind: bytes, file: BinaryIO | None = None, linkname: str = ""
    ) -> None:
        import tarfile

        size = about.st_size if file is not None else 0
        if self._room is not None:
            self._room -= size + NAMELESS
            if self._room < 0:
                raise OSError(errno.EFBIG, "there are more files than are kept")
        entry = tarfile.TarInfo(place)
        entry.mode = stat.S_IMODE(about.st_mode)
        entry.size, entry.type, entry.linkname = size, kind, linkname
        self._tar.addfile(entry, file)


def may_lead(target: str, path: str, homes: list[str]) -> bool:
    """Whether a link at `path` is kept. One with `..` after a name is not: where it leads depends on other
    links."""
    parts = target.split("/")
    first = next((place for place, part in enumerate(parts) if part not in ("..", ".", "")), len(parts))
    if ".." in parts[first:]:
        return False
    return _is_below(landing(target, path), homes)


def landing(target: str, path: str) -> str:
    """Where a link at `path` leads, if nothing on the way is one."""
    return os.path.normpath(os.path.join(os.path.dirname(path), target))


def unpack(
    stream: BinaryIO, path: str, box: str, root: str, *, exempt: tuple[str, ...] | list[str] = ()
) -> None:
    """A tar into a directory: directories, then files, then links, so that nothing goes through one; and the
    modes of directories last, so that none is in the way. A character device 0:0 stands for what is removed,
    but for what is `exempt`."""
    import tarfile

    links: list[tuple[str, str]] = []
    modes: list[tuple[str, int]] = []
    _make_tops(path, box, root)
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        for entry in tar:
            inside = os.path.normpath(entry.name)
            if inside.startswith(("..", "/")):
                raise OSError(errno.EINVAL, f"`{entry.name}` leads out of the archive")
            target = path if inside == "." else f"{path.rstrip('/')}/{inside}"
            if entry.issym():
                links.append((entry.linkname, target))
            elif entry.ischr():
                _remove(target, box, root, exempt)
            elif entry.isdir() and inside != ".":
                _in_folder(target, box, root, lambda name, folder: _make_directory(name, folder, 0o755))
                modes.append((target, entry.mode & 0o777))
            elif entry.isreg():
                _in_folder(
                    target, box, root, lambda name, folder, entry=entry: _put(tar, entry, name, folder)
                )
    for linkname, target in links:
        _in_folder(target, box, root, lambda name, folder, to=linkname: _link(to, name, folder))
    # Inner ones first: an outer one without rights would bar the way to them.
    for target, mode in reversed(modes):
        if mode != 0o755:
            _in_folder(target, box, root, lambda name, folder, mode=mode: _set_mode(name, folder, mode))


def _make_tops(path: str, box: str, root: str) -> None:
    folder, name = _folder_of(path, box, root, makes=True)
    if name != ".":
        _make_directory(name, folder, 0o755)
    os.close(folder)


def _in_folder(path: str, box: str, root: str, act: Any) -> None:
    folder, name = _folder_of(path, box, root, makes=True)
    try:
        act(name, folder)
    finally:
        os.close(folder)


def _put(tar: tarfile.TarFile, entry: tarfile.TarInfo, name: str, folder: int) -> None:
    if name == ".":
        raise OSError(errno.EISDIR, "a file cannot replace the directory that it is unpacked into")
    _make_room(name, folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    file = os.open(name, flags, entry.mode & 0o777, dir_fd=folder)
    try:
        content = tar.extractfile(entry)
        while content is not None:
            block = content.read(CHUNK)
            if not block:
                break
            write_all(file, block)
    finally:
        os.close(file)


def _link(target: str, name: str, folder: int) -> None:
    _make_room(name, folder)
    os.symlink(target, name, dir_fd=folder)


def _make_room(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # as it should be
        os.unlink(name, dir_fd=folder)


def _remove(path: str, box: str, root: str, exempt: tuple[str, ...] | list[str]) -> None:
    """Remove `path` with all below it but what is exempt; it may be absent."""
    with contextlib.suppress(FileNotFoundError):
        folder, name = _folder_of(path, box, root, makes=False)
        try:
            _remove_below(name, folder, path, exempt)
        finally:
            os.close(folder)


def _remove_below(name: str, folder: int, path: str, exempt: tuple[str, ...] | list[str]) -> bool:
    """Whether all of it is gone."""
    if path in exempt:
        return False
    if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
        os.unlink(name, dir_fd=folder)
        return True
    here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        whether_gone = [
            _remove_below(each, here, f"{path.rstrip('/')}/{each}", exempt) for each in os.listdir(here)
        ]
    finally:
        os.close(here)
    if all(whether_gone):
        os.rmdir(name, dir_fd=folder)
    return all(whether_gone)


def _set_mode(name: str, folder: int, mode: int) -> None:
    here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    os.fchmod(here, mode)
    os.close(here)


def _is_below(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _folder_of(path: str, box: str, root: str, *, makes: bool) -> tuple[int, str]:
    """An open directory and the last part of `path` in it. No part on the way may be a link.

    Raises OSError: ELOOP or ENOTDIR for a link, EACCES for a path outside `root`.
    """
    if "\0" in path:
        raise OSError(errno.EINVAL, "a path cannot hold a NUL")
    whole = os.path.normpath(os.path.join(box, path))
    if os.path.commonpath([whole, root]) != root:
        raise OSError(errno.EACCES, f"`{path}` is outside {root}")
    parts = [part for part in os.path.relpath(whole, root).split("/") if part != "."]
    # One part at a time: O_NOFOLLOW looks at the last part of a path alone.
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts[:-1]:
        above = here
        try:
            if makes:
                _make_directory(part, above, 0o755)
            here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        finally:  # also where the next part is missing: a job may ask for thousands of such paths
            os.close(above)
    return here, parts[-1] if parts else "."


def _make_directory(name: str, folder: int, mode: int) -> None:
    with contextlib.suppress(FileExistsError):  # it is opened next, without following a link
        os.mkdir(name, mode & 0o777, dir_fd=folder)


def _copy(source: int, target: int) -> None:
    while True:
        block = os.read(source, CHUNK)
        if not block:
            return
        write_all(target, block)


def write_all(target: int, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(target, rest) :]
