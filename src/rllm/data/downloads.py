"""One file over HTTP, kept, checksummed and resumed.

    url ──► RLLM_HOME/downloads/KEY/NAME.part ──Range, If-Range──► NAME + NAME.json (url, sha256, etag)

A download that broke off goes on where it stopped, if the server says that the file is still the same one.
A file without a known checksum gets the one of its first download, and is held to it from then on.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rllm.data.unpacking import extract_tar, open_tar
from rllm.errors import ConfigError
from rllm.files.atomic import StorageErrors, file_sha256, write_atomic
from rllm.files.home import rllm_home

TRIES = 3
TIMEOUT_S = 30.0
"""Without a byte from the server."""
_CHUNK = 1 << 20


@dataclass(kw_only=True, slots=True, frozen=True)
class Download:
    """A file that is there, whole, and what it is."""

    path: Path
    sha256: str


def download(
    url: str,
    *,
    sha256: str = "",
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    timeout_s: float = TIMEOUT_S,
) -> Download:
    """The file behind `url`, from here where it was fetched before.

    `sha256` is what it must have; empty takes the one of the first download. `on_bytes` hears (done,
    total), with total 0 where the server does not say. Raises ConfigError when it cannot be had or is
    another file.
    """
    _require_safe(url)
    folder = rllm_home() / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:16]
    target = folder / (Path(urlsplit(url).path).name or "file")
    earlier = _earlier_download(url, target, sha256)
    if earlier is not None:
        return earlier
    with StorageErrors(target):
        folder.mkdir(parents=True, exist_ok=True)
    with one_process_at_a_time(target.with_name(target.name + ".lock")):
        # Another process may have fetched it while this one waited.
        return _earlier_download(url, target, sha256) or _new_download(
            url, target, sha256, on_bytes, timeout_s
        )


def _earlier_download(url: str, target: Path, sha256: str) -> Download | None:
    """The download of before; None where there is nothing, or an older version than that with `sha256`."""
    record = _record_of(target)
    # The record is written last. A file without one may be that of a process killed in between.
    if not (target.is_file() and record):
        return None
    actual_hash = file_sha256(target)
    if actual_hash == (sha256 or record.get("sha256", "")):
        return Download(path=target, sha256=actual_hash)
    if sha256 and record["sha256"] == actual_hash:  # the catalogue has moved on to another version
        return None
    raise ConfigError(f"{target} is not what was downloaded; delete it to fetch {url} again.")


def _new_download(
    url: str, target: Path, sha256: str, on_bytes: Callable[[int, int], None], timeout_s: float
) -> Download:
    expected_hash = sha256 or _record_of(target).get("sha256", "")
    part = target.with_name(target.name + ".part")
    with StorageErrors(target):
        etag = _fetch(url, part, on_bytes, timeout_s)
    actual_hash = file_sha256(part)
    if sha256 and actual_hash != sha256:
        part.unlink()
        raise ConfigError(
            f"{url} has the sha256 {actual_hash}, not {sha256} as the catalogue says: it was changed or cut. "
            "It was "
            "thrown away; try again, or update rllm."
        )
    if expected_hash and actual_hash != expected_hash:  # it was fetched before, and deleted since
        part.unlink()
        raise ConfigError(
            f"{url} has the sha256 {actual_hash}, and {expected_hash} when it was first fetched here: it is "
            f"another file now. To take it as it is, delete {_facts(target)}."
        )
    os.replace(part, target)
    _facts(part).unlink(missing_ok=True)
    facts = {"url": url, "sha256": actual_hash, "etag": etag, "bytes": target.stat().st_size}
    write_atomic(_facts(target), json.dumps(facts, indent=1) + "\n")
    return Download(path=target, sha256=actual_hash)


@contextmanager
def one_process_at_a_time(lock: Path) -> Iterator[None]:
    """Wait while another process, or thread, fetches the same file: both would append to one part."""
    # The file stays for good: were it removed, two processes could lock two files of the same name.
    with StorageErrors(lock):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
                raise
        yield
    finally:
        os.close(descriptor)


def unpack(got: Download) -> Path:
    """Unpack an archive into a directory beside it. Returns that, or the one folder in it, where it is all.

    Nothing is written outside of the directory, and links that lead out of it are refused.
    """
    target = got.path.with_name(f"{got.path.name}-{got.sha256[:16]}")
    if not target.is_dir():
        # Named by the thread, of which no other process or thread has the number at the same time.
        temporary = target.with_name(f".{target.name}.tmp-{threading.get_native_id()}")
        with StorageErrors(target):
            try:
                with open_tar(got.path) as archive:
                    extract_tar(archive, temporary)
                try:
                    os.rename(temporary, target)
                except OSError:
                    if not target.is_dir():  # else another process was faster
                        raise
            except tarfile.TarError as error:
                raise ConfigError(f"{got.path} cannot be unpacked: {error}.") from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    inside = list(target.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else target


def _fetch(url: str, part: Path, on_bytes: Callable[[int, int], None], timeout_s: float) -> str:
    """Fill `part` up to the end; the server's tag of the file."""
    for attempt in range(1, TRIES + 1):
        try:
            return _fetch_once(url, part, on_bytes, timeout_s)
        except urllib.error.HTTPError as error:
            if error.code == 416 and part.exists():  # there is more here than there: it was another file
                part.unlink()
                continue
            if error.code < 500 or attempt == TRIES:
                raise ConfigError(f"{url} answered {error.code} {error.reason}; {_MEND}") from error
        except (urllib.error.URLError, TimeoutError, ConnectionError, _CutOff) as error:
            if attempt == TRIES:
                raise ConfigError(
                    f"{url} cannot be fetched ({getattr(error, 'reason', error)}); {_MEND} What has "
                    "arrived is "
                    "kept, and the next try goes on from there."
                ) from error
    raise ConfigError(f"{url} changed while it was being fetched; try again.")


_MEND = "pulling needs the network once: connect, or copy RLLM_HOME from a machine that has it."


class _CutOff(Exception):
    """The connection ended before the file did."""


def _fetch_once(url: str, part: Path, on_bytes: Callable[[int, int], None], timeout_s: float) -> str:
    there = part.stat().st_size if part.exists() else 0
    tag = _record_of(part).get("etag", "")
    headers = {"User-Agent": "rllm", "Accept-Encoding": "identity"}
    # Without a tag nothing says that the rest belongs to the same file.
    if there and tag:
        headers |= {"Range": f"bytes={there}-", "If-Range": tag}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s) as answer:
        goes_on = answer.status == 206
        there = there if goes_on else 0
        tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        length = answer.headers.get("Content-Length")
        total = there + int(length) if length else 0
        # Written before the first byte, so that a part left by
        # a killed process is resumed only under its own tag.
        write_atomic(_facts(part), json.dumps({"etag": tag}))
        with open(part, "ab" if goes_on else "wb") as file:
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                there += len(chunk)
                on_bytes(there, total)
            file.flush()
            os.fsync(file.fileno())
    if total and there < total:
        raise _CutOff(f"{there} of {total} bytes arrived")
    return tag


def _require_safe(url: str) -> None:
    parts = urlsplit(url)
    is_here = parts.hostname in ("127.0.0.1", "::1", "localhost")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_here):
        raise ConfigError(
            f"{url} is not https; data that is graded by comes over an address that can be trusted."
        )


def _facts(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _record_of(path: Path) -> dict[str, str]:
    try:
        return json.loads(_facts(path).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
