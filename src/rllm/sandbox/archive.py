"""Directories of this machine to tar and back, without following what a program may have put in the way."""

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO

from rllm.sandbox.inside.files import may_lead, unpack


def pack_tree(source: Path) -> bytes:
    """A tar of the files and directories in `source`, owned by nobody. Raises OSError for a link or a
    device."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(source.rglob("*")):
            kind = path.lstat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise OSError(f"`{path}` is neither a plain file nor a directory; it is not uploaded.")
            entry = tar.gettarinfo(path, f"./{path.relative_to(source)}")
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            if stat.S_ISREG(kind):
                with path.open("rb") as stream:
                    tar.addfile(entry, stream)
            else:
                tar.addfile(entry)
    return buffer.getvalue()


def pack_links_and_all(
    source: Path, place: str, *, keeps: Callable[[str], bool] = lambda path: True
) -> bytes:
    """A tar of a directory of one's own with its links, as paths from `/` on below `place`; of its files
    those that are kept."""
    buffer = io.BytesIO()

    def owned_by_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not entry.isdir() and not keeps(f"/{entry.name.removeprefix('./')}"):
            return None
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(source, f".{place}", filter=owned_by_nobody)
    return buffer.getvalue()


def unpack_tree(stream: IO[bytes], target: Path) -> list[str]:
    """Make `target` from a tar of one file or directory, named "."; returns what is neither and was left out.

    Every name is checked, and every file is new: nothing outside `target` can be reached.
    Raises FileExistsError where `target` is there already.
    """
    if os.path.lexists(target):
        raise FileExistsError(f"`{target}` exists already; choose a new name.")
    left_out: list[str] = []
    # Filled beside the target and renamed, so that the target is there whole or not at all.
    part = target.with_name(f".{target.name}.part")
    if os.path.lexists(part):
        _remove(part)
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for entry in tar:
                place = _place_of(entry.name, part)
                file = _file_of(entry, tar)
                if place is not None and entry.isdir():
                    place.mkdir(parents=True, exist_ok=True)
                elif place is not None and file is not None:
                    _write_new(place, tar.extractfile(file), entry.mode)
                else:
                    left_out.append(entry.name)
        part.rename(target)
    except BaseException:
        _remove(part)
        raise
    return left_out


def unpack_layer(data: bytes, layer: Path) -> None:
    """Put a snapshot's files below `layer`, which is made; nothing outside of it can be reached."""
    layer.mkdir(parents=True, exist_ok=True)
    top = str(layer.absolute())
    unpack(io.BytesIO(data), top, top, top)


def without_top(data: bytes) -> bytes:
    """A tar of a directory without its entry for the directory itself, whose mode is not the program's to
    set. Raises TarError for what is no tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as source_tar, tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in source_tar:
            if entry.name not in (".", "./"):
                tar.addfile(entry, source_tar.extractfile(entry) if entry.isreg() else None)
    return buffer.getvalue()


def without_ways_out(data: bytes, homes: Collection[str]) -> tuple[bytes, list[str]]:
    """A tar of paths from `/` on with its links last, and without those that lead elsewhere than to `homes`;
    and the names of what was left out. Hard links become files. Raises TarError for what is no tar."""
    buffer = io.BytesIO()
    links: list[tarfile.TarInfo] = []
    left_out: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as source_tar, tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in source_tar:
            path = f"/{entry.name.removeprefix('./').strip('/')}"
            if (file := _file_of(entry, source_tar)) is not None:
                plain = tarfile.TarInfo(entry.name)
                plain.mode, plain.size = entry.mode, file.size
                tar.addfile(plain, source_tar.extractfile(file))
            elif entry.isdir():
                tar.addfile(entry)
            elif entry.issym() and may_lead(entry.linkname, path, [*homes]):
                links.append(entry)
            else:
                left_out.append(entry.name)
        # Last, so that no other entry is unpacked through one of them.
        for entry in links:
            tar.addfile(entry)
    return buffer.getvalue(), left_out


def names_of(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getnames()


def tar_of_file(data: bytes) -> bytes:
    """A tar of one file, named "."."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(".")
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _file_of(entry: tarfile.TarInfo, tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """The entry with the content of a plain file, of which a hard link is a later name; None for others."""
    if not entry.islnk():
        return entry if entry.isreg() else None
    try:
        first = tar.getmember(entry.linkname)
    except KeyError:
        return None  # of a file that is not in the archive
    return first if first.isreg() else None


def _place_of(name: str, top: Path) -> Path | None:
    """Where an entry goes; None for a name that leads out."""
    if name in (".", "./"):
        return top
    parts = name.removeprefix("./").rstrip("/").split("/")
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts):
        return None
    return top.joinpath(*parts)


def _write_new(place: Path, content: IO[bytes] | None, mode: int) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    # Whatever the tar says, without set-user-ID bits and without the right to write for others.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(place, flags, mode & 0o755), "wb") as stream:
        if content is not None:
            shutil.copyfileobj(content, stream)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
