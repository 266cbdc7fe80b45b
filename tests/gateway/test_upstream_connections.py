"""Connections to upstreams: kept between requests, closed when they are old, and what servers send beside an
answer."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rllm.errors import ConfigError
from rllm.gateway.upstream import connections, http
from rllm.gateway.upstream.http import Dropped, HttpClient

Write = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


class RawServer:
    """Reads whole requests, and answers each with the bytes that `write` sends."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.num_connections = 0
        self.heads: list[bytes] = []
        self.num_closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                self.heads.append(head)
                await self._write(writer, len(self.heads))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            """Closed by the client, or by `write`."""
        finally:
            self.num_closed += 1
            writer.close()


@asynccontextmanager
async def serving(write: Write, **headers: str) -> AsyncIterator[tuple[RawServer, HttpClient, str]]:
    raw = RawServer(write)
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = HttpClient(headers=headers, timeout_s=5.0, connect_timeout_s=5.0, max_body_bytes=1 << 20)
    try:
        yield raw, client, f"http://{host}:{port}/v1/chat/completions"
    finally:
        await client.close()
        server.close()
        await until(lambda: raw.num_closed == raw.num_connections)


async def answer(writer: asyncio.StreamWriter, number: int) -> None:
    body = b'{"number": %d}' % number
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


async def body_of(client: HttpClient, url: str, body: bytes = b"{}") -> bytes:
    async with client.post(url, body) as response:
        return await client.body_of(response)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_requests_one_after_another_share_one_connection() -> None:
    async with serving(answer, Authorization="Bearer abc") as (server, client, url):
        assert [await body_of(client, url) for _ in range(3)] == [
            b'{"number": 1}',
            b'{"number": 2}',
            b'{"number": 3}',
        ]
        assert await client.get(url) == (200, {"number": 4})
        assert server.num_connections == 1
        assert all(b"\r\nAuthorization: Bearer abc\r\n" in head for head in server.heads)
        assert server.heads[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    everybody_is_there = asyncio.Event()

    async def answer_all(writer: asyncio.StreamWriter, number: int) -> None:
        if number == 3:
            everybody_is_there.set()
        await everybody_is_there.wait()
        await answer(writer, number)

    async with serving(answer_all) as (server, client, url):
        assert len(set(await asyncio.gather(*(body_of(client, url) for _ in range(3))))) == 3
        assert server.num_connections == 3


async def test_a_connection_that_nobody_used_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0.05)
    async with serving(answer) as (server, client, url):
        await body_of(client, url)
        await until(lambda: server.num_closed == 1)
        await body_of(client, url)
        assert server.num_connections == 2


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async def answer_and_close(writer: asyncio.StreamWriter, number: int) -> None:
        await answer(writer, number)
        writer.close()

    async with serving(answer_and_close) as (server, client, url):
        for number in (1, 2):
            assert await body_of(client, url) == b'{"number": %d}' % number
            await asyncio.sleep(0.05)
        assert server.num_connections == 2


async def test_an_answer_that_was_not_read_to_its_end_closes_its_connection() -> None:
    async def begin(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nno more")

    async with serving(begin) as (server, client, url):
        async with client.post(url, b"{}") as response:
            assert await client.part_of(response) == b"no more"
        await until(lambda: server.num_closed == 1)


async def test_a_cancelled_request_closes_its_connection() -> None:
    async def never(writer: asyncio.StreamWriter, number: int) -> None:
        """It thinks about it."""

    async with serving(never) as (server, client, url):
        task = asyncio.create_task(body_of(client, url))
        await until(lambda: len(server.heads) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: server.num_closed == 1)


async def test_what_comes_before_the_answer_is_passed_over() -> None:
    async def hint_first(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        await answer(writer, number)

    async with serving(hint_first) as (server, client, url):
        assert await body_of(client, url) == b'{"number": 1}'
        assert await body_of(client, url) == b'{"number": 2}'
        assert server.num_connections == 1


async def test_an_answer_that_is_packed_unasked_is_unpacked() -> None:
    async def packed(writer: asyncio.StreamWriter, number: int) -> None:
        body = gzip.compress(b'{"packed": true}')
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)

    async with serving(packed) as (_, client, url):
        assert await body_of(client, url) == b'{"packed": true}'


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def until_closed(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n[1, 2")
        await writer.drain()
        writer.write(b", 3]")
        writer.close()

    async with serving(until_closed) as (_, client, url):
        assert await body_of(client, url) == b"[1, 2, 3]"


async def test_what_is_no_http_is_a_dropped_connection() -> None:
    async def nonsense(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    async with serving(nonsense) as (_, client, url):
        with pytest.raises(Dropped):
            await body_of(client, url)


async def test_a_server_may_answer_before_it_has_read_a_large_request() -> None:
    is_answered, is_closed = asyncio.Event(), asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await is_answered.wait()
        writer.close()
        is_closed.set()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = HttpClient(timeout_s=5.0, connect_timeout_s=5.0, max_body_bytes=1 << 20)
    async with client.post(f"http://{host}:{port}/v1", bytes(32 << 20)) as response:
        assert response.status == 413
        assert await client.body_of(response) == b"no"
    is_answered.set()
    await is_closed.wait()
    await client.close()
    server.close()


async def test_health_is_asked_although_every_place_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "most_connections", lambda: 1)
    async with serving(answer) as (_, client, url), client.post(url, b"{}"):
        assert await client.get(url) == (200, {"number": 2})


async def test_the_connections_of_servers_that_come_and_go_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_MAX_TARGETS", 4)
    async with serving(answer) as (server, client, url):
        for number in range(20):
            await body_of(client, f"{url}/{number}")
            client._connections.target("POST", f"http://127.0.0.{number + 2}:9/v1")
        assert len(client._connections._targets) <= 4
        assert len(client._connections._origins) <= 4
        assert server.num_connections <= 6


def test_a_key_with_a_line_break_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match="Authorization"):
        HttpClient(
            headers={"Authorization": "Bearer a\r\nX-Other: b"},
            timeout_s=5.0,
            connect_timeout_s=5.0,
            max_body_bytes=1 << 20,
        )
