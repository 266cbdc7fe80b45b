"""A Docker engine that runs nothing: it speaks the API on a unix socket and answers execs from a script.

FakeDocker.answers: list of (what the command holds, ExecAnswer) ──► frames on the hijacked connection
FakeDocker.calls: what was asked, in order ; FakeDocker.containers: what exists
"""

import json
import socketserver
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(kw_only=True, slots=True)
class ExecAnswer:
    """What one command in the container comes to."""

    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int = 0
    hangs: bool = False
    echoes_stdin: bool = False


@dataclass(kw_only=True, slots=True)
class Container:
    body: dict[str, Any]
    running: bool = False


@dataclass(slots=True)
class FakeDocker:
    path: Path
    images: set[str] = field(default_factory=lambda: {"python:3.11-slim"})
    answers: list[tuple[str, ExecAnswer]] = field(default_factory=list)
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    containers: dict[str, Container] = field(default_factory=dict)
    execs: dict[str, dict[str, Any]] = field(default_factory=dict)
    stdin: dict[str, bytes] = field(default_factory=dict)
    """Command -> what it was sent."""
    holds_limits: bool = True
    """Whether a container sees its limits in its cgroup."""

    def on(self, part: str, **answer: Any) -> None:
        """What a command with `part` in it comes to: ExecAnswer's fields. The first that fits counts."""
        self.answers.append((part, ExecAnswer(**answer)))

    def commands(self) -> list[list[str]]:
        return [body["Cmd"] for _, path, body in self.calls if path.endswith("/exec")]

    def answer_to(self, command: list[str]) -> ExecAnswer:
        whole = "\n".join(command)
        found = next((answer for part, answer in self.answers if part in whole), None)
        if found is None and "pids.max" in whole and self.holds_limits:
            host = list(self.containers.values())[-1].body["HostConfig"]
            return ExecAnswer(stdout=f"{host['Memory']}\n{host['PidsLimit']}\n".encode())
        return found or ExecAnswer()

    def serve(self) -> "Server":
        server = Server(str(self.path), Handler)
        server.fake = self
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    fake: FakeDocker


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_DELETE(self) -> None:
        self._handle("DELETE")

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def address_string(self) -> str:
        return "unix"

    def _handle(self, method: str) -> None:
        fake = self.server.fake
        parts = urlsplit(self.path)
        assert parts.path.startswith("/v1.41/")
        path = parts.path.removeprefix("/v1.41")
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        fake.calls.append((method, path, body))
        words = path.strip("/").split("/")
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        match method, words:
            case "GET", ["version"]:
                self._say(200, {"ApiVersion": "1.41"})
            case "GET", ["containers", "json"]:
                assert json.loads(query["filters"]) == {"label": ["rllm.sandbox.owner"]}
                listed = [{"Id": key, "Labels": c.body["Labels"]} for key, c in fake.containers.items()]
                self._say(200, listed)
            case "POST", ["containers", "create"]:
                if body["Image"] not in fake.images:
                    self._say(404, {"message": f"No such image: {body['Image']}"})
                    return
                key = f"c{len(fake.calls)}"
                fake.containers[key] = Container(body=body)
                self._say(201, {"Id": key, "Warnings": []})
            case "POST", ["containers", key, "start"]:
                fake.containers[key].running = True
                self._say(204)
            case "POST", ["containers", key, "update"]:
                self._say(200, {"Warnings": None})
            case "POST", ["containers", key, "attach"]:
                self._upgrade()
                while self.connection.recv(4096):
                    pass
                fake.containers.pop(key, None)  # its stdin has ended, so it has, and AutoRemove
            case "GET", ["containers", key, "json"]:
                found = fake.containers.get(key)
                if found is None:
                    self._say(404, {"message": f"No such container: {key}"})
                else:
                    self._say(200, {"State": {"Running": found.running}})
            case "DELETE", ["containers", key]:
                self._say(404, {"message": "gone"}) if fake.containers.pop(key, None) is None else self._say(
                    204
                )
            case "POST", ["containers", key, "exec"]:
                made = f"e{len(fake.calls)}"
                fake.execs[made] = body
                self._say(201, {"Id": made})
            case "POST", ["exec", made, "start"]:
                self._run(fake.execs[made]["Cmd"])
            case "GET", ["exec", made, "json"]:
                asked = sum(path == f"/exec/{made}/json" for _, path, _ in fake.calls)
                ended = {"Running": False, "ExitCode": fake.answer_to(fake.execs[made]["Cmd"]).exit_code}
                self._say(200, {"Running": True, "ExitCode": None} if asked == 1 else ended)
            case _:
                self._say(400, {"message": f"the fake does not know {method} {path}"})

    def _run(self, command: list[str]) -> None:
        answer = self.server.fake.answer_to(command)
        self._upgrade()
        sent = b""
        while block := self.connection.recv(65536):
            sent += block
        self.server.fake.stdin[command[-1]] = sent
        if answer.hangs:
            self.connection.settimeout(30)
            time.sleep(2)
            return
        for number, content in ((1, answer.stdout), (2, answer.stderr), (1, sent * answer.echoes_stdin)):
            for begin in range(0, len(content), 1000):
                piece = content[begin : begin + 1000]
                try:
                    self.connection.sendall(struct.pack(">BxxxI", number, len(piece)) + piece)
                except BrokenPipeError:
                    return

    def _upgrade(self) -> None:
        self.connection.sendall(
            b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
            b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        self.close_connection = True

    def _say(self, status: int, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if data:
            self.wfile.write(data)
