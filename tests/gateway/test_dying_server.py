"""A model server that is killed in the middle of a batch: every client is told, everything is counted."""

import asyncio
import ipaddress
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.gateway.upstream import UpstreamPolicy
from rllm.inference.vllm import VLLMClient
from rllm.models.builtin import create_model
from rllm.types.wire import CallStatus, Policy

sys.path.insert(0, str(Path(__file__).parent))
import fake_upstream as fake

NUM_CALLS = 40
SECONDS = 20.0
"""The longest that anybody may be left waiting."""


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with fake.FakeUpstream() as upstream:
        yield upstream


@pytest.fixture(params=["text", "ids"])
async def policy(request: Any, server: Any, tmp_path: Path) -> AsyncIterator[Policy]:
    """Both ways to a server: it makes the prompt, or the gateway does."""
    if request.param == "text":
        yield UpstreamPolicy([server.url], max_retries=1, max_wait_s=0.2)
        return
    create_model(tmp_path / "model", "tiny", 0)
    client = await VLLMClient.connect(server.url, tmp_path / "model")
    yield LocalPolicy(client, "m")
    await client.close()


async def ask(http: aiohttp.ClientSession, gateway: Gateway, number: int) -> tuple[bool, str]:
    """(whether it looks like a whole answer, all that was told); every second call is streamed."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": number % 2 == 0}
    url = f"{gateway.url}/k/{gateway.token}/sessions/{number}/v1/chat/completions"
    text = ""
    try:
        async with http.post(url, json=body) as reply:
            async for part in reply.content.iter_any():
                text += part.decode()
            return reply.status == 200 and (number % 2 == 1 or "data: [DONE]" in text), text
    except aiohttp.ClientPayloadError:  # how a stream that broke off ends
        return False, text + " broke off"


async def test_every_call_of_a_batch_ends_with_a_typed_error_when_the_server_is_killed(
    server: Any, policy: Policy, tmp_path: Path
) -> None:
    server.default = fake.stream("whole answer", hold=asyncio.Event())
    async with (
        asyncio.timeout(SECONDS),
        Gateway(policy, tmp_path / "ledger") as gateway,
        aiohttp.ClientSession() as http,
    ):
        calls = [asyncio.create_task(ask(http, gateway, number)) for number in range(NUM_CALLS)]
        while len(server.asked) < NUM_CALLS:
            await asyncio.sleep(0.005)
        await server.stop()
        ends = await asyncio.gather(*calls)
        assert not any(is_whole for is_whole, _ in ends)
        assert all("error" in told or "broke off" in told for _, told in ends)
        records = [each for number in range(NUM_CALLS) for each in gateway.ledger.traces(str(number))]
        assert len(records) == NUM_CALLS
        assert {each.status for each in records} <= {CallStatus.ERROR, CallStatus.PARTIAL}
        errors = [each.error or {} for each in records]
        assert all(each["status"] >= 500 for each in errors)
        assert all(server.url in each["message"] for each in errors), "the culprit is named"
        gateway.counts.require_conserved(in_flight=0)
        assert policy.health()["in_flight"] == 0


async def test_calls_are_answered_again_once_the_server_is_back(
    server: Any, policy: Policy, tmp_path: Path
) -> None:
    server.default = fake.refuse(500, "engine dead")
    async with (
        asyncio.timeout(SECONDS),
        Gateway(policy, tmp_path / "ledger") as gateway,
        aiohttp.ClientSession() as http,
    ):
        await server.stop()
        is_whole, told = await ask(http, gateway, 1)
        assert not is_whole
        assert "server_error" in told
        await server.start()
        server.default = _answer
        while not (await ask(http, gateway, 1))[0]:
            await asyncio.sleep(0.05)


async def _answer(asked: Any) -> Any:
    """Ids that both ways can read."""
    if asked.path.endswith("/chat/completions"):
        return await fake.speak(asked)
    choice = {"finish_reason": "stop", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -1.0]}}
    return await fake.body(json.dumps({"id": "cmpl-1", "choices": [choice]}).encode())(asked)


async def test_a_gateway_listens_on_this_machine_alone_and_asks_for_a_token_unless_told_otherwise(
    server: Any, tmp_path: Path
) -> None:
    policy = UpstreamPolicy([server.url])
    async with Gateway(policy, tmp_path / "ledger") as gateway, aiohttp.ClientSession() as http:
        assert ipaddress.ip_address(gateway.url.removeprefix("http://").rpartition(":")[0]).is_loopback
        assert len(gateway.token or "") >= 20
        async with http.get(f"{gateway.url}/sessions") as reply:
            assert reply.status == 401
