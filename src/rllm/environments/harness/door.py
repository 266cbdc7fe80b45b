"""The only way out of a harness's sandbox: to its own session of the gateway.

    program inside ──► 127.0.0.1:PORT ──► Door ──► the gateway     where the path is that session's, once a
                                                                   connection: no other comes behind it
                   ──► proxy or another path ──► refused, and remembered
                   ──► 127.0.0.1:53 ──► "there is no such name", and remembered
    the gateway ──► 403, its budget is used up ──► a few seconds to end by itself, then it is stopped
    its own time is up, model calls not counted ──► it is stopped

The sandbox has a network of its own with nothing but a loopback in it. The two sockets are made in there and
answered here, so nothing has to run inside, and an address that is not this door's is one that nobody has.
"""

import asyncio
import json
import threading
from contextlib import nullcontext, suppress
from typing import Self, cast
from urllib.parse import urlsplit

from rllm.sandbox.base import Sandbox
from rllm.types.episode_clock import EpisodeClock, EpisodeLimits

PORT = 61001
"""Above those that Linux gives to outgoing connections."""
_DNS_PORT = 53
_MAX_REMEMBERED = 20
_LONGEST_LINE = 16 << 10
_REFUSAL = b"This sandbox reaches its own model and nothing else.\n"
_FORBIDDEN = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_REFUSAL), _REFUSAL)
)
_REFUSES = b"HTTP/1.1 4"
_FORBIDS, _FOR_GOOD = b"HTTP/1.1 403 ", b"x-should-retry: false"
"""The first line of the gateway's answer when the session has nothing left, and a header that no other has: a
server behind it may forbid a call as well."""
_CALLS = (b"/completions", b"/responses", b"/messages")
"""The ends of paths that ask the model; others count tokens or list models."""
END_S = 10.0
"""The time that a program then has to end by itself."""
_CLOSE = b"Connection: close\r\n"
"""The first header of every request: whatever others say, the gateway answers once and reads no further."""
_NO_SUCH_NAME = b"\x81\x83"


class Door:
    """Answers one sandbox while it is open; `with Door(sandbox, base_url) as door`."""

    def __init__(self, sandbox: Sandbox, base_url: str, *, work_s: float | None = None) -> None:
        """`base_url` is the session's, as programs on this machine get it. `work_s`: what the program may
        take for itself, from now on."""
        self._sandbox = sandbox
        self._work_s = work_s
        self.is_out_of_time = False
        """Whether it was stopped because it had worked for so long."""
        there = urlsplit(base_url)
        assert there.hostname is not None, "a gateway says where it listens"
        assert there.port is not None, "and at which port"
        self._gateway = (there.hostname, there.port)
        self._session_path = there.path.removesuffix("/v1").encode()
        self.root_url = f"http://127.0.0.1:{PORT}{there.path.removesuffix('/v1')}"
        """The address of the session, as programs inside reach it."""
        self.refused_places: list[str] = []
        """Hosts and paths that were asked for and are not the session's; each once, the first ones."""
        self.num_calls = 0
        """The number of model calls, by the paths of the four protocols."""
        self.num_refused_calls = 0
        """The number of those that were answered with an error of theirs, as a prompt that is too long is."""
        self.first_refusal = ""
        """The message of the first of those errors."""
        self._last_refusal: asyncio.TimerHandle | None = None
        self._calls = sandbox.listen(PORT)
        try:
            self._names = sandbox.listen(_DNS_PORT, datagrams=True)
        except BaseException:
            self._calls.close()
            raise
        self._is_serving, self._loop = threading.Event(), asyncio.new_event_loop()
        self._failure: Exception | None = None
        """The error for which it never served."""
        self._thread = threading.Thread(target=self._work, name="rllm-door", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_serving.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _work(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            if self._is_serving.is_set():
                raise
            self._calls.close()
            self._names.close()
            self._failure = error
            self._is_serving.set()  # who opens the door waits for it

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._calls.setblocking(False)
        self._names.setblocking(False)
        transport, _ = await loop.create_datagram_endpoint(lambda: _Names(self), sock=self._names)
        server = await asyncio.start_server(self._serve_connection, sock=self._calls, limit=_LONGEST_LINE)
        self._clock = EpisodeClock(EpisodeLimits(work_s=self._work_s))
        self._clock.begin(self._end_work)
        self._is_serving.set()
        await self._stop.wait()
        self._clock.stop()
        if self._last_refusal is not None:
            self._last_refusal.cancel()
        transport.close()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readuntil(b"\r\n")
            target = line.split(b" ")[1] if line.count(b" ") == 2 else b""
            if not self._is_session(target) or not line.endswith(b" HTTP/1.1\r\n"):
                self.remember(_host_of(target))
                writer.write(_FORBIDDEN)
                await writer.drain()
                return
            their_reader, their_writer = await asyncio.open_connection(*self._gateway)
            try:
                is_call = line.startswith(b"POST ") and target.partition(b"?")[0].endswith(_CALLS)
                self.num_calls += is_call
                their_writer.write(line + _CLOSE)
                with self._clock.call() if is_call else nullcontext():
                    await asyncio.gather(
                        _pump(reader, their_writer), self._answer(their_reader, writer, is_call)
                    )
            finally:
                their_writer.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # one of the two is gone, and with it the connection; who was there is told by its end
        finally:
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_call: bool
    ) -> None:
        start = await reader.read(65536)
        if start.startswith(_REFUSES):
            start += await reader.read()  # all of it: an error is short, and the gateway ends after it
            self.num_refused_calls += is_call
            if is_call:
                self.first_refusal = self.first_refusal or _error_message(start)
        is_over = start.startswith(_FORBIDS) and _FOR_GOOD in start.partition(b"\r\n\r\n")[0].lower()
        if is_over and self._last_refusal is None:
            self._last_refusal = asyncio.get_running_loop().call_later(END_S, self._sandbox.stop)
        writer.write(start)
        await _pump(reader, writer)

    def _end_work(self) -> None:
        self.is_out_of_time = True
        self._sandbox.stop()

    def _is_session(self, target: bytes) -> bool:
        rest = target.removeprefix(self._session_path)
        # The next character ends the name, else a longer session's
        # name would pass; `..` could lead to another one.
        return len(rest) < len(target) and (not rest or rest[:1] in (b"/", b"?")) and b".." not in rest

    def remember(self, place: str) -> None:
        if place not in self.refused_places and len(self.refused_places) < _MAX_REMEMBERED:
            self.refused_places.append(place)


class _Names(asyncio.DatagramProtocol):
    """Knows no name."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(data) < 13:
            return
        self._door.remember(_queried_name(data))
        self._transport.sendto(data[:2] + _NO_SUCH_NAME + data[4:], addr)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hand on what comes, until it ends; the other direction may go on."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()


def _error_message(response: bytes) -> str:
    """The message of an error as OpenAI's and Anthropic's servers write it, or the body as it is."""
    body = response.partition(b"\r\n\r\n")[2]
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", errors="replace")


def _host_of(target: bytes) -> str:
    """`api.example.com:443` of `CONNECT api.example.com:443`, the host of a proxied address, or the path."""
    text = target.decode("latin-1")
    return (urlsplit(text).netloc if "://" in text else text)[:200] or "(no HTTP)"


def _queried_name(query: bytes) -> str:
    """The first name that a DNS message asks for (RFC 1035, 4.1.2)."""
    labels: list[str] = []
    place = 12
    while place < len(query) and 0 < query[place] < 64:
        labels.append(query[place + 1 : place + 1 + query[place]].decode("latin-1"))
        place += 1 + query[place]
    return ".".join(labels)[:200] or "(no name)"
