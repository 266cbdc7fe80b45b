"""The clients of `gateway.py`: as many calls at once as it is told, in a process of their own.

    stdin:  one line of JSON a run (see `Order`), then `go` when it is warm
    stdout: {"warm": …} after the first calls of a run, {"calls": …} with its latencies after the last one

Bare sockets that are kept alive, so that the clients take less of the machine than what they measure. Each
connection asks the next call as soon as it has its answer. An answer counts when it is whole: its length, or
its last chunk and `data: [DONE]`.
"""

import asyncio
import itertools
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

CALLS_OF_A_SESSION = 10
CONNECTS_AT_ONCE = 256
SYSTEM = "You are an agent in a maze of rooms. " * 8
QUESTION = "The room is dark. There is a door to the north and a lamp on the table. " * 12


@dataclass(kw_only=True, slots=True)
class Order:
    """One run."""

    port: int
    path: str
    """`{session}` in it is filled in."""
    key: str
    session_prefix: str
    model: str
    stream: bool
    concurrency: int
    calls: int
    warm_calls: int
    """Made and thrown away before the run, over the same connections."""
    spread_s: float
    """The connections begin one after another within this time."""


@dataclass(slots=True)
class Times:
    whole_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_bytes: int = 0


class Connection(asyncio.Protocol):
    """One connection with one request at a time on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_open = True
        self._answered: asyncio.Future[None] | None = None
        self.received = bytearray()
        self.first_at = 0.0
        self._body_at = -1
        self._length = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> None:
        assert self.transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self.received.clear()
        self.first_at, self._body_at, self._length = 0.0, -1, -1
        self.transport.write(request)
        await self._answered

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self._body_at < 0:
            end = self.received.find(b"\r\n\r\n")
            if end < 0:
                return
            self._body_at = end + 4
            head = bytes(self.received[:end]).lower()
            place = head.find(b"\r\ncontent-length:")
            if place >= 0:
                self._length = int(head[place + 17 :].split(b"\r\n", 1)[0])
        if not self.first_at and len(self.received) > self._body_at:
            self.first_at = time.perf_counter()
        if self._length >= 0:
            is_whole = len(self.received) - self._body_at >= self._length
        else:
            is_whole = self.received.endswith(b"0\r\n\r\n")
        if is_whole and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or ConnectionResetError("closed before the answer was whole"))

    @property
    def status(self) -> bytes:
        return bytes(self.received[9:12])


class Clients:
    """All clients of one run."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._connections: list[Connection] = []
        self._numbers: Iterator[int] = itertools.count()

    async def connect(self) -> None:
        gate = asyncio.Semaphore(CONNECTS_AT_ONCE)

        async def connect_one(number: int) -> Connection:
            async with gate:
                return await self._connect(number)

        self._connections = await asyncio.gather(*map(connect_one, range(self.order.concurrency)))

    async def _connect(self, number: int) -> Connection:
        # Two addresses of one machine have twice the ports that one has.
        source = f"127.0.0.{1 + number // 12_000}"
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, "127.0.0.1", self.order.port, local_addr=(source, 0)
        )
        return connection

    def close(self) -> None:
        for connection in self._connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def ask_all(self, calls: int, prefix: str) -> Times:
        times, left = Times(), iter(range(calls))
        await asyncio.gather(
            *(
                self._keep_asking(number, left, times, f"{prefix}{number}")
                for number in range(len(self._connections))
            )
        )
        return times

    async def _keep_asking(self, number: int, left: Iterator[int], times: Times, name: str) -> None:
        await asyncio.sleep(self.order.spread_s * number / self.order.concurrency)
        for turn, _ in enumerate(left):
            request = self._request(f"{name}-{turn // CALLS_OF_A_SESSION}", turn)
            start = time.perf_counter()
            try:
                connection = await self._ask(number, request)
            except OSError as error:
                times.errors.append(f"{type(error).__name__}: {error}")
                continue
            times.whole_ms.append(1000 * (time.perf_counter() - start))
            times.first_ms.append(1000 * (connection.first_at - start))
            times.num_bytes += len(connection.received)
            if connection.status != b"200":
                times.errors.append(connection.received[-300:].decode(errors="replace"))
            elif self.order.stream and b"data: [DONE]" not in connection.received:
                times.errors.append("a stream without its end")

    async def _ask(self, number: int, request: bytes) -> Connection:
        """Servers close connections that were idle for some seconds, perhaps at this very moment."""
        for _ in range(2):
            if not self._connections[number].is_open:
                self._connections[number] = await self._connect(number)
            connection = self._connections[number]
            try:
                await connection.ask(request)
                return connection
            except OSError:
                if connection.received:
                    raise
        raise ConnectionResetError("closed twice before the first byte")

    def _request(self, session: str, turn: int) -> bytes:
        order = self.order
        body: dict[str, Any] = {
            "model": order.model,
            "messages": [
                {"role": "system", "content": SYSTEM},
                {
                    "role": "user",
                    "content": f"Turn {turn} of {session}, call {next(self._numbers)}. {QUESTION}",
                },
            ],
            "temperature": 0.7,
            "max_tokens": 64,
        }
        if order.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = (
            f"POST {order.path.format(session=session)} HTTP/1.1\r\nHost: 127.0.0.1:{order.port}\r\n"
            f"Authorization: Bearer {order.key}\r\nContent-Type: application/json\r\nAccept: */*\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def summary(times: Times, wall_s: float) -> dict[str, Any]:
    return {
        "calls": len(times.whole_ms),
        "wall_s": wall_s,
        "p50_ms": percentile(times.whole_ms, 0.5),
        "p99_ms": percentile(times.whole_ms, 0.99),
        "first_p50_ms": percentile(times.first_ms, 0.5),
        "first_p99_ms": percentile(times.first_ms, 0.99),
        "bytes": times.num_bytes / max(1, len(times.whole_ms)),
        "errors": len(times.errors),
        "first_error": times.errors[0] if times.errors else "",
    }


async def run(order: Order, lines: asyncio.StreamReader) -> None:
    clients = Clients(order)
    try:
        await clients.connect()
        warm = await clients.ask_all(order.warm_calls, f"{order.session_prefix}w")
        print(json.dumps({"warm": len(warm.whole_ms), "errors": warm.errors[:1]}), flush=True)
        await lines.readline()
        start = time.perf_counter()
        times = await clients.ask_all(order.calls, order.session_prefix)
        print(json.dumps(summary(times, time.perf_counter() - start)), flush=True)
    except OSError as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
    finally:
        clients.close()


async def serve() -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    while line := await lines.readline():
        await run(Order(**json.loads(line)), lines)


def main() -> None:
    if sys.stdin.isatty():
        print("gateway_load.py is a part of gateway.py, which starts it.")
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ModuleNotFoundError:
        runner = asyncio.Runner()
    with runner:
        runner.run(serve())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
