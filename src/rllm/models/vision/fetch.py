"""Images at addresses of the net ──► images in the messages themselves, where a user has named the hosts.

    url ──► http or https, a host and port that are allowed? ──► its addresses, each of them public?
              ▲                                                    └──► one of these, and no other
              └── 301, 302, 303, 307, 308 ◄── GET, within a time, without the machine's proxy or cookies
                                               └── 200, an image's type, at most so many bytes ──► ImageFile

A message could otherwise have this machine call any other. A name is resolved once for each request, and the
connection goes to the address that was looked at, so that a name that changes its mind leads nowhere else.
"""

import asyncio
import hashlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from rllm.errors import ConfigError
from rllm.files.atomic import write_atomic
from rllm.models.vision.pillow import require_decodable, require_pillow
from rllm.rendering.images import MAX_BYTES, MAX_PER_MESSAGE, MAX_REQUEST_BYTES, as_data_url, image_of
from rllm.types.addresses import Address, addresses_of_name, host_of, public_addresses
from rllm.types.content import is_image_part, source_of, with_source
from rllm.types.images import ImageFile
from rllm.types.messages import Message

TIMEOUT_S = 10.0
"""The time for one image, from its name to its last byte, redirects included."""
MAX_REDIRECTS = 3
MAX_URL_CHARS = 2000
MAX_AT_ONCE = 8
"""Images that are fetched at the same time; others wait."""
MAX_ADDRESSES = 256
"""Addresses of images in one request, or in one row."""
MAX_KEPT_BYTES = 256 << 20
"""Images that are kept in memory, so that a conversation that shows one again has the same."""
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Network:
    """The two things that are asked of the net."""

    resolve: Callable[[str], Sequence[Address]] = addresses_of_name
    """The addresses of a name; none where nobody knows it."""
    connect: Callable[[str, int, float], socket.socket] = lambda address, port, timeout_s: (
        socket.create_connection((address, port), timeout_s)
    )
    """A connection to an address and port, within a time in seconds."""


