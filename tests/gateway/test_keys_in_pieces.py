"""A server that sends the gateway's own key back letter by letter, and programs that repeat it."""

import sys
from pathlib import Path

import aiohttp

from rllm.gateway.ledger import Ledger
from rllm.gateway.server import Gateway
from rllm.gateway.upstream import UpstreamPolicy

sys.path.insert(0, str(Path(__file__).parent))
import fake_upstream as fake

KEY = "sk-live-3f9A/c72Qe51Zk08Wb64"
PIECE = 12


async def test_a_key_that_comes_letter_by_letter_does_not_reach_the_ledger(tmp_path: Path) -> None:
    answer = f"your key is {KEY}, isn't it"
    async with fake.FakeUpstream(answer=answer) as upstream:
        gateway = Gateway(UpstreamPolicy([upstream.url], api_key=KEY), tmp_path / "ledger", token=None)
        async with gateway, aiohttp.ClientSession() as client:
            heard = {"role": "assistant", "content": answer}
            for messages in (
                [{"role": "user", "content": "hi"}],
                [{"role": "user", "content": "hi"}, heard, {"role": "user", "content": f"so it is {KEY}?"}],
            ):
                url = f"{gateway.url}/sessions/s/v1/chat/completions"
                body = {"model": "m", "messages": messages, "stream": True}
                async with client.post(url, json=body) as reply:
                    assert (reply.status, b"[DONE]" in await reply.read()) == (200, True)
            url = f"{gateway.url}/sessions/s/v1/completions"
            async with client.post(url, json={"model": "m", "prompt": f"go on with {KEY}"}) as reply:
                assert reply.status == 200
    with Ledger.open(tmp_path / "ledger", read_only=True) as ledger:
        records = ledger.traces("s")
    assert [record.response["content"] for record in records[:2]] == ["your key is [key], isn't it"] * 2
    assert records[1].messages[-1]["content"] == "so it is [key]?"
    assert records[2].prompt == "go on with [key]"
    everything = repr([record.to_dict() for record in records])
    assert not any(KEY[place : place + PIECE] in everything for place in range(len(KEY) - PIECE + 1))
