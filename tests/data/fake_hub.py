"""A hub of our own that speaks as much of the real one's protocol as huggingface_hub's client needs.

    GET  /api/datasets/REPO/revision/REVISION        what files there are, with checksums
    GET  /api/models/REPO/revision/REVISION          the same of a model, whose files are at /REPO/resolve/…
    POST /api/repos/create, …/preupload/…, …/commit/… with the token hf_writer: a repository is filled
    HEAD /datasets/REPO/resolve/COMMIT/PATH          size and tag
    GET  the same                                    the bytes, from the Range that was asked for

Anything else is answered by 404.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Data sets by name: path -> bytes."""

    def __init__(self, repos: dict[str, dict[str, bytes]], gated: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.gated = gated
        self.lies_about: set[str] = set()
        """Paths that are served with other bytes than the checksum is of."""
        self.cuts_after: list[int] = []
        self.served: list[tuple[str, str | None]] = []
        """(path, Range) of every file that was asked for."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(("/api/datasets/", "/api/models/")):
            self._info(path.split("/", 3)[3])
        else:
            self._file(with_body=True)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != "Bearer hf_writer":
            self._refuse(401, "")
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.server.repos.setdefault(name, {})
            self._answer(json.dumps({"url": f"{self.server.endpoint}/{name}"}).encode())
        elif "/preupload/" in path:
            files = [{**file, "uploadMode": "regular"} for file in json.loads(body)["files"]]
            answer = [{name: file[name] for name in ("path", "uploadMode")} for file in files]
            self._answer(json.dumps({"files": [{**file, "shouldIgnore": False} for file in answer]}).encode())
        elif "/commit/" in path:
            repo = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.repos[repo][line["value"]["path"]] = content
            url = f"{self.server.endpoint}/{repo}/commit/{COMMIT}"
            self._answer(json.dumps({"commitUrl": url, "commitOid": COMMIT, "success": True}).encode())
        else:
            self._answer(json.dumps({"errors": [], "warnings": []}).encode())  # of a card's settings

    def _info(self, path: str) -> None:
        repo, _, revision = path.partition("/revision/")
        files = self.server.repos.get(repo)
        if files is None:
            self._refuse(404, "RepoNotFound")
        elif revision not in ("refs/convert/parquet", "refs/pr/1", "main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            siblings = [_entry(name, content) for name, content in files.items()]
            self._answer(json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

    def _file(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix("/datasets/").removeprefix("/")
        repo, _, rest = path.partition("/resolve/")
        name = rest.partition("/")[2]
        if repo in self.server.gated:
            self._refuse(403, "GatedRepo")
            return
        content = self.server.repos[repo][name]
        entry = _entry(name, content)
        if name in self.server.lies_about:
            content = content[:-1] + b"?"
        asked = self.headers.get("Range")
        begin = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        if with_body:
            self.server.served.append((name, asked))
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{entry.get("lfs", {}).get("sha256") or entry["blobId"]}"')
        self.send_header("Content-Length", str(len(content) - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body:
            cut = self.server.cuts_after.pop(0) if self.server.cuts_after else len(content)
            self.wfile.write(content[begin : begin + cut])
        self.close_connection = True

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def _entry(name: str, content: bytes) -> dict[str, object]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
    if name.endswith((".parquet", ".safetensors")):
        entry["lfs"] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 134,
        }
    return entry
