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
from rllm.sandbox.inside.folders import Cursor, make_directory, walk

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    import tarfile
    from typing import Any, BinaryIO

CHUNK = 1 << 20
MOST_NAMED = 500
"""The number of names that are told of what was left out."""
MOST_SEGMENTS = 4096
"""The number of holes that are told of one file; what comes after them is packed with its zeros."""
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
    *folders, name = _parts(path, box, root) or ["."]
    # O_NONBLOCK, because opening a FIFO would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    file = os.open(name, flags, dir_fd=Cursor(root).enter(folders))
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, f"`{path}` is not a plain file")
    if most_bytes is not None and about.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"`{path}` has {about.st_size} bytes; at most {most_bytes} are read")
    _copy(file, 1)


def write(path: str, box: str, root: str) -> None:
    """stdin to a plain file, which is replaced: what a link of that name points to stays as it is."""
    *folders, name = _parts(path, box, root) or ["."]
    folder = Cursor(root).enter(folders, makes=True)
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
    cursor, parts = Cursor(root), _parts(path, box, root)
    *folders, name = parts or ["."]
    top = os.lstat(name, dir_fd=cursor.enter(folders))
    if not (stat.S_ISREG(top.st_mode) or stat.S_ISDIR(top.st_mode)):
        raise OSError(errno.EINVAL, f"`{path}` is neither a plain file nor a directory")
    with _Packer(cursor, base=parts, most_bytes=None) as packer:
        packer.add(parts)


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
        Cursor(root),
        base=_parts(base, box, root),
        most_bytes=payload["most_bytes"],
        link_homes=None if homes is None else [*homes, *paths],
        left_out=payload["left_out"],
    ) as packer:
        for path in paths:
            packer.add(_parts(path, box, root))


def changes(payload: dict[str, Any]) -> None:
    """A tar to stdout, relative to `/`, of what the upper directories of overlays hold: where `/` is the
    directory of all states, and `states` are those that count, the oldest first.

    The scope is a snapshot's. What was removed, or is no directory and may replace one, comes first, as
    character devices 0:0.
    """
    scope = _ChangesScope(payload)
    present, absent = merged_states([f"/{state}" for state in payload["states"]])
    removals = {each for path in absent for each in scope.removals(path)}
    cursor = Cursor("/")
    with _Packer(cursor, base=[], most_bytes=payload["most_bytes"]) as packer:
        for path in sorted(removals):
            packer.add_removal(f".{path}")
        for path, here in sorted(present.items()):
            *folders, name = here[1:].split("/")
            about = os.lstat(name, dir_fd=cursor.enter(folders))
            if not scope.holds(path, is_directory=stat.S_ISDIR(about.st_mode)):
                continue
            folder = cursor.enter(folders)
            if stat.S_ISLNK(about.st_mode) and not scope.may_link(os.readlink(name, dir_fd=folder), path):
                packer.leave_out(f".{path}")
            else:
                packer.add_alone(name, folder, f".{path}", about)


def merged_states(states: list[str]) -> tuple[dict[str, str], set[str]]:
    """Path -> the file that is there after the last of `states`, which hold upper directories of overlays;
    and every path that is removed, or is no directory and may replace one."""
    latest: dict[str, tuple[int, str]] = {}
    cuts: dict[str, int] = {}
    cursor = Cursor("/")
    for number, state in enumerate(states):
        for name in sorted(os.listdir(state)):
            top = f"{state}/{name}"[1:].split("/")
            _merge(cursor, top, "" if name == "root" else f"/{name}", number, latest, cuts)
    present: dict[str, str] = {}
    cuts_above: dict[str, int] = {}
    for path in sorted({*latest, *cuts}):  # what lies above a path comes before it
        above = path.rpartition("/")[0]
        cuts_above[path] = max(cuts_above.get(above, -1), cuts.get(above, -1))
        if path in latest and cuts_above[path] <= latest[path][0]:
            present[path] = latest[path][1]
    return present, {*cuts}


def _merge(
    cursor: Cursor,
    top: list[str],
    place: str,
    number: int,
    latest: dict[str, tuple[int, str]],
    cuts: dict[str, int],
) -> None:
    """Lay what is below `top`, the upper directory of an overlay on `place` in state `number`, over `latest`;
    `cuts` has the last state in which nothing is left of what earlier ones have below a path."""
    for parts, about in walk(cursor, top, refuse=_skip_unreadable):
        if len(parts) == len(top):
            continue
        path = "/".join([place, *parts[len(top) :]])
        is_directory = stat.S_ISDIR(about.st_mode)
        if not is_directory or _is_opaque(cursor, parts):
            cuts[path] = number
        if stat.S_ISCHR(about.st_mode):
            latest.pop(path, None)
            continue
        latest[path] = (number, "/" + "/".join(parts))


