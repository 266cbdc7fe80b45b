"""Compressed data, unpacked as far as an honest file would grow and no further.

packed bytes ──Allowance.of(name, how many)──► at most 4 GiB, and 200 times what it was (or 64 MiB)
zip, tar, gzip ──unpacked in pieces, each piece counted──► bytes, or ConfigError naming the file
"""

import copy
import gzip
import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rllm.errors import ConfigError

MAX_BYTES = 4 << 30
"""The size of all content of one file: it is held in memory."""
MAX_RATIO = 200
"""JSON lines of one form shrink to a fiftieth; bombs, to a thousandth and less."""
MIN_BYTES = 64 << 20
"""A small file may grow to this whatever the ratio: a thousand equal rows are no bomb."""
_PIECE_BYTES = 1 << 20


class Allowance:
    """The number of bytes that may still come out of one file, all its members together."""

    def __init__(self, name: str, packed_bytes: int) -> None:
        self.name = name
        self._packed_bytes = packed_bytes
        self._left = self.limit = min(MAX_BYTES, max(MIN_BYTES, MAX_RATIO * packed_bytes))

    def take(self, num_bytes: int) -> None:
        """Raises ConfigError when they are more than are left."""
        self.require(num_bytes)
        self._left -= num_bytes

    def require(self, num_bytes: int) -> None:
        """The same, and nothing is taken."""
        if num_bytes > self._left:
            raise ConfigError(
                f"{self.name} has {self._packed_bytes:,} bytes and unpacks to more than {self.limit:,}, as "
                f"files do that are made to fill a machine: at most {MAX_RATIO} times the size, or "
                f"{MIN_BYTES >> 20} MiB of a small file, and {MAX_BYTES >> 30} GiB are taken. Unpack it "
                "yourself if it is what you want."
            )

    def read(self, stream: Any) -> bytes:
        """All of it, in pieces that are counted."""
        pieces: list[bytes] = []
        while piece := stream.read(_PIECE_BYTES):
            self.take(len(piece))
            pieces.append(piece)
        return b"".join(pieces)


def gunzip(data: bytes, name: str, allowance: Allowance | None = None) -> bytes:
    """Raises ConfigError for what is no gzip file, and for what unpacks to too much."""
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            return (allowance or Allowance(name, len(data))).read(stream)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{name} is no gzip file: {error}.") from error


class Archive:
    """The files in a zip or a tar; each is read into memory, nothing is unpacked onto the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.allowance = Allowance(path.name, path.stat().st_size)

    @staticmethod
    def is_one(path: Path) -> bool:
        return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)

    def names(self) -> list[str]:
        if zipfile.is_zipfile(self._path):
            with zipfile.ZipFile(self._path) as archive:
                return [each for each in archive.namelist() if not each.endswith("/")]
        with open_tar(self._path) as archive:
            return [each.name for each in archive if each.isfile()]

    def read(self, member: str) -> bytes:
        """One file. Raises ConfigError when it is not there, and for what unpacks to too much."""
        if zipfile.is_zipfile(self._path):
            with zipfile.ZipFile(self._path) as archive, archive.open(member) as stream:
                return self.allowance.read(stream)
        with open_tar(self._path) as archive:
            member_file = archive.extractfile(member)
            if member_file is None:
                raise ConfigError(f"{self._path.name} has no file {member}.")
            return self.allowance.read(member_file)


@contextmanager
def open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """A tar, packed or not, whose unpacked bytes are counted as it is read, passed over or copied out."""
    with tarfile.open(path) as archive:
        assert archive.fileobj is not None
        archive.fileobj = _Counted(archive.fileobj, Allowance(path.name, path.stat().st_size))  # pyright: ignore
        yield archive


def extract_tar(archive: tarfile.TarFile, folder: Path) -> None:
    """Copy all of an archive out into `folder`, and nothing anywhere else.

    Raises tarfile.TarError for a name or a link that leads out of it, and for devices and pipes.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:  # Python 3.11.2, Debian 12's own, has no filters
        archive.extractall(folder, members=_members_within(archive, folder))


def _members_within(archive: tarfile.TarFile, folder: Path) -> Iterator[tarfile.TarInfo]:
    """The members as the filter `data` leaves them, each looked at when those before it are there: a name may
    go through a link."""
    root = Path(os.path.realpath(folder))
    for member in archive:
        name = member.name.lstrip("/")
        place = root / name
        ends = [place]
        if member.issym():
            ends.append(place.parent / member.linkname)
        elif member.islnk():
            ends.append(root / member.linkname)
        elif not member.isfile() and not member.isdir():
            raise tarfile.TarError(f"{member.name!r} is a device or a pipe")
        is_out = any(not Path(os.path.realpath(end)).is_relative_to(root) for end in ends)
        if is_out or (len(ends) > 1 and member.linkname.startswith("/")):
            raise tarfile.TarError(f"{member.name!r} leads out of the folder")
        inner = copy.copy(member)
        executable = 0o111 if member.isdir() or member.mode & 0o100 else 0
        inner.name, inner.mode = (
            name,
            member.mode & (0o644 | executable) | (0o755 if member.isdir() else 0o600),
        )
        inner.uid, inner.gid, inner.uname, inner.gname = os.getuid(), os.getgid(), "", ""
        yield inner


class _Counted:
    """A stream that counts how far it was read; going back is free."""

    def __init__(self, stream: IO[bytes], allowance: Allowance) -> None:
        self._stream = stream
        self._allowance = allowance
        self._farthest = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._count(self._stream.tell())
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        """In steps: a packed stream unpacks all that it passes over."""
        if whence == 0:
            while (here := self._stream.tell()) < place:
                step = min(place, here + _PIECE_BYTES)
                self._count(step)
                if self._stream.seek(step) < step:
                    break
        return self._stream.seek(place, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self._stream.close()

    def _count(self, place: int) -> None:
        if place > self._farthest:
            self._allowance.take(place - self._farthest)
            self._farthest = place
