"""The gateway is killed at random moments: what a client was answered is in the ledger, exactly once."""

import asyncio
import importlib.util
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rllm.gateway.ledger import Ledger


def _keyed_upstream() -> Any:
    path = Path(__file__).with_name("keyed_upstream.py")
    spec = importlib.util.spec_from_file_location("keyed_upstream", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["keyed_upstream"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


keyed = _keyed_upstream()
TOKEN = "a-token-for-tests"
PATIENCE = 30
"""Attempts of one call: a restart takes a second or two."""


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


@dataclass(slots=True)
class Program:
    """Asks one call after the other until it is told to stop, whatever happens to the gateway."""

    client: AsyncOpenAI
    name: str
    stream: bool
    answered: dict[str, str] = field(default_factory=dict)
    """Keys of calls whose whole answer arrived, with the completion ids under which it came."""

    async def run(self, stopped: asyncio.Event) -> None:
        turn = 0
        while not stopped.is_set():
            key = f"{self.name}/{turn}"
            said: list[Any] = [{"role": "user", "content": f"key={key} what now?"}]
            self.answered[key] = await (self._streamed(key, said) if self.stream else self._whole(key, said))
            turn += 1

    async def _whole(self, key: str, said: list[Any]) -> str:
        """The SDK asks again by itself, and says so in a header."""
        answer = await self.client.chat.completions.create(model="any", messages=said, tools=keyed.TOOLS)
        assert (answer.choices[0].message.content or "") == keyed.said(key).text
        return answer.id

    async def _streamed(self, key: str, said: list[Any]) -> str:
        """A stream that broke off is asked for again by the program, under the key that it gave the call."""
        for _ in range(PATIENCE):
            text, finished, answer_id = "", False, ""
            try:
                events = await self.client.chat.completions.create(
                    model="any",
                    messages=said,
                    tools=keyed.TOOLS,
                    stream=True,
                    extra_headers={"Idempotency-Key": key},
                )
                async for event in events:
                    answer_id = event.id
                    text += event.choices[0].delta.content or ""
                    finished = finished or bool(event.choices[0].finish_reason)
            except openai.APIConnectionError:
                continue
            assert finished, "a stream that was cut off never looks like a whole one"
            assert text == keyed.said(key).text
            return answer_id
        raise AssertionError(f"{key} was not answered in {PATIENCE} attempts")


async def kill_and_restart(directory: Path, *, kills: int, num_programs: int) -> None:
    draw = random.Random(7)
    async with serving(directory, pause_s=0.004) as (upstream, gateway):
        stopped = asyncio.Event()
        async with AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=TOKEN, max_retries=PATIENCE, timeout=60.0
        ) as client:
            programs = [
                Program(
                    client.with_options(base_url=f"{gateway.url}/sessions/run-{number}/v1"),
                    f"s{number}",
                    stream=number % 2 == 1,
                )
                for number in range(num_programs)
            ]
            running = asyncio.gather(*(program.run(stopped) for program in programs))
            for _ in range(kills):
                await asyncio.sleep(draw.uniform(0.1, 0.9))
                await gateway.kill()
                await gateway.start()
            await asyncio.sleep(0.3)
            stopped.set()
            await running
    with Ledger.open(directory, read_only=True) as ledger:
        for number, program in enumerate(programs):
            check(ledger.traces(f"run-{number}"), program)
    assert sum(upstream.asked.values()) > len(upstream.asked), "some kills hit calls on their way"


def check(records: list[Any], program: Program) -> None:
    assert all(record.status == "ok" for record in records)
    recorded = {keyed.key_of(record.messages): record.id for record in records}
    assert len(recorded) == len(records), "no call was recorded twice"
    assert recorded == program.answered
    for record in records:
        key = keyed.key_of(record.messages)
        assert record.completion_ids == keyed.said(key).ids
        assert record.logprobs == keyed.said(key).logprobs
        assert record.prompt_ids == keyed.prompt_ids(record.messages)
        assert record.response.get("tool_calls", []) == keyed.said(key).calls


async def test_every_answered_call_is_recorded_once_although_the_gateway_is_killed(tmp_path: Path) -> None:
    await kill_and_restart(tmp_path, kills=3, num_programs=12)


@pytest.mark.slow
async def test_twenty_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    await kill_and_restart(tmp_path, kills=20, num_programs=24)


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
