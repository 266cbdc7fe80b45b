"""The few calls of the Docker Engine API that a sandbox needs, over its unix socket.

    call ── HTTP/1.1 on a socket of its own ──► engine ──► JSON
    stream ── the same, "Upgrade: tcp" ──► raw bytes both ways; output in frames: stream number, length, bytes

Reference: docs.docker.com/reference/api/engine, version 1.41 (Docker 20.10) and newer.
"""

import contextlib
import http.client
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rllm.errors import ConfigError, SandboxError

VERSION = "v1.41"
CALL_S = 60.0
"""The time in which the engine has to answer a call."""
SOCKETS = ("/var/run/docker.sock", "~/.docker/run/docker.sock")
STDOUT, STDERR = 1, 2


class DockerError(SandboxError):
    """Raised for an answer of 400 or above; `status` is that number."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class DockerApi:
    """One engine. Every call opens a connection of its own, so threads may share this."""

    def __init__(self, path: str) -> None:
        self.path = path

    def call(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """The decoded answer, None where it is empty. Raises DockerError, and SandboxError without an
        answer."""
        connection = _UnixConnection(self.path, CALL_S)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(
                method, _url(path, query), json.dumps(body) if body is not None else None, headers
            )
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise SandboxError(f"Docker at {self.path} did not answer {method} {path}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise DockerError(_complaint(data, method, path, answer.status), answer.status)
        return json.loads(data) if data.strip() else None

    def stream(self, path: str, body: Any = None, **query: str) -> "Stream":
        """Start a call whose connection becomes a stream."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CALL_S)
        payload = json.dumps(body or {}).encode()
        head = (
            f"POST {_url(path, query)} HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
            f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        try:
            connection.connect(self.path)
            connection.sendall(head.encode() + payload)
            status, rest = _read_head(connection)
        except OSError as error:
            connection.close()
            raise SandboxError(f"Docker at {self.path} did not answer POST {path}: {error}") from error
        if status not in (101, 200):
            connection.close()
            raise DockerError(_complaint(rest, "POST", path, status), status)
        return Stream(connection, rest)


class Stream:
    """Bytes to a process in a container, and frames back."""

    def __init__(self, connection: socket.socket, rest: bytes) -> None:
        self._connection = connection
        self._buffer = bytearray(rest)

    def frames(self, stdin: bytes, deadline_s: float) -> Iterator[tuple[int, bytes]]:
        """Send `stdin` and its end while reading (stream number, content) until the other side ends.

        Raises TimeoutError at `deadline_s` of the monotonic clock.
        """
        # Both directions at the same time: a program may write
        # much before it reads, and would wait for its reader.
        self._connection.setblocking(False)
        rest = memoryview(stdin)
        self._end_stdin(rest)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            poll = select.poll()  # `select` takes no descriptor above 1023
            poll.register(self._connection, select.POLLIN | (select.POLLOUT if rest else 0))
            events = sum(each for _, each in poll.poll(left_s * 1000))
            if rest and events & ~select.POLLIN:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    rest = rest[self._connection.send(rest[:65536]) :]
                    self._end_stdin(rest)
            if events & ~select.POLLOUT:
                try:
                    block = self._connection.recv(65536)
                except ConnectionResetError:
                    return  # it ended without reading all of its stdin
                if not block:
                    return
                self._buffer += block
                yield from self._whole_frames()

    def _end_stdin(self, rest: memoryview) -> None:
        if not rest:
            with contextlib.suppress(OSError):  # the program did not wait for it
                self._connection.shutdown(socket.SHUT_WR)

    def _whole_frames(self) -> Iterator[tuple[int, bytes]]:
        while len(self._buffer) >= 8:
            number, length = struct.unpack(">BxxxI", self._buffer[:8])
            if len(self._buffer) < 8 + length:
                return
            yield number, bytes(self._buffer[8 : 8 + length])
            del self._buffer[: 8 + length]

    def close(self) -> None:
        self._connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("docker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def engine() -> DockerApi:
    """The engine of this machine. Raises ConfigError where none answers, with how to get one."""
    docker_host = os.environ.get("DOCKER_HOST", "")
    if docker_host and not docker_host.startswith("unix://"):
        raise ConfigError(
            f"DOCKER_HOST is `{docker_host}`; sandboxes use an engine on a unix socket: unix:///PATH."
        )
    paths = (
        [docker_host.removeprefix("unix://")]
        if docker_host
        else [str(Path(path).expanduser()) for path in SOCKETS]
    )
    for path in paths:
        try:
            DockerApi(path).call("GET", "/version")
        except SandboxError:
            continue
        return DockerApi(path)
    raise ConfigError(
        f"Sandbox backend `docker` cannot be used here: no engine answers at {' or '.join(paths)}. Install "
        "and start one (docs.docker.com/engine/install) or set DOCKER_HOST. Nothing weaker is used instead."
    )


def _url(path: str, query: dict[str, str]) -> str:
    return f"/{VERSION}{path}" + (f"?{urlencode(query)}" if query else "")


def _complaint(data: bytes, method: str, path: str, status: int) -> str:
    try:
        message = json.loads(data)["message"]
    except (ValueError, KeyError, TypeError):
        message = data[:500].decode(errors="replace")
    return f"Docker answered {status} to {method} {path}: {message}"


def _read_head(connection: socket.socket) -> tuple[int, bytes]:
    """The status number of an answer, and what came after its head."""
    data = bytearray()
    while b"\r\n\r\n" not in data:
        block = connection.recv(4096)
        if not block or len(data) > 65536:
            raise ConnectionError("the answer broke off")
        data += block
    head, _, rest = bytes(data).partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), rest