class ImageFetcher:
    """Fetches images from the hosts that a user has named. Safe from several threads."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        network: Network | None = None,
        timeout_s: float = TIMEOUT_S,
        album: Path | None = None,
    ) -> None:
        """`hosts`: such as `images.example.org`, for ports 80 and 443, or `images.example.org:8443`.

        `album`: a directory with what was fetched, by hash; what it has is not fetched again.

        Raises ConfigError for what is no host of the public net.
        """
        require_pillow()
        self.hosts = frozenset(map(_allowed_host, hosts))
        self._network = network or Network()
        self._timeout_s = timeout_s
        self._album = None if album is None else _Album(album)
        self._lock = threading.Lock()
        self._images: OrderedDict[tuple[str, str], ImageFile] = OrderedDict()
        self._coming: dict[tuple[str, str], Future[ImageFile]] = {}
        self._num_bytes = 0
        self._pool = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="rllm-images")

    async def inline_soon(self, messages: Sequence[Message], scope: str) -> list[Message]:
        """The messages with images in place of their addresses; see `inline`."""
        loop = asyncio.get_running_loop()
        work = [loop.run_in_executor(self._pool, self._image, url, scope) for url in _addresses_in(messages)]
        if not work:
            return list(messages)
        try:
            images = await asyncio.gather(*work)
        finally:
            for each in work:
                each.cancel()
        return await loop.run_in_executor(self._pool, _with_images, messages, images)

    def inline(self, messages: Sequence[Message], scope: str = "") -> list[Message]:
        """The messages with images in place of their addresses. Within one `scope` an address is one image,
        as long as memory lasts.

        Raises ConfigError naming the address and the reason.
        """
        return _with_images(messages, [self._image(url, scope) for url in _addresses_in(messages)])

    def fetch(self, url: str) -> ImageFile:
        """The image at an address. Raises ConfigError naming the address and the reason."""
        ends_s = time.monotonic() + self._timeout_s
        place = url
        try:
            for _ in range(MAX_REDIRECTS + 1):
                answer = self._ask(place, ends_s)
                if isinstance(answer, ImageFile):
                    require_decodable(answer)
                    return answer
                place = answer
            raise ConfigError(f"it is redirected more than {MAX_REDIRECTS} times")
        except ConfigError as error:
            at = "" if place == url else f", which leads to {place:.80},"
            raise ConfigError(f"The image at {url:.80}{at} is not fetched: {error}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            late = f" within {self._timeout_s:g} s" if time.monotonic() >= ends_s else ""
            raise ConfigError(f"The image at {url:.80} could not be read{late}: {error!r:.200}") from error

    def close(self) -> None:
        """Fetch nothing more; nobody waits for what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- one image -----------------------------------------------------------------------------------------

    def _image(self, url: str, scope: str) -> ImageFile:
        """The image at an address; one of several threads that want it at once fetches it."""
        key = (scope, url)
        with self._lock:
            if (image := self._images.get(key)) is not None:
                self._images.move_to_end(key)
                return image
            is_first = key not in self._coming
            future = self._coming.setdefault(key, Future[ImageFile]())
        if not is_first:
            return future.result()
        try:
            image = self._from_album_or_net(url)
        except BaseException as error:
            with self._lock:
                # Before the error is told: whoever asks from here on tries again.
                del self._coming[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._coming[key]
            self._images[key] = image
            self._num_bytes += len(image.data)
            while self._num_bytes > MAX_KEPT_BYTES and len(self._images) > 1:
                _, oldest = self._images.popitem(last=False)
                self._num_bytes -= len(oldest.data)
        future.set_result(image)
        return image

    def _from_album_or_net(self, url: str) -> ImageFile:
        if self._album is None:
            return self.fetch(url)
        image = self._album.get(url)
        if image is None:
            image = self.fetch(url)
            self._album.add(url, image)
        return image

    def _ask(self, url: str, ends_s: float) -> ImageFile | str:
        """The image, or the address that another one is at."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or len(url) > MAX_URL_CHARS or not url.isprintable() or " " in url:
            raise ConfigError(
                f"an address begins with http:// or https:// and has at most {MAX_URL_CHARS} characters"
            )
        host, port = host_of(url), parts.port or _PORTS[parts.scheme]
        if (host, port) not in self.hosts and not (port in _PORTS.values() and (host, 0) in self.hosts):
            raise ConfigError(f"{host}:{port} is none of the hosts that are allowed")
        # `%` stays as it is: what an address has quoted is not quoted twice.
        path = quote(parts.path or "/", safe="/%:=&?~+!$,;'@()*") + (
            f"?{quote(parts.query, safe='/%:=&?~+!$,;@()*')}" if parts.query else ""
        )
        with self._connection(parts.scheme, host, port, ends_s) as connection:
            connection.request(
                "GET", path, headers={"Accept": ", ".join(_TYPES), "Accept-Encoding": "identity"}
            )
            with connection.getresponse() as response:
                if response.status in _REDIRECTS and (location := response.headers.get("Location")):
                    return urljoin(url, location)
                return _image_in(response, ends_s)

    @contextmanager
    def _connection(
        self, scheme: str, host: str, port: int, ends_s: float
    ) -> Iterator[http.client.HTTPConnection]:
        """To an address of the host that was looked at. However slowly it answers, it is cut at the end."""
        addresses = public_addresses(host, lambda name: self._resolve(name, ends_s))
        if not addresses:
            raise ConfigError(f"{host} is not known here")
        channel = _connect(self._network, addresses, port, ends_s)
        # A limit for each read would let a server take as many of them as it likes.
        to_cut = [channel]
        timer = threading.Timer(max(0.0, ends_s - time.monotonic()), _cut, to_cut)
        timer.daemon = True
        timer.start()
        connection = http.client.HTTPConnection(host, port)
        # So the Host header names a port only where it is not the usual one.
        connection.default_port = _PORTS[scheme]
        try:
            if scheme == "https":
                # The plain socket gives its descriptor away here, so the timer gets the new one before the
                # handshake, which may wait as well.
                to_cut[0] = channel = _tls_context().wrap_socket(
                    channel, server_hostname=host, do_handshake_on_connect=False
                )
                channel.do_handshake()
            # With a socket of its own it neither resolves the name again nor connects to another address.
            connection.sock = channel
            yield connection
        finally:
            timer.cancel()
            connection.close()
            channel.close()

    def _resolve(self, host: str, ends_s: float) -> list[Address]:
        """In a thread of its own, because nothing ends the resolver of the system."""
        answers: list[list[Address]] = []
        thread = threading.Thread(
            target=lambda: answers.append(list(self._network.resolve(host))), name="rllm-resolve", daemon=True
        )
        thread.start()
        thread.join(max(0.0, ends_s - time.monotonic()))
        if not answers:
            raise TimeoutError(f"{host} was not resolved")
        return answers[0]


def _image_in(response: http.client.HTTPResponse, ends_s: float) -> ImageFile:
    media_type = response.headers.get_content_type() if "Content-Type" in response.headers else "none"
    if response.status != 200:
        raise ConfigError(f"the server answers with {response.status}")
    if media_type not in _TYPES:
        raise ConfigError(f"its type is {media_type:.40}; it must be one of {', '.join(_TYPES)}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ConfigError("the server packed it, which nobody asked for")
    if response.length is not None and response.length > MAX_BYTES:
        raise ConfigError(f"it has {response.length:,} bytes; at most {MAX_BYTES:,} are read")
    length, data = response.length, bytearray()
    while part := response.read1(_CHUNK_BYTES):
        data += part
        if len(data) > MAX_BYTES:
            raise ConfigError(f"it has more than the {MAX_BYTES:,} bytes that are read")
    if time.monotonic() >= ends_s:  # the connection was cut, which looks like an end
        raise TimeoutError("it took too long")
    if length is not None and len(data) < length:
        raise ConfigError(f"it ended after {len(data):,} of {length:,} bytes")
    return image_of(as_data_url(ImageFile(bytes(data), media_type)))


def _connect(network: Network, addresses: Sequence[Address], port: int, ends_s: float) -> socket.socket:
    """A connection to the first of the addresses that answers."""
    for place, address in enumerate(addresses):
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no time is left to connect")
        try:
            return network.connect(str(address), port, left_s / (len(addresses) - place))
        except OSError:
            if place == len(addresses) - 1:
                raise
    raise AssertionError("the last address returns or raises")


def _cut(channel: socket.socket) -> None:
    # Not the method of a TLS socket, which would go on in plain text.
    with suppress(OSError):
        socket.socket.shutdown(channel, socket.SHUT_RDWR)


@cache
def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _allowed_host(text: str) -> tuple[str, int]:
    """(host, port), 0 for the usual ports. Raises ConfigError for what is no host of the public net."""
    mend = "write hosts such as images.example.org, or images.example.org:8443"
    try:
        parts = urlsplit(f"//{text}")
        host, port = host_of(f"http://{text}"), parts.port or 0
        if parts.netloc != text or "*" in text or any(each.isspace() for each in text):
            raise ConfigError("it has more than a host and a port")
        public_addresses(host, lambda name: ())
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{text!r:.80} is no host to fetch from ({error}); {mend}.") from error
    return host, port


def _remote(part: Any) -> str:
    """The address of an image part that is somewhere else; empty for any other part."""
    url = source_of(part) if is_image_part(part) else ""
    return url if url.lower().startswith(("http:", "https:")) else ""


def _addresses_in(messages: Sequence[Message]) -> list[str]:
    """In their order, as often as they are there. Raises ConfigError for more than a message may have."""
    urls: list[str] = []
    for message in messages:
        content = message.get("content")
        own = [url for part in content if (url := _remote(part))] if isinstance(content, list) else []
        if len(own) > MAX_PER_MESSAGE:
            raise ConfigError(f"A message has {len(own)} images; at most {MAX_PER_MESSAGE} are read.")
        urls += own
    if len(urls) > MAX_ADDRESSES:
        raise ConfigError(f"There are {len(urls)} addresses of images; at most {MAX_ADDRESSES} are fetched.")
    return urls


def _with_images(messages: Sequence[Message], images: Sequence[ImageFile]) -> list[Message]:
    if (size := sum(len(each.data) * 4 // 3 for each in images)) > MAX_REQUEST_BYTES:
        raise ConfigError(
            f"Images that were fetched have {size:,} bytes as text; at most {MAX_REQUEST_BYTES:,} are read "
            "with one request."
        )
    left = iter(images)

    def with_image(part: Any) -> Any:
        return with_source(part, as_data_url(next(left))) if _remote(part) else part

    return [
        {**message, "content": [with_image(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


class _Album:
    """Images on disk: `SHA256` is one, a line of `addresses.jsonl` says at which address it was."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._entries: dict[str, Mapping[str, str]] = {}
        index = directory / "addresses.jsonl"
        if index.is_file():
            for line in index.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # the last line of a killed run
                    entry = json.loads(line)
                    self._entries[entry["url"]] = entry

    def get(self, url: str) -> ImageFile | None:
        entry = self._entries.get(url)
        if entry is None:
            return None
        data = (self._directory / entry["sha256"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ConfigError(f"{self._directory / entry['sha256']} is not what was fetched; put it back.")
        return ImageFile(data, entry["type"])

    def add(self, url: str, image: ImageFile) -> None:
        entry = {"url": url, "sha256": image.sha256, "type": image.media_type}
        with self._lock:
            self._directory.mkdir(exist_ok=True)
            write_atomic(self._directory / image.sha256, image.data)
            with (self._directory / "addresses.jsonl").open("a", encoding="utf-8") as index:
                index.write(f"\n{json.dumps(entry)}")  # not behind the torn line of a killed run
            self._entries[url] = entry
