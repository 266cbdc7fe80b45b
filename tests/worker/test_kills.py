"""`kill -9` of a serving process under many callers: every key is answered once, and its attempts add up."""

import asyncio
import multiprocessing
import os
import random
import signal
import socket
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import worker_files as files
from aiohttp import web

from rllm.gateway.ledger import Ledger
from rllm.types.wire import CallStatus
from rllm.worker.store import RunStore

MAX_ATTEMPTS = 100


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["rllm.cli.main", "rllm.cli.worker", "rllm.worker.http", "rllm.worker.host"])
"""A server is killed often: what it imports is imported once, in the process that it is forked from."""


class Server:
    """`rllm worker serve` on one address, killed and started again."""

    def __init__(self, contract: Path, directory: Path, port: int) -> None:
        options = ["--directory", str(directory), "--port", str(port), "--no-auth"]
        self.words = ["worker", "serve", str(contract), *options]
        self.health = f"http://127.0.0.1:{port}/health"
        self.process: Any = None

    async def start(self) -> None:
        self.process = _CONTEXT.Process(target=files.serve, args=(self.words,))
        self.process.start()
        async with aiohttp.ClientSession() as http:
            while True:
                assert self.process.is_alive(), "it ended by itself"
                try:
                    async with http.get(self.health):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.01)

    async def end(self, by: signal.Signals) -> None:
        os.kill(self.process.pid, by)
        await asyncio.to_thread(self.process.join)


async def answered(http: aiohttp.ClientSession, url: str, key: str) -> bytes:
    """Ask until there is a final answer, as a client does that was told to."""
    while True:
        try:
            async with http.post(url, json={"inputs": {"run_id": key, "task": key}}) as reply:
                body = await reply.read()
                if reply.status == 200:
                    return body
                assert reply.status in (429, 503), body
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)


async def kill_under_load(
    folder: Path, *, num_kills: int, num_callers: int, seed: int, binding: str = ""
) -> None:
    """`binding` stands in for the program of the contract."""
    port, draws = free_port(), random.Random(seed)
    contract = files.write_worker(folder, attempts=MAX_ATTEMPTS)
    if binding:
        contract.write_text(contract.read_text().replace('program: "program.py:solve"', binding))
    server = Server(contract, folder / "runs", port)
    url = f"http://127.0.0.1:{port}/workers/measure/runs"
    await server.start()
    is_over = False
    bodies: dict[str, set[bytes]] = {}

    async def call(http: aiohttp.ClientSession, caller: int) -> None:
        number = 0
        while not is_over:
            key = f"key-{(caller + number) % num_callers}-{number}"  # two callers share each key
            bodies.setdefault(key, set()).add(await answered(http, url, key))
            bodies[key].add(await answered(http, url, key))
            number += caller % 2

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as callers:
        for caller in range(num_callers):
            callers.create_task(call(http, caller))
        for _ in range(num_kills):
            await asyncio.sleep(draws.uniform(0.0, 0.4))
            await server.end(signal.SIGKILL)
            await server.start()
        is_over = True
    await server.end(signal.SIGTERM)

    store = RunStore(folder / "runs")
    try:
        runs = list(store.runs())
        attempts = {row["key"]: store.attempts(row["run_id"]) for row in runs if row["status"] == "ok"}
        ids = {row["run_id"]: row["key"] for row in runs}
        num_attempts = {row["key"]: row["attempts"] for row in runs}
    finally:
        store.close()
    assert all(len(each) == 1 for each in bodies.values())  # the same bytes, also after kills
    assert set(bodies) <= {row["key"] for row in runs if row["status"] == "ok"}
    for key, each in attempts.items():
        assert [row["number"] for row in each] == list(range(1, num_attempts[key] + 1))
        assert [row["status"] for row in each].count("ok") == 1
        assert num_attempts[key] <= MAX_ATTEMPTS
    if num_kills > 3:
        assert max(num_attempts.values()) > 1  # some kill did hit an attempt
    if binding:
        with Ledger.open(folder / "runs" / "calls" / "measure", read_only=True) as ledger:
            records = [
                (row["session"], ledger.traces(row["session"])) for rows in attempts.values() for row in rows
            ]
        call_ids = [call.id for _, calls in records for call in calls if call.status is CallStatus.OK]
        assert len(call_ids) == len(set(call_ids)), "a call is recorded once"
        by_session = dict(records)
        for rows in attempts.values():
            assert [each.status for each in by_session[rows[-1]["session"]]] == [CallStatus.OK]
        return
    calls = Counter(line.split()[0] for line in (folder / "calls.txt").read_text().splitlines())
    sessions = Counter(line.split()[1] for line in (folder / "calls.txt").read_text().splitlines())
    assert max(sessions.values()) == 1  # no attempt was played twice
    assert all(session.rpartition("-")[0] in ids for session in sessions)
    assert all(calls[key] <= num_attempts[key] for key in attempts)


async def test_every_key_is_answered_once_whatever_is_killed(tmp_path: Path) -> None:
    await kill_under_load(tmp_path, num_kills=5, num_callers=24, seed=7)


async def test_no_model_call_is_recorded_twice_as_a_result_whatever_is_killed(tmp_path: Path) -> None:
    """The model is a server that is not killed; whoever asks it is."""
    numbers = count()

    async def chat(request: web.Request) -> web.Response:
        await asyncio.sleep(0.02)
        message = {"role": "assistant", "content": '{"length": 4}'}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        answer = {"id": f"call-{next(numbers)}", "model": "m", "choices": choices, "usage": usage}
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    model = web.AppRunner(app)
    await model.setup()
    await web.TCPSite(model, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{model.addresses[0][1]}/v1"
    binding = f'model: "openai:m", base_url: "{url}"'
    try:
        await kill_under_load(tmp_path, num_kills=2, num_callers=8, seed=3, binding=binding)
    finally:
        await model.cleanup()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_a_hundred_kills_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    await kill_under_load(tmp_path, num_kills=100, num_callers=64, seed=seed)
