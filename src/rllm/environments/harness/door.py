"""The only way out of a harness's sandbox: to its own session of the gateway.

    program inside ──► 127.0.0.1:PORT ──► Door ──► the gateway     where the path is that session's, once a
                                                                   connection: no other comes behind it
                   ──► proxy or another path ──► refused, and remembered
                   ──► 127.0.0.1:53 ──► "there is no such name", and remembered
    the gateway ──► 403, its budget is used up ──► a few seconds to end by itself, then it is stopped
    its own time is up, model calls not counted ──► it is stopped
    more connections than its share, or faster than PER_S ──► they wait inside; slow ones are closed

The sandbox has a network of its own with nothing but a loopback in it. The two sockets are made in there and
answered here, so nothing has to run inside, and an address that is not this door's is one that nobody has.
"""

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Self, cast
from urllib.parse import urlsplit

from rllm.errors import SandboxError
from rllm.errors.machine import MACHINE_ERRNOS
from rllm.files.descriptors import raised_file_limit
from rllm.sandbox.base import Sandbox
from rllm.types.episode_clock import EpisodeClock, EpisodeLimits

log = logging.getLogger(__name__)

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
MOST_CONNECTIONS, LEAST_CONNECTIONS = 64, 4
"""The bounds of a sandbox's share, which is half of this process's descriptors by the number of doors."""
DESCRIPTORS = 3
"""Those of one connection: here, from here to the gateway, and in the gateway, which may be this process."""
PER_S = 200
"""Connections and names that a sandbox may ask for in a second, in the long run."""
HEAD_S, STALL_S = 30.0, 60.0
"""The time in which the head of a request has to come, and in which a part of an answer has to be read."""
SHARE_S, RETRY_S, PATIENCE_S = 1.0, 0.2, 30.0
"""The time between two looks at the share, between two tries of a machine without descriptors, and the time
after which such a machine is at fault."""
_MOST_HEADERS = 200


