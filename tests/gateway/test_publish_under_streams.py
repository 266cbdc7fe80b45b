"""Weights published again and again under 64 streams: every token has the version that wrote it.

The model is made so that its weights can be read off its tokens, see readable_weights.py.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.inference.local.client import LocalClient
from rllm.models.directory import LoadedModel

sys.path.insert(0, str(Path(__file__).parent))
from readable_weights import FIRST_TOKEN, publish_between_steps, readable_model

NUM_STREAMS, NUM_TOKENS, NUM_PUBLISHES = 64, 48, 14


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    return readable_model(tmp_path / "model")


@pytest.fixture
async def client(model: LoadedModel) -> AsyncIterator[LocalClient]:
    client = LocalClient(model, num_slots=NUM_STREAMS, max_context=192, lockstep=True)
    yield client
    await client.close()


async def stream(http: aiohttp.ClientSession, gateway: Gateway, number: int) -> None:
    url = f"{gateway.url}/k/{gateway.token}/sessions/{number}/v1/chat/completions"
    said = [{"role": "user", "content": f"number {number}"}]
    body = {"messages": said, "max_tokens": NUM_TOKENS, "stream": True}
    async with http.post(url, json=body) as reply:
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")


async def test_every_token_of_64_streams_carries_the_version_of_the_weights_that_wrote_it(
    model: LoadedModel, client: LocalClient, tmp_path: Path
) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        Gateway(LocalPolicy(client, "tiny"), tmp_path / "ledger") as gateway,
        aiohttp.ClientSession(connector=connector) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(NUM_STREAMS):
            tasks.create_task(stream(http, gateway, number))
        share = NUM_STREAMS * NUM_TOKENS // (NUM_PUBLISHES + 1)
        num_before = [
            await publish_between_steps(client, model, version, after=version * share)
            for version in range(1, NUM_PUBLISHES + 1)
        ]
        while gateway.num_in_flight:
            await asyncio.sleep(0.005)
        records = [record for number in range(NUM_STREAMS) for record in gateway.ledger.traces(str(number))]

    assert len(records) == NUM_STREAMS
    ids = [token for record in records for token in record.completion_ids]
    versions = [version for record in records for version in record.policy_versions]
    written_under = [token - FIRST_TOKEN for token in ids]
    assert len(ids) == NUM_STREAMS * NUM_TOKENS == client.engine.counts.sampled_tokens
    assert Counter(versions) == Counter(written_under)
    assert versions == written_under
    # on a busy machine two publishes may have no step between them
    starts = [0, *num_before, len(ids)]
    assert Counter(versions) == {
        version: end - start for version, (start, end) in enumerate(pairwise(starts)) if end > start
    }
    assert max(len(set(record.policy_versions)) for record in records) > NUM_PUBLISHES // 2
