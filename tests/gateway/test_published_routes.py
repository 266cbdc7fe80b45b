"""Routes that programs for the published gateway ask for: traces by id, several sessions at once, servers."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rllm.gateway.server import Gateway
from rllm.gateway.server.published import trace_data
from rllm.gateway.upstream import UpstreamPolicy
from rllm.types.wire import CallRecord

sys.path.insert(0, str(Path(__file__).parent))
import fake_upstream as fake

Serve = Callable[..., Any]
Call = Callable[..., Any]
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def asking(gateway: Gateway, token: str | None = None) -> AsyncIterator[Call]:
    """`call(method, path, body)`: status and answer of one request."""
    headers = {"Authorization": f"Bearer {token or gateway.token}"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
            async with http.request(method, gateway.url + path, json=body) as reply:
                return reply.status, await reply.json()

        yield call


async def chat(gateway: Gateway, session: str, times: int = 1) -> list[str]:
    """Ids of the completions."""
    address = f"{gateway.url}/sessions/{session}/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key=str(gateway.token)) as client:
        return [(await client.chat.completions.create(**BODY)).id for _ in range(times)]


async def test_a_trace_is_found_by_the_id_of_its_completion(serve: Serve) -> None:
    gateway: Gateway = await serve()
    (completion,) = await chat(gateway, "a")
    async with asking(gateway) as call:
        status, trace = await call("GET", f"/traces/{completion}")
        assert status == 200
        assert (trace["trace_id"], trace["session_id"]) == (completion, "a")
        assert trace["completion_token_ids"] == [11, 12, 13]
        assert trace["token_counts"]["completion"] == 3
        assert trace["response_message"]["content"] == "hello world"
        assert trace["messages"] == BODY["messages"]
        assert (await call("GET", "/traces/nonsense"))[0] == 404
        assert (await call("POST", f"/traces/{completion}"))[0] == 405


def test_a_trace_has_the_version_of_the_tokens_that_were_sampled() -> None:
    """A token that a grammar left no choice about has none."""
    for policy_versions, oldest in (([-1, 5, 4], 4), ([-1, -1], None), ([3], 3), ([], None)):
        trace = trace_data(CallRecord(id="x", session="s", policy_versions=policy_versions))
        assert trace["weight_version"] == oldest


async def test_traces_of_several_sessions_come_in_the_order_of_their_calls(serve: Serve) -> None:
    gateway: Gateway = await serve()
    ids = [
        *await chat(gateway, "a"),
        *await chat(gateway, "b"),
        *await chat(gateway, "a"),
        *await chat(gateway, "c"),
    ]
    async with asking(gateway) as call:
        _, traces = await call("POST", "/traces/query", {"session_ids": ["b", "a", "never"]})
        assert [each["trace_id"] for each in traces] == ids[:3]
        since = traces[1]["timestamp"]
        _, later = await call("POST", "/traces/query", {"session_ids": ["a", "b"], "since": since})
        assert [each["trace_id"] for each in later] == ids[1:3]
        _, first = await call("POST", "/traces/query", {"session_ids": ["a", "b"], "limit": 1})
        assert [each["trace_id"] for each in first] == ids[:1]
        for bad in ({}, {"session_ids": []}, {"session_ids": [1]}, {"session_ids": ["a"], "limit": 0}):
            assert (await call("POST", "/traces/query", bad))[0] == 400, bad


async def test_a_sessions_own_token_opens_its_traces_alone(serve: Serve) -> None:
    gateway: Gateway = await serve()
    (mine,), (other,) = await chat(gateway, "mine"), await chat(gateway, "other")
    async with asking(gateway) as call:
        token = (await call("POST", "/sessions", {"session_id": "mine"}))[1]["token"]
    async with asking(gateway, token) as call:
        assert (await call("GET", f"/traces/{mine}"))[0] == 200
        assert (await call("GET", f"/traces/{other}"))[0] == 403
        assert (await call("POST", "/traces/query", {"session_ids": ["mine"]}))[0] == 200
        assert (await call("POST", "/traces/query", {"session_ids": ["mine", "other"]}))[0] == 403
        for method, path in (
            ("POST", "/sessions/batch_delete"),
            ("GET", "/admin/workers"),
            ("POST", "/admin/flush"),
            ("POST", "/admin/weight_version"),
        ):
            assert (await call(method, path, {"session_ids": ["mine"]}))[0] == 403, path
    async with asking(gateway, "wrong") as call:
        assert (await call("GET", "/admin/weight_version"))[0] == 401
        assert (await call("GET", "/health/workers"))[0] == 200  # open, as /health is


async def test_several_sessions_are_deleted_at_once(serve: Serve) -> None:
    gateway: Gateway = await serve()
    await chat(gateway, "a", 2)
    await chat(gateway, "b")
    (kept,) = await chat(gateway, "batch_delete")
    async with asking(gateway) as call:
        status, answer = await call("POST", "/sessions/batch_delete", {"session_ids": ["a", "b", "never"]})
        assert (status, answer) == (200, {"deleted": 3, "sessions": {"a": 2, "b": 1}})
        assert (await call("GET", "/sessions/a/traces"))[0] == 404
        assert [each["id"] for each in (await call("GET", "/sessions/batch_delete/traces"))[1]] == [kept]


async def test_the_built_in_engine_is_its_only_worker(serve: Serve) -> None:
    gateway: Gateway = await serve()
    async with asking(gateway) as call:
        _, listing = await call("GET", "/admin/workers")
        assert [each["worker_id"] for each in listing["workers"]] == ["engine"]
        assert (await call("GET", "/health/workers"))[1] == listing
        assert (await call("POST", "/admin/flush"))[1] == {"status": "flushed"}
        assert (await call("POST", "/admin/reload"))[1] == {"status": "reloaded"}
        for method, path, body in (
            ("POST", "/admin/workers", {"url": "http://127.0.0.1:9"}),
            ("DELETE", "/admin/workers/engine", None),
            ("POST", "/admin/weight_version", {"weight_version": 3}),
        ):
            status, answer = await call(method, path, body)
            assert (status, answer["error"]["code"]) == (409, "not_changeable"), path


@pytest.mark.parametrize("token", ["t", None])
async def test_servers_come_and_go_while_calls_are_answered(token: str | None, tmp_path: Path) -> None:
    async with fake.FakeUpstream(answer="one") as one, fake.FakeUpstream(answer="two") as two:
        policy = UpstreamPolicy([one.url])
        async with Gateway(policy, tmp_path / "ledger", token=token) as gateway, asking(gateway) as call:
            if token is None:
                status, answer = await call("POST", "/admin/workers", {"url": two.url})
                assert (status, answer["error"]["code"]) == (403, "token_required")
                return
            assert (await call("POST", "/admin/workers", {"url": "nonsense"}))[0] == 400
            assert (await call("POST", "/admin/workers", {"url": one.url}))[0] == 400
            assert (await call("POST", "/admin/workers", {"url": two.url, "model_name": "no"}))[0] == 400
            fields = {"url": two.url.removesuffix("/v1"), "model_name": "m", "api_path": "/v1", "weight": 2}
            status, worker = await call("POST", "/admin/workers", fields)
            assert (status, worker["url"], worker["healthy"], worker["weight"]) == (200, two.url, True, 2.0)
            _, listing = await call("GET", "/admin/workers")
            assert [each["url"] for each in listing["workers"]] == [one.url, two.url]
            first = listing["workers"][0]["worker_id"]
            assert (await call("DELETE", f"/admin/workers/{first}"))[0] == 200
            await chat(gateway, "s", 3)
            assert (len(one.asked), len(two.asked)) == (0, 3)
            assert (await call("DELETE", f"/admin/workers/{first}"))[0] == 404
            assert (await call("DELETE", f"/admin/workers/{worker['worker_id']}"))[0] == 409
            assert (await call("POST", "/admin/weight_version", {"weight_version": 7}))[1] == {
                "weight_version": 7
            }
            assert (await call("GET", "/admin/weight_version"))[1] == {"weight_version": 7}
            assert (await call("POST", "/admin/weight_version", {"weight_version": "x"}))[0] == 400
            (completion,) = await chat(gateway, "later")
            assert (await call("GET", f"/traces/{completion}"))[1]["weight_version"] == 7
            assert (await call("POST", "/admin/reload"))[0] == 200
