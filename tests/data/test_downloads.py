"""Downloads from a server of our own that cuts off, changes files and lies about them."""

import hashlib
import io
import shutil
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rllm.data import downloads
from rllm.data.downloads import download, unpack
from rllm.data.unpacking import extract_tar
from rllm.errors import ConfigError

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class FileServer(ThreadingHTTPServer):
    """Serves one file, as badly as it is told."""

    content = CONTENT
    etag = '"one"'
    cuts_after: list[int]
    """Bytes of the next answers after which the connection ends."""
    status = 200
    both_ask: threading.Barrier | None = None
    """What an answer waits at, in vain where only one asks."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cuts_after = []
        self.asked: list[str | None] = []
        """Range of each request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/files/data.jsonl"


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        content, begin = self.server.content, 0
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        if asked and self.headers.get("If-Range") == self.server.etag:
            begin = int(asked.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if begin else 200)
        self.send_header("ETag", self.server.etag)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if self.server.both_ask is not None:
            with suppress(threading.BrokenBarrierError):
                self.server.both_ask.wait()
        cut = self.server.cuts_after.pop(0) if self.server.cuts_after else len(content)
        self.wfile.write(content[begin : begin + cut])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    served = FileServer()
    thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


def test_a_file_is_fetched_once_and_checked(server: FileServer) -> None:
    heard: list[tuple[int, int]] = []
    got = download(server.url, sha256=SHA256, on_bytes=lambda done, total: heard.append((done, total)))
    assert got.path.read_bytes() == CONTENT
    assert got.sha256 == SHA256
    assert heard[-1] == (len(CONTENT), len(CONTENT))
    assert download(server.url, sha256=SHA256) == got
    assert len(server.asked) == 1


def test_what_broke_off_goes_on_where_it_stopped(server: FileServer) -> None:
    server.cuts_after = [300_000, 300_000]
    got = download(server.url, sha256=SHA256)
    assert got.path.read_bytes() == CONTENT
    assert server.asked[0] is None
    assert server.asked[1] == "bytes=300000-"
    assert server.asked[2] == "bytes=600000-"


def test_a_later_call_goes_on_too(server: FileServer) -> None:
    server.cuts_after = [1000] * downloads.TRIES
    with pytest.raises(ConfigError, match="next try"):
        download(server.url, sha256=SHA256)
    download(server.url, sha256=SHA256)
    assert server.asked[-1] == "bytes=3000-"


def test_two_that_go_on_with_one_download_fetch_it_once(server: FileServer) -> None:
    server.cuts_after = [1000] * downloads.TRIES
    with pytest.raises(ConfigError):
        download(server.url, sha256=SHA256)
    server.both_ask = threading.Barrier(2, timeout=0.3)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(download, server.url, sha256=SHA256) for _ in range(2)]
        one, other = (each.result() for each in calls)
    assert one == other
    assert one.path.read_bytes() == CONTENT
    assert server.asked[downloads.TRIES :] == ["bytes=3000-"]


def test_a_file_that_changed_meanwhile_is_fetched_anew(server: FileServer) -> None:
    server.cuts_after = [1000] * downloads.TRIES
    with pytest.raises(ConfigError):
        download(server.url)
    server.etag, server.content = '"two"', b"another file, and shorter"
    assert download(server.url).path.read_bytes() == server.content


def test_a_file_with_another_checksum_is_thrown_away(server: FileServer) -> None:
    server.content = CONTENT[:-1] + b"!"
    with pytest.raises(ConfigError, match=f"not {SHA256}"):
        download(server.url, sha256=SHA256)
    server.content = CONTENT
    assert download(server.url, sha256=SHA256).path.read_bytes() == CONTENT


def test_without_a_known_checksum_the_first_download_counts(server: FileServer) -> None:
    got = download(server.url)
    got.path.write_bytes(b"touched")
    with pytest.raises(ConfigError, match="delete it"):
        download(server.url)


def test_a_file_that_was_deleted_is_held_to_its_first_download(server: FileServer) -> None:
    got = download(server.url)
    got.path.unlink()
    assert download(server.url) == got
    got.path.unlink()
    server.content = b"another file"
    with pytest.raises(ConfigError, match=f"{SHA256} .*first") as caught:
        download(server.url)
    (got.path.parent / str(caught.value).rstrip(".").rpartition("/")[2]).unlink()
    assert download(server.url).path.read_bytes() == b"another file"


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_refuses_is_quoted(server: FileServer, status: int) -> None:
    server.status = status
    with pytest.raises(ConfigError, match=f"answered {status}"):
        download(server.url)


def test_nobody_there_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"network.*RLLM_HOME"):
        download("http://127.0.0.1:9/data.jsonl", timeout_s=1.0)


@pytest.mark.parametrize("url", ["http://example.org/a.csv", "ftp://example.org/a.csv", "file:///etc/passwd"])
def test_addresses_that_cannot_be_trusted_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not https"):
        download(url)


def packed(members: dict[str, bytes], link: tuple[str, str] | None = None) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link[0])
            info.type, info.linkname = tarfile.SYMTYPE, link[1]
            archive.addfile(info)
    return data.getvalue()


def test_an_archive_that_another_process_unpacked_meanwhile_is_there(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.content = packed({"top/file.txt": b"text"})
    got = download(server.url)

    def extract_as_another_does(archive: tarfile.TarFile, folder: Path) -> None:
        extract_tar(archive, folder)
        shutil.copytree(folder, folder.with_name(f"{got.path.name}-{got.sha256[:16]}"))

    monkeypatch.setattr(downloads, "extract_tar", extract_as_another_does)
    assert (unpack(got) / "file.txt").read_bytes() == b"text"


def test_an_archive_is_unpacked_beside_its_download(server: FileServer) -> None:
    server.content = packed({"repo-main/task/task.toml": b"", "repo-main/task/instruction.md": b"Do."})
    got = download(server.url)
    folder = unpack(got)
    assert (folder / "task" / "instruction.md").read_bytes() == b"Do."
    assert unpack(got) == folder


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside-of-everything"])
def test_an_archive_that_writes_outside_is_refused(server: FileServer, name: str) -> None:
    server.content = packed({"ok": b"", name: b"bad"})
    got = download(server.url)
    if name.startswith("/"):  # absolute names are taken as relative ones
        assert (unpack(got) / name.lstrip("/")).is_file()
        return
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack(got)


def test_a_link_that_leads_outside_is_refused(server: FileServer) -> None:
    server.content = packed({"ok": b""}, link=("way-out", "../../.."))
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack(download(server.url))
