"""A real HTTP server of pictures, good ones and hostile ones, and a net in which it has a public address."""

import datetime
import ipaddress
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from rllm.models.vision.fetch import Network
from rllm.types.addresses import Address

PUBLIC = "93.184.216.34"
HOST = "images.example.org"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        site: ImageServer = self.server.site
        site.requests.append((self.headers["Host"], self.path))
        path, _, query = self.path.partition("?")
        name = path.strip("/")
        if name in site.files:
            self._whole(site.files[name], "image/png")
        elif name == "to":
            self.send_response(302)
            self.send_header("Location", query)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            getattr(self, f"_{name}")()

    def _whole(self, data: bytes, kind: str, **headers: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", headers.pop("length", str(len(data))))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def _page(self) -> None:
        self._whole(b"<html>", "text/html")

    def _lie(self) -> None:
        self._whole(b"<html>", "image/png")

    def _missing(self) -> None:
        self.send_error(404)

    def _short(self) -> None:
        self._whole(self.server.site.picture, "image/png", length="999999")
        self.close_connection = True

    def _packed(self) -> None:
        self._whole(zlib.compress(bytes(1 << 20)), "image/png", Content_Encoding="deflate")

    def _large(self) -> None:
        self._whole(b"", "image/png", length=str(1 << 40))
        self.close_connection = True

    def _endless(self) -> None:
        """Chunks for ever, as fast as they are taken."""
        self._begin_chunks()
        while True:
            self.wfile.write(b"%x\r\n%b\r\n" % (1 << 16, bytes(1 << 16)))

    def _trickle(self) -> None:
        """A byte now and then: no single wait is long."""
        self._begin_chunks()
        while True:
            self.wfile.write(b"1\r\n\x89\r\n")
            self.wfile.flush()
            time.sleep(0.02)

    def _headers(self) -> None:
        """A head that never ends."""
        while True:
            self.wfile.write(b"X")
            self.wfile.flush()
            time.sleep(0.02)

    def _hangs(self) -> None:
        self.server.site.ended.wait(20)

    def _begin_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()


def certificate(directory: Path, host: str) -> Path:
    """A key and a certificate of that host, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = directory / f"{host}.pem"
    plain = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(key.private_bytes(*plain) + signed.public_bytes(Encoding.PEM))
    return path


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what is tested."""


@dataclass
class ImageServer:
    """Names of its `network` resolve as `names` says, and the public address there is this server."""

    picture: bytes
    files: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """Answers of the resolver, one after another; the last one again and again."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    connected: list[tuple[str, int]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    tls: ssl.SSLContext | None = None
    """It speaks HTTPS alone, where there is one."""
    default_names: ClassVar[dict[str, Sequence[Sequence[str]]]] = {HOST: [[PUBLIC]]}

    def __post_init__(self) -> None:
        self.files.setdefault("a.png", self.picture)
        self.names = {**self.default_names, **self.names}
        self._num_resolved: dict[str, int] = {}

    def __enter__(self) -> "ImageServer":
        self._server = _Server(("127.0.0.1", 0), _Handler)
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._server.site = self  # pyright: ignore[reportAttributeAccessIssue]
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def network(self) -> Network:
        return Network(lambda host: self.resolve(host), self.connect)

    def resolve(self, host: str) -> list[Address]:
        answers = self.names.get(host, [[]])
        number = self._num_resolved[host] = self._num_resolved.get(host, 0) + 1
        return [ipaddress.ip_address(each) for each in answers[min(number, len(answers)) - 1]]

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        self.connected.append((address, port))
        return socket.create_connection(("127.0.0.1", self._server.server_port), timeout_s)