def _skip_unreadable(parts: list[str], error: OSError) -> None:
    """A folder that its program made unreadable is there without what is in it."""
    if not isinstance(error, PermissionError):
        raise error


def _is_opaque(cursor: Cursor, parts: list[str]) -> bool:
    """Whether a directory of an overlay hides what is below it."""
    try:
        return os.getxattr(cursor.enter(parts), "user.overlay.opaque") == b"y"
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
        self,
        cursor: Cursor,
        *,
        base: list[str],
        most_bytes: int | None,
        link_homes: list[str] | None = None,
        left_out: list[str] | None = None,
    ) -> None:
        """Names are relative to `base`. Without `most_bytes` files with holes are packed with their zeros."""
        import tarfile

        self._cursor, self._base = cursor, base
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

    def add(self, top: list[str]) -> None:
        """`top`, as it is found from the root on, and all below it; nothing where its program removed it."""
        for parts, about in walk(self._cursor, top, refuse=self._refuse, skips=self._is_left_out):
            *folders, name = parts or ["."]
            try:
                folder = self._cursor.enter(folders)
                if (
                    stat.S_ISLNK(about.st_mode)
                    and self._link_homes is not None
                    and not may_lead(os.readlink(name, dir_fd=folder), self._path(parts), self._link_homes)
                ):
                    self.leave_out(self._place(parts))
                else:
                    self.add_alone(name, folder, self._place(parts), about)
            except OSError as error:
                self._refuse(parts, error)

    def _path(self, parts: list[str]) -> str:
        return "/".join([self._cursor.root.rstrip("/"), *parts])

    def _place(self, parts: list[str]) -> str:
        return "/".join([".", *parts[len(self._base) :]])

    def _is_left_out(self, parts: list[str]) -> bool:
        return bool(self._paths_left_out) and self._path(parts) in self._paths_left_out

    def _refuse(self, parts: list[str], error: OSError) -> None:
        if error.errno in (errno.EPIPE, errno.EFBIG) or error.errno in MACHINE_ERRNOS:
            raise error
        if not isinstance(error, FileNotFoundError):
            self.leave_out(self._place(parts))  # its program made it unreadable

    def add_alone(self, name: str, folder: int, place: str, about: os.stat_result) -> None:
        """One file, directory or link, and nothing below it."""
        try:
            if stat.S_ISREG(about.st_mode):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
                    self._add_file(place, about, file)
            elif stat.S_ISDIR(about.st_mode):
                self._entry(place, about, b"5")
            elif stat.S_ISLNK(about.st_mode):
                self._entry(place, about, b"2", linkname=os.readlink(name, dir_fd=folder))
            else:
                self.leave_out(place)
        except PermissionError:
            self.leave_out(place)  # its program made it unreadable

    def add_removal(self, place: str) -> None:
        import tarfile

        entry = tarfile.TarInfo(place)
        entry.type = tarfile.CHRTYPE
        self._tar.addfile(entry)

    def _add_file(self, place: str, about: os.stat_result, file: BinaryIO) -> None:
        segments = [(0, about.st_size)]
        if self._room is not None and about.st_blocks * 512 < about.st_size:
            segments = segments_of(file.fileno(), about.st_size)
        if segments == [(0, about.st_size)]:
            self._entry(place, about, b"0", file, about.st_size)
            return
        # Version 0.1 of the sparse files of GNU tar, which `tarfile` reads.
        numbers = ",".join(f"{start},{length}" for start, length in segments)
        headers = {"GNU.sparse.map": numbers, "GNU.sparse.size": str(about.st_size)}
        num_bytes = sum(length for _, length in segments)
        self._entry(place, about, b"0", _Segments(file, segments), num_bytes, headers=headers)

    def _entry(
        self,
        place: str,
        about: os.stat_result,
        kind: bytes,
        file: BinaryIO | _Segments | None = None,
        size: int = 0,
        *,
        linkname: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        import tarfile

        if self._room is not None:
            self._room -= size + NAMELESS
            if self._room < 0:
                raise OSError(errno.EFBIG, "there are more files than are kept")
        entry = tarfile.TarInfo(place)
        entry.mode = stat.S_IMODE(about.st_mode)
        entry.size, entry.type, entry.linkname = size, kind, linkname
        entry.pax_headers = headers or {}
        self._tar.addfile(entry, file)  # type: ignore[arg-type]  of a file it is read from alone


def segments_of(file: int, size: int) -> list[tuple[int, int]]:
    """Start and length of what a file holds between its holes; of one that is a single hole, an empty one at
    its end."""
    segments: list[tuple[int, int]] = []
    end = 0
    while end < size and len(segments) < MOST_SEGMENTS:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # no data from here on
        end = os.lseek(file, start, os.SEEK_HOLE)
        segments.append((start, end - start))
    if len(segments) == MOST_SEGMENTS:
        segments[-1] = (segments[-1][0], size - segments[-1][0])
    os.lseek(file, 0, os.SEEK_SET)
    return segments or [(size, 0)]


class _Segments:
    """Reader of what a file holds between its holes, from start to end."""

    def __init__(self, file: BinaryIO, segments: list[tuple[int, int]]) -> None:
        self._file, self._rest = file, list(reversed(segments))

    def read(self, size: int) -> bytes:
        blocks: list[bytes] = []
        while size and self._rest:
            start, length = self._rest.pop()
            self._file.seek(start)
            block = self._file.read(min(size, length))
            blocks.append(block)
            size -= len(block)
            if block and len(block) < length:
                self._rest.append((start + len(block), length - len(block)))
        return b"".join(blocks)


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

    links: list[tuple[str, list[str]]] = []
    modes: list[tuple[list[str], int]] = []
    top, cursor = _parts(path, box, root), Cursor(root)
    exempt_parts = [_parts(each, box, root) for each in exempt]
    try:
        cursor.enter(top, makes=True)
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for entry in tar:
                inside = os.path.normpath(entry.name)
                if inside.startswith(("..", "/")):
                    raise OSError(errno.EINVAL, f"`{entry.name}` leads out of the archive")
                parts = top if inside == "." else [*top, *inside.split("/")]
                if entry.issym():
                    links.append((entry.linkname, parts))
                elif entry.ischr():
                    _remove(cursor, parts, exempt_parts)
                elif entry.isdir() and inside != ".":
                    make_directory(parts[-1], cursor.enter(parts[:-1], makes=True), 0o755)
                    modes.append((parts, entry.mode & 0o777))
                elif entry.isreg():
                    _put(tar, entry, inside, parts, cursor)
        for target, parts in links:
            folder = cursor.enter(parts[:-1], makes=True)
            _make_room(parts[-1], folder)
            os.symlink(target, parts[-1], dir_fd=folder)
        # Inner ones first: an outer one without rights would bar the way to them.
        for parts, mode in reversed(modes):
            if mode != 0o755:
                _set_mode(parts[-1], cursor.enter(parts[:-1]), mode)
    finally:
        cursor.close()


def _put(tar: tarfile.TarFile, entry: tarfile.TarInfo, inside: str, parts: list[str], cursor: Cursor) -> None:
    if inside == ".":
        raise OSError(errno.EISDIR, "a file cannot replace the directory that it is unpacked into")
    folder = cursor.enter(parts[:-1], makes=True)
    _make_room(parts[-1], folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    file = os.open(parts[-1], flags, entry.mode & 0o777, dir_fd=folder)
    try:
        content = tar.extractfile(entry)
        assert content is not None, "it is a plain file"
        segments: Any = entry.sparse or [(0, entry.size)]
        for start, length in segments:
            content.seek(start)
            os.lseek(file, start, os.SEEK_SET)
            while length:
                block = content.read(min(CHUNK, length))
                if not block:
                    raise OSError(errno.EINVAL, f"`{entry.name}` ends before its end")
                write_all(file, block)
                length -= len(block)
        if entry.sparse:
            os.ftruncate(file, entry.size)
    finally:
        os.close(file)


def _make_room(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # as it should be
        os.unlink(name, dir_fd=folder)


def _remove(cursor: Cursor, top: list[str], exempt_parts: list[list[str]]) -> None:
    """Remove `top` with all below it but what is exempt; it may be absent."""
    survivors: list[list[str]] = []

    def is_exempt(parts: list[str]) -> bool:
        if parts in exempt_parts:
            survivors.append(parts)
        return parts in exempt_parts

    with contextlib.suppress(FileNotFoundError):
        folders: list[list[str]] = []
        for parts, about in walk(cursor, top, refuse=_fail, skips=is_exempt):
            if stat.S_ISDIR(about.st_mode):
                folders.append(parts)
            else:
                os.unlink(parts[-1], dir_fd=cursor.enter(parts[:-1]))
        for parts in reversed(folders):
            if not any(path[: len(parts)] == parts for path in survivors):
                os.rmdir(parts[-1], dir_fd=cursor.enter(parts[:-1]))


def _set_mode(name: str, folder: int, mode: int) -> None:
    here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        os.fchmod(here, mode)
    finally:
        os.close(here)


def _fail(parts: list[str], error: OSError) -> None:
    raise error


def _is_below(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _parts(path: str, box: str, root: str) -> list[str]:
    """The folders on the way from `root` to `path`, and its last part; none for the root itself.

    Raises OSError: EINVAL for a path with a NUL, EACCES for one outside `root`.
    """
    if "\0" in path:
        raise OSError(errno.EINVAL, "a path cannot hold a NUL")
    whole = os.path.normpath(os.path.join(box, path))
    if os.path.commonpath([whole, root]) != root:
        raise OSError(errno.EACCES, f"`{path}` is outside {root}")
    return [part for part in os.path.relpath(whole, root).split("/") if part != "."]


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