class _OpenDoors:
    """The open doors of this process, which share its descriptors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1

    def share(self) -> int:
        """The number of connections that each door may have: together they use half of the descriptors."""
        with self._lock:
            share = raised_file_limit() // 2 // DESCRIPTORS // max(self._count, 1)
        return min(max(share, LEAST_CONNECTIONS), MOST_CONNECTIONS)


_open_doors = _OpenDoors()


class RateLimit:
    """A limit of PER_S events a second in the long run, after a burst of as many."""

    def __init__(self) -> None:
        self._free_s = 0.0
        """The time at which all events so far would have happened one after the other."""

    def wait_s(self, now_s: float) -> float:
        """The time to wait before one more event."""
        return max(self._free_s - now_s, 0)

    def count(self, now_s: float) -> None:
        """Count one event."""
        self._free_s = max(self._free_s, now_s - 1) + 1 / PER_S


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
        self._session_name = there.path.removesuffix("/v1").rpartition("/")[2]
        self._causes_told: set[str] = set()
        self.failure: OSError | None = None
        """The reason that this machine could not connect the sandbox with its model: it was stopped."""
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
        self._is_serving = threading.Event()
        self._failure: Exception | None = None
        """The error for which it never served."""
        self._thread = threading.Thread(target=self._work, name="rllm-door", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._thread.start()
        except RuntimeError as error:  # this machine has no room for one more
            self._calls.close()
            self._names.close()
            raise SandboxError(f"The door of the sandbox did not open: {error}") from error
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
            asyncio.run(self._serve())
        except Exception as error:
            if self._is_serving.is_set():
                raise
            self._calls.close()
            self._names.close()
            self._failure = error
            self._is_serving.set()  # who opens the door waits for it

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._loop = loop = asyncio.get_running_loop()
        self._calls.setblocking(False)
        self._names.setblocking(False)
        transport, _ = await loop.create_datagram_endpoint(lambda: _Names(self), sock=self._names)
        self._clock = EpisodeClock(EpisodeLimits(work_s=self._work_s))
        self._clock.begin(self._end_work)
        accepting = asyncio.create_task(self._accept())
        self._is_serving.set()
        with _open_doors.one_more():
            await self._stop.wait()
        self._clock.stop()
        if self._last_refusal is not None:
            self._last_refusal.cancel()
        transport.close()
        tasks = {accepting, *asyncio.all_tasks()} - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        # Waited for here: the end of the loop would cancel them once more, while they close what they hold.
        await asyncio.gather(*tasks, return_exceptions=True)
        self._calls.close()

    async def _accept(self) -> None:
        """Take connections, as many at a time as are this sandbox's share, and not faster than PER_S; others
        wait in the kernel."""
        loop = asyncio.get_running_loop()
        connections: set[asyncio.Task[None]] = set()
        rate, failing_since = RateLimit(), 0.0
        while True:
            await asyncio.sleep(rate.wait_s(loop.time()))
            while len(connections) >= _open_doors.share():
                self.tell("has as many connections open as is its share; more of them wait")
                await asyncio.wait(connections, timeout=SHARE_S, return_when=asyncio.FIRST_COMPLETED)
            try:
                connection, _ = await loop.sock_accept(self._calls)
            except OSError as error:
                self.tell(f"can take no connection: {error}")
                failing_since = failing_since or loop.time()
                if loop.time() - failing_since > PATIENCE_S:
                    self._give_up(error)
                await asyncio.sleep(RETRY_S)
                continue
            failing_since = 0.0
            rate.count(loop.time())
            task = asyncio.create_task(self._serve_connection(connection))
            connections.add(task)
            task.add_done_callback(connections.discard)
            task.add_done_callback(lambda _, connection=connection: connection.close())

    async def _serve_connection(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=_LONGEST_LINE)
        try:
            await self._serve_request(reader, writer)
        except TimeoutError:
            self.tell(f"sent no request in {HEAD_S:g} s, or read no answer in {STALL_S:g} s")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # one of the two is gone, and with it the connection; who was there is told by its end
        finally:
            await self._close(writer)

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_S):
            line = await reader.readuntil(b"\r\n")
            target = line.split(b" ")[1] if line.count(b" ") == 2 else b""
            if not self._is_session(target) or not line.endswith(b" HTTP/1.1\r\n"):
                self.remember(_host_of(target))
                writer.write(_FORBIDDEN)
                await writer.drain()
                return
            head = [await reader.readuntil(b"\r\n")]
            while head[-1] != b"\r\n":
                head.append(await reader.readuntil(b"\r\n"))
                if len(head) > _MOST_HEADERS:
                    return
        is_call = line.startswith(b"POST ") and target.partition(b"?")[0].endswith(_CALLS)
        self.num_calls += is_call
        their_reader, their_writer = await self._reach_gateway()
        with ExitStack() as waiting:
            their_writer.write(line + _CLOSE + b"".join(head))
            # The clock stands still while the model is waited for, not while a request is being sent.
            on_sent = partial(waiting.enter_context, self._clock.call()) if is_call else _do_nothing
            sending = asyncio.create_task(_send(reader, their_writer, _body_length(head), on_sent))
            answering = asyncio.create_task(self._answer(their_reader, writer, is_call))
            try:
                done, _ = await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                sending.cancel()
                answering.cancel()
                await asyncio.gather(sending, answering, return_exceptions=True)
                await self._close(their_writer)

    async def _close(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection, and give up what its other end does not read in time."""
        writer.close()
        try:
            if not self._stop.is_set():
                async with asyncio.timeout(STALL_S):
                    await writer.wait_closed()
        except OSError:  # TimeoutError is one: there is nothing left to be told
            pass
        finally:
            writer.transport.abort()

    async def _reach_gateway(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError where the gateway is gone, or this machine has had no room for PATIENCE_S; the
        sandbox is stopped then."""
        until_s = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                return await asyncio.open_connection(*self._gateway)
            except OSError as error:
                if error.errno not in MACHINE_ERRNOS:
                    raise
                self.tell(f"cannot be connected with the gateway: {error}")
                if asyncio.get_running_loop().time() > until_s:
                    self._give_up(error)
                    raise
            await asyncio.sleep(RETRY_S)

    def _give_up(self, error: OSError) -> None:
        """Stop the sandbox: what it does without its model says nothing of the policy."""
        self.failure = self.failure or error
        self._sandbox.stop()

    def tell(self, cause: str) -> None:
        """One line of the log for each cause, however often it is met."""
        if cause not in self._causes_told and len(self._causes_told) < _MAX_REMEMBERED:
            self._causes_told.add(cause)
            log.warning("The sandbox of session %s %s.", self._session_name, cause)

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
        async with asyncio.timeout(STALL_S):
            writer.write(start)
            await writer.drain()
        while data := await reader.read(65536):
            async with asyncio.timeout(STALL_S):
                writer.write(data)
                await writer.drain()

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
        self._rate = RateLimit()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(data) < 13:
            return
        now_s = asyncio.get_running_loop().time()
        if self._rate.wait_s(now_s) > 0:
            self._door.tell(f"asks for more than {PER_S} names a second; the rest get no answer")
            return
        self._rate.count(now_s)
        self._door.remember(_queried_name(data))
        self._transport.sendto(data[:2] + _NO_SUCH_NAME + data[4:], addr)


async def _send(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    num_bytes: int | None,
    on_sent: Callable[[], object],
) -> None:
    """Hand on the body of a request, of `num_bytes` where they are known; call `on_sent` when it is whole.

    What comes behind it is not handed on. Does not return until its connection fails: the answer is to come.
    """
    if not num_bytes:
        on_sent()
    num_behind = 0
    while data := await reader.read(65536):
        body = data if num_bytes is None else data[:num_bytes]
        num_behind += len(data) - len(body)
        if num_behind > _LONGEST_LINE:
            raise ConnectionResetError("a second request")
        writer.write(body)
        await writer.drain()
        if num_bytes:
            num_bytes -= len(body)
            if num_bytes == 0:
                on_sent()
    with suppress(OSError):
        writer.write_eof()
    await asyncio.get_running_loop().create_future()


def _do_nothing() -> None:
    """For requests that are no model call."""


def _body_length(head: list[bytes]) -> int | None:
    """The number of bytes of a request's body; None where its head does not say."""
    lengths = [line.partition(b":")[2] for line in head if line.lower().startswith(b"content-length:")]
    if any(line.lower().startswith(b"transfer-encoding:") for line in head):
        return None
    if not lengths:
        return 0
    return int(lengths[0]) if lengths[0].strip().isdigit() else None


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
