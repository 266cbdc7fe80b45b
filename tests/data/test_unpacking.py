"""Compressed files that are made to fill a machine: refused while little has been unpacked."""

import gzip
import io
import json
import os
import resource
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rllm.data import sources
from rllm.data.dataset import Dataset
from rllm.data.downloads import Download, unpack
from rllm.data.rows import rows_in
from rllm.data.sources import ArchiveSource, Split, pull
from rllm.data.unpacking import MIN_BYTES, Allowance, Archive, extract_tar, gunzip
from rllm.errors import ConfigError

MAX_GROWTH_KB = 700_000
"""Of this process, over files that hold gigabytes."""
MEBIBYTE = b" " * (1 << 20)
LINE = json.dumps({"a": "b" * 80}).encode() + b"\n"


def _line_of(num_bytes: int) -> bytes:
    return b'{"a": "' + b"b" * num_bytes + b'"}\n'


def _gzip(num_mebibytes: int) -> bytes:
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb") as file:
        file.write(LINE)
        for _ in range(num_mebibytes):
            file.write(MEBIBYTE)
    return made.getvalue()


def _zip(path: Path, num_members: int, num_mebibytes: int, method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for number in range(num_members):
            with archive.open(f"{number}.jsonl", "w") as member:
                member.write(LINE)
                for _ in range(num_mebibytes):
                    member.write(MEBIBYTE)


def _tar(path: Path, mode: Any, num_mebibytes: int) -> None:
    with tarfile.open(path, mode) as archive:
        facts = tarfile.TarInfo("a/rows.jsonl")
        facts.size = num_mebibytes << 20
        archive.addfile(facts, io.BytesIO(MEBIBYTE * num_mebibytes))
        archive.addfile(tarfile.TarInfo("a/b.jsonl"))


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _often(text: str, times: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([text]))


MANY = (MIN_BYTES >> 20) + 4
"""Mebibytes that are too many for a small file."""
BOMBS: dict[str, Callable[[Path], Path]] = {
    "gzip": lambda there: _written(there / "a.jsonl.gz", _gzip(MANY)),
    "gzip in parts": lambda there: _written(there / "a.jsonl.gz", _gzip(2) * (MANY // 2)),
    "a zip of one": lambda there: _made(there / "a.zip", lambda path: _zip(path, 1, MANY)),
    "a zip of many": lambda there: _made(there / "a.zip", lambda path: _zip(path, 8, 10)),
    "a zip of bz2": lambda there: _made(there / "a.zip", lambda path: _zip(path, 1, MANY, zipfile.ZIP_BZIP2)),
    "a zip of lzma": lambda there: _made(there / "a.zip", lambda path: _zip(path, 1, MANY, zipfile.ZIP_LZMA)),
    "a tar of gzip": lambda there: _made(there / "a.tar.gz", lambda path: _tar(path, "w:gz", MANY)),
    "a tar of xz": lambda there: _made(there / "a.tar.xz", lambda path: _tar(path, "w:xz", MANY)),
    "a tar of bz2": lambda there: _made(there / "a.tar.bz2", lambda path: _tar(path, "w:bz2", MANY)),
    "a gzip in a zip": lambda there: _made(there / "a.zip", _nested),
    "a text in many rows": lambda there: _written(
        there / "a.parquet", _parquet(pa.table({"a": _often("x" * (1 << 20), 5000)}))
    ),
    "a text in many lists": lambda there: _written(
        there / "a.parquet",
        _parquet(pa.table({"a": pa.array([["x" * (1 << 16)] * 300] * 10)})),
    ),
    "nothing in many rows": lambda there: _written(
        there / "a.parquet", _parquet(pa.table({"a": pa.nulls(1_000_000, pa.string())}))
    ),
    "a dictionary of Arrow": lambda there: _written(
        there / "a.arrow", _arrow(pa.table({"a": _often("x" * (1 << 20), 5000)}))
    ),
}


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _made(path: Path, make: Callable[[Path], None]) -> Path:
    make(path)
    return path


def _nested(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(4):
            archive.writestr(f"{number}.jsonl.gz", _gzip(30))


def _arrow(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _read(path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    if path.suffix in (".gz", ".parquet", ".arrow") and ".tar" not in path.name:
        return Dataset.load_data(path)
    monkeypatch.setattr(sources, "download", lambda url, sha256="": Download(path=path, sha256="0" * 64))
    return pull(ArchiveSource(url="https://example.org/archive"), Split())


def test_a_bomb_is_refused_before_it_takes_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, str] = {}
    for kind, make in BOMBS.items():
        folder = tmp_path / kind
        folder.mkdir()
        path = make(folder)
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            _read(path, monkeypatch)
            taken[kind] = "accepted"
        except ConfigError as error:
            if "unpacks to more than" not in str(error) or path.name not in str(error):
                taken[kind] = str(error)
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
        if grown_kb > MAX_GROWTH_KB:
            taken[kind] = f"grew by {grown_kb:,} kB"
    assert not taken


def test_a_tar_that_would_fill_the_disk_leaves_nothing(tmp_path: Path) -> None:
    path = _made(tmp_path / "a.tar.gz", lambda path: _tar(path, "w:gz", 80))
    with pytest.raises(ConfigError, match="unpacks"):
        unpack(Download(path=path, sha256="0" * 64))
    assert os.listdir(tmp_path) == ["a.tar.gz"]


def test_honest_files_are_read_whole(tmp_path: Path) -> None:
    lines = LINE * 20_000
    assert len(rows_in(gzip.compress(lines), "a.jsonl.gz")) == 20_000
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", lines)
    assert Archive(tmp_path / "a.zip").read("a.jsonl") == lines
    modes: tuple[Any, ...] = ("w", "w:gz", "w:xz")
    for mode in modes:
        with tarfile.open(tmp_path / "a.tar", mode) as archive:
            for name in ("a.jsonl", "b.jsonl"):
                facts = tarfile.TarInfo(name)
                facts.size = len(lines)
                archive.addfile(facts, io.BytesIO(lines))
        assert Archive(tmp_path / "a.tar").names() == ["a.jsonl", "b.jsonl"]
        assert Archive(tmp_path / "a.tar").read("b.jsonl") == lines
    rows = [
        {"a": f"{number} é", "b": [str(number % 3)], "c": {"d": "x", "e": None}, "f": number, "g": b"\0"}
        for number in range(5000)
    ]
    assert rows_in(_parquet(pa.Table.from_pylist(rows)), "a.parquet") == rows
    assert rows_in(_arrow(pa.Table.from_pylist(rows)), "a.arrow") == rows


def test_a_ratio_is_allowed_once_and_then_no_more() -> None:
    allowance = Allowance("a", 10)
    allowance.take(MIN_BYTES)
    with pytest.raises(ConfigError, match="a has 10 bytes"):
        allowance.take(1)
    assert gunzip(gzip.compress(_line_of(1000)), "a.gz") == _line_of(1000)
    for broken in (b"junk", gzip.compress(b"a" * 100)[:-9], b"\x1f\x8b\x08" + b"\xff" * 30):
        with pytest.raises(ConfigError, match=r"a\.gz.*gzip"):
            gunzip(broken, "a.gz")


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode, entry.uid, entry.gid = kind, link, mode, 4321, 4321
    return entry


TARS: dict[str, list[tarfile.TarInfo]] = {
    "files": [
        member("a/b"),
        member("run", mode=0o777),
        member("c", mode=0o4600),
        member("d", tarfile.DIRTYPE),
    ],
    "an absolute name": [member("/etc/name")],
    "a name that leads out": [member("../out")],
    "a name that leads out and in again": [member("a", tarfile.DIRTYPE), member("a/../b")],
    "a link": [member("a/b"), member("a/link", tarfile.SYMTYPE, "b"), member("hard", tarfile.LNKTYPE, "a/b")],
    "a link that leads out": [member("link", tarfile.SYMTYPE, "../../out")],
    "a hard link that leads out": [member("link", tarfile.LNKTYPE, "../out")],
    "an absolute link": [member("link", tarfile.SYMTYPE, "/etc/passwd")],
    "a name through a link": [member("up", tarfile.SYMTYPE, "."), member("up/../../out")],
    "a pipe": [member("pipe", tarfile.FIFOTYPE)],
    "a device": [member("null", tarfile.CHRTYPE)],
}
TAKEN = ("files", "an absolute name", "a name that leads out and in again", "a link")


@pytest.mark.parametrize("case", TARS)
@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python has no filter to compare with")
def test_a_python_without_filters_takes_and_refuses_what_the_filter_for_data_does(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "some.tar", "w") as archive:
        for each in TARS[case]:
            archive.addfile(each, io.BytesIO())
    results: list[Any] = []
    for place in ("with", "without"):
        folder = tmp_path / place / "folder"
        with monkeypatch.context() as patch, tarfile.open(tmp_path / "some.tar") as archive:
            if place == "without":
                patch.delattr(tarfile, "data_filter")
            try:
                extract_tar(archive, folder)
            except tarfile.TarError:
                results.append("refused")
                continue
        results.append(
            {
                str(each.relative_to(folder)): (
                    each.is_symlink(),
                    each.is_dir() or stat.S_IMODE(each.lstat().st_mode),
                    each.lstat().st_uid,
                )
                for each in folder.rglob("*")
            }
        )
    assert results[0] == results[1]
    assert (results[0] != "refused") == (case in TAKEN)
    assert not (tmp_path / "out").exists()
