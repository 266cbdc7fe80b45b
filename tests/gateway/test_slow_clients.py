"""Clients that send slowly, disks that are full, files that others may not read."""

import asyncio
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import uvloop

from rllm.gateway.ledger import Ledger
from rllm.gateway.server import Gateway

Serve = Callable[..., Any]
TIMEOUT_S = 0.3


async def dripped(gateway: Gateway, begun: bytes) -> tuple[bytes, float]:
    """The head of what is answered to a request that goes on for ever, a byte at a time, and after how long.

    Not read to its end: bytes that reach a closed connection are answered with a reset.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    start = time.perf_counter()
    writer.write(begun)
    answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    while not answer.done():
        await asyncio.wait({answer}, timeout=0.02)
        writer.write(b"x")
    took_s = time.perf_counter() - start
    writer.close()
    return answer.result(), took_s


async def test_heads_and_bodies_that_do_not_come_give_their_connection_up(serve: Serve) -> None:
    gateway: Gateway = await serve(arrival_timeout_s=TIMEOUT_S, token=None)
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    begun = {
        b"POST /v1/chat": b"408",
        post + b"X-Header: ": b"408",
        post + b"Content-Length: 90000\r\n\r\n{": b"408",
    }
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*(dripped(gateway, each) for each in begun))
    for (each, status), (answer, took_s) in zip(begun.items(), answers, strict=True):
        assert answer.split()[1] == status, each
        assert took_s >= TIMEOUT_S
    gateway.counts.require_conserved(gateway.num_in_flight)


def test_half_a_head_that_comes_with_its_connection_gives_it_up_too(
    scripted: ModuleType, tmp_path: Path
) -> None:
    """uvloop, on which gateways run, hands it over before the server waits for a request."""

    async def answers() -> set[bytes]:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"token": None, "arrival_timeout_s": TIMEOUT_S}
        async with Gateway(scripted.ScriptedPolicy(), tmp_path / "ledger", **options) as gateway:
            clients = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(20)]
            for client in clients:  # nothing is awaited: they are accepted with what they have sent
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Header: ")
                client.setblocking(False)
            heads = await asyncio.gather(*(loop.sock_recv(client, 12) for client in clients))
            for client in clients:
                client.close()
            return set(heads)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(answers()) == {b"HTTP/1.1 408"}, "a silent connection is closed without a word"


async def test_a_kept_connection_may_be_idle_but_its_next_head_may_not_be_slow(serve: Serve) -> None:
    gateway: Gateway = await serve(arrival_timeout_s=TIMEOUT_S, token=None)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    for _ in range(2):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"}")).split()[1] == b"200"
        await asyncio.sleep(2 * TIMEOUT_S)
    writer.write(b"GET / HTTP/1.1\r\n")
    assert (await reader.read()).split()[1] == b"408"
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    async with asyncio.timeout(20):
        assert await reader.read() == b"", "one that never asks is closed without a word"
    writer.close()


async def test_a_body_that_comes_at_a_steady_pace_may_take_longer(serve: Serve) -> None:
    gateway: Gateway = await serve(arrival_timeout_s=1.0, token=None)

    async def parts() -> Any:
        yield b'{"model": "m", "messages": [{"role": "user", "content": "'
        for _ in range(11):
            await asyncio.sleep(0.1)
            yield b"x" * 20_000
        yield b'"}]}'

    async with (
        aiohttp.ClientSession() as http,
        http.post(gateway.url + "/v1/chat/completions", data=parts()) as reply,
    ):
        assert reply.status == 200, await reply.text()


async def test_health_tells_that_calls_cannot_be_recorded_and_that_they_can_again(
    serve: Serve, monkeypatch: Any
) -> None:
    monkeypatch.setattr("rllm.gateway.server.disk._INTERVAL_S", 0.0)
    gateway: Gateway = await serve(token=None)

    async def health(http: aiohttp.ClientSession) -> tuple[int, str, bool]:
        async with http.get(gateway.url + "/health") as reply:
            said = await reply.json()
            return reply.status, said["status"], said["ledger"]["writable"]

    writer = gateway.ledger._writing()
    async with aiohttp.ClientSession() as http:
        writer.change(lambda to: to.execute("PRAGMA max_page_count = 1").fetchall())  # SQLite's full disk
        assert await health(http) == (503, "unhealthy", False)
        writer.change(lambda to: to.execute("PRAGMA max_page_count = 1000000").fetchall())
        assert await health(http) == (200, "ok", True)
    assert gateway.ledger.counts()["recorded"] == 0


def test_a_ledger_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "ledger"
    for _ in range(2):
        mask = os.umask(0o022)
        try:
            with Ledger.open(directory) as ledger:
                ledger.create_session("s", {})
                files = list(directory.iterdir())
                assert len(files) >= 3
                for file in files:
                    assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
        finally:
            os.umask(mask)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for name in ("ledger.sqlite", "ledger.lock"):
            (directory / name).chmod(0o644)  # as an earlier version left it
