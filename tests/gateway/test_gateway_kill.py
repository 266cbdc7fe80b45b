"""The gateway is killed at random moments: what a client was answered is in the ledger, exactly once."""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parent))
import keyed_programs as programs
import keyed_upstream as keyed

TOKEN = "a-token-for-tests"
PATIENCE = 40
"""Attempts of one call: a restart takes a second or two, and many come close together."""


class GatewayProcess:
    """`rllm serve gateway`, which can be killed and started again on the same port and ledger."""

    def __init__(self, upstream: str, ledger: Path) -> None:
        self._upstream = upstream
        self._ledger = ledger
        self._port = 0
        self.url = ""

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rllm.cli.main", "serve", "gateway", "--json", "--token", TOKEN),
            *("--upstream", self._upstream, "--ledger", str(self._ledger), "--port", str(self._port)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "it did not start"
        self.url = json.loads(line)["url"]
        self._port = int(self.url.rpartition(":")[2])

    async def kill(self) -> None:
        self._process.kill()
        await self._process.communicate()

    async def stop(self) -> None:
        self._process.terminate()
        await self._process.communicate()


@asynccontextmanager
async def serving(directory: Path, pause_s: float) -> AsyncIterator[tuple[Any, GatewayProcess]]:
    async with keyed.KeyedUpstream(pause_s) as upstream:
        gateway = GatewayProcess(upstream.url, directory)
        await gateway.start()
        try:
            yield upstream, gateway
        finally:
            await gateway.stop()


async def kill_and_restart(directory: Path, *, kills: int, num_sessions: int, calls: int) -> None:
    """Kills at random moments of the work, whatever time it takes; then all that was asked is looked up."""
    draw = random.Random(7)
    at = sorted(draw.sample(range(1, num_sessions * calls * 95 // 100), kills))
    async with serving(directory, pause_s=0.004) as (upstream, gateway):
        clients = programs.Clients(gateway.url, TOKEN, patience=PATIENCE)

        async def kill_all() -> None:
            for num_answered in at:
                while clients.num_answered < num_answered:
                    await asyncio.sleep(0.002)
                await asyncio.sleep(draw.uniform(0.0, 0.1))
                await gateway.kill()
                await gateway.start()

        async with asyncio.TaskGroup() as group:
            group.create_task(kill_all())
            group.create_task(
                programs.run_all(clients, num_sessions, calls, keyed.said, programs.as_the_server_said)
            )
    assert sum(upstream.asked.values()) > len(upstream.asked), "some kills hit calls on their way"


async def test_every_answered_call_is_recorded_once_although_the_gateway_is_killed(tmp_path: Path) -> None:
    await kill_and_restart(tmp_path, kills=2, num_sessions=12, calls=6)


@pytest.mark.slow
async def test_twenty_kills_lose_and_double_nothing_of_two_hundred_sessions(tmp_path: Path) -> None:
    await kill_and_restart(tmp_path, kills=20, num_sessions=200, calls=20)


async def test_a_retry_after_a_restart_gets_the_answer_that_was_recorded(tmp_path: Path) -> None:
    marked = {"x-stainless-retry-count": "1"}
    named = {"Idempotency-Key": "my-call"}

    async def ask(key: str, stream: bool, headers: dict[str, str] | None = None) -> str:
        said: list[Any] = [{"role": "user", "content": f"key={key} what now?"}]
        how: dict[str, Any] = {"model": "any", "messages": said, "extra_headers": headers or {}}
        if not stream:
            return (await client.chat.completions.create(**how)).id
        events = await client.chat.completions.create(**how, stream=True)
        return [event.id async for event in events][-1]

    async with (
        serving(tmp_path, pause_s=0.0) as (upstream, gateway),
        AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=TOKEN, max_retries=3) as client,
    ):
        before = [await ask("a", False), await ask("b", True), await ask("c", True, named)]
        await gateway.kill()
        await gateway.start()
        after = [await ask("a", False, marked), await ask("b", True, marked), await ask("c", True, named)]
        assert after == before
        assert upstream.asked == Counter("abc")
        assert await ask("a", False) != before[0], "asked anew, it is a sample of its own"
