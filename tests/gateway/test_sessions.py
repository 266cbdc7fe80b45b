"""Sessions: named in many ways, with settings of their own, rebuilt from the ledger, bounded in memory."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import openai
import pytest

from rllm.errors import RequestRefused
from rllm.gateway.server import Gateway
from rllm.gateway.server.sessions import derived_seed

Serve = Callable[..., Any]
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def bearer(gateway: Gateway) -> dict[str, str]:
    return {"Authorization": f"Bearer {gateway.token}"}


@pytest.mark.parametrize(
    ("path", "headers", "more", "session"),
    [
        ("/v1", {}, {}, "default"),
        ("/sessions/lake/v1", {}, {}, "lake"),
        ("/sessions/lake/3/v1", {}, {}, "lake/3"),
        ("/sessions/lake%2F3/v1", {}, {}, "lake/3"),
        ("/sessions/a/v1/b/v1", {}, {}, "a/v1/b"),
        ("/sessions/v1/v1", {}, {}, "v1"),
        ("/sessions/caf%C3%A9%20%F0%9F%8F%94/v1", {}, {}, "café 🏔"),
        ("/sessions/a%3Fb%23c/v1", {}, {}, "a?b#c"),
        ("/v1", {"X-Session-ID": "head"}, {}, "head"),
        ("/v1", {"session-id": "codex"}, {"session_id": "body"}, "codex"),
        ("/v1", {"x-rllm-session": "first", "x-session-id": "second"}, {}, "first"),
        ("/v1", {}, {"session_id": "body/1"}, "body/1"),
        ("/sessions/path/v1", {"x-session-id": "head"}, {"session_id": "body"}, "path"),
    ],
)
async def test_a_session_is_named_by_path_header_or_body(
    serve: Serve, path: str, headers: dict[str, str], more: dict[str, str], session: str
) -> None:
    gateway: Gateway = await serve()
    async with aiohttp.ClientSession(headers=bearer(gateway)) as http:
        from yarl import URL  # keeps escapes as they are written

        url = URL(f"{gateway.url}{path}/chat/completions/?x=1", encoded=True)
        async with http.post(url, json=BODY | more, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
    assert gateway.policy.sessions == [session]
    assert gateway.policy.requests[0].body == BODY, "what names the session is not sent on"
    assert len(gateway.ledger.traces(session)) == 1


async def test_any_id_can_be_opened_and_reached_through_its_base_url(serve: Serve) -> None:
    gateway: Gateway = await serve()
    for name in ("a/b", "x v1/v1/v1", "50%", "ü/?#&=", "task:3/0", "/v1/chat/completions", "a//b", "a/../b"):
        session = gateway.open_session(name)
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="x") as client:
            await client.chat.completions.create(**BODY)
        assert [each.session for each in session.traces()] == [name]


@pytest.mark.parametrize("name", ["", ".", "..", "a\nb", "x" * 513, "\ud800"])
async def test_an_id_that_no_url_can_carry_is_refused(serve: Serve, name: str) -> None:
    gateway: Gateway = await serve()
    with pytest.raises(RequestRefused, match="session id"):
        gateway.open_session(name)


async def test_seed_and_sampling_reach_the_policy_and_outlive_a_restart(serve: Serve) -> None:
    before: Gateway = await serve(token="t")
    before.open_session("s", seed=7, sampling={"temperature": 0.3}, metadata={"task": "lake"})
    before.open_session("free")
    await before.close()
    after: Gateway = await serve(token="t")
    async with openai.AsyncOpenAI(base_url=after.url + "/sessions/s/v1", api_key="t") as client:
        await client.chat.completions.create(**BODY, temperature=1.0)
    async with openai.AsyncOpenAI(base_url=after.url + "/sessions/free/v1", api_key="t") as client:
        await client.chat.completions.create(**BODY)
    assert after.policy.seeds == [7, derived_seed("free")]
    assert after.ledger.traces("s")[0].sampling["temperature"] == 0.3
    assert after.sessions.get("s").metadata == {"task": "lake"}
    assert derived_seed("free") != derived_seed("other")


async def test_sessions_are_created_listed_read_and_deleted_over_http(serve: Serve) -> None:
    gateway: Gateway = await serve()
    async with aiohttp.ClientSession(headers=bearer(gateway)) as http:

        async def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
            async with http.request(method, gateway.url + path, json=body) as reply:
                return reply.status, await reply.json()

        settings = {"seed": 3, "sampling": {"top_p": 0.9}, "metadata": {"k": [1]}}
        status, made = await call("POST", "/sessions", {"session_id": "a/1", **settings})
        assert status == 200
        assert made["session_id"] == "a/1"
        assert made["seed"] == 3
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key="x") as client:
            await client.chat.completions.create(**BODY)
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/sessions/a%2F1/v1", api_key=made["token"]
        ) as client:
            await client.chat.completions.create(**BODY)
        assert (await call("POST", "/sessions", {"session_id": "a/1", **settings}))[0] == 200
        published = {"seed": 3, "sampling_params": {"top_p": 0.9}, "metadata": {"k": [1]}}
        assert (await call("POST", "/sessions", {"session_id": "a/1", **published}))[0] == 200
        assert (await call("POST", "/sessions", {"session_id": "a/1", "seed": 4}))[0] == 409
        assert (await call("POST", "/sessions"))[1]["session_id"].startswith("s-")
        assert (await call("GET", "/sessions/a/1"))[1] == {"session_id": "a/1", **settings}
        names = []
        after = ""
        while after is not None:
            page = (await call("GET", f"/sessions?limit=1&after={after}"))[1]
            names += [each["id"] for each in page["sessions"]]
            after = page["next_after"]
        assert names[0] == "a/1"
        assert len(names) == 2
        assert len((await call("GET", "/sessions/a/1/traces"))[1]) == 2
        assert (await call("DELETE", "/sessions/a/1"))[1]["records"] == 2
        assert (await call("GET", "/sessions/a/1/traces"))[0] == 404
        assert (await call("DELETE", "/sessions/a/1"))[0] == 404
        assert (await call("GET", "/sessions/never"))[0] == 404
        for bad in (
            {"session_id": 7},
            {"seed": -1},
            {"seed": "x"},
            {"seed": True},
            {"sampling": {"temperature": -1}},
            {"sampling": {"temperature": "hot"}},
            {"sampling": {"stop": ["x"]}},
            {"sampling": [1]},
            {"sampling": {}, "sampling_params": {}},
            {"metadata": 3},
            {"sedd": 1},
            [1],
        ):
            status, told = await call("POST", "/sessions", bad)
            assert status == 400, bad
            assert told["error"]["message"], bad
        for limit in ("0", "x", "99999999", "-1", "²"):
            assert (await call("GET", f"/sessions?limit={limit}"))[0] == 400


async def test_unknown_sessions_can_be_refused(serve: Serve) -> None:
    gateway: Gateway = await serve(require_session=True)
    known = gateway.open_session("known")
    async with openai.AsyncOpenAI(base_url=known.base_url, api_key="x") as client:
        await client.chat.completions.create(**BODY)
    for url in (gateway.base_url, f"{gateway.url}/k/{gateway.token}/sessions/other/v1"):
        async with openai.AsyncOpenAI(base_url=url, api_key="x") as client:
            with pytest.raises(openai.NotFoundError, match="no session"):
                await client.chat.completions.create(**BODY)
    assert len(gateway.policy.requests) == 1


async def test_idle_sessions_leave_memory_and_come_back_with_their_history(serve: Serve) -> None:
    gateway: Gateway = await serve(max_idle_sessions=3)
    async with aiohttp.ClientSession(headers=bearer(gateway)) as http:

        async def call(session: str) -> None:
            url = f"{gateway.url}/sessions/{session}/v1/chat/completions"
            async with http.post(url, json=BODY) as reply:
                assert reply.status == 200

        for number in range(10):
            await call(f"s{number}")
        assert len(gateway.sessions) <= 3
        assert [len(each) for each in gateway.policy.histories] == [0] * 10  # new ones are not looked up
        await call("s0")
        assert [each.session for each in gateway.policy.histories[-1]] == ["s0"]


async def test_a_session_with_a_call_on_its_way_stays_in_memory(serve: Serve, scripted: ModuleType) -> None:
    hold = asyncio.Event()
    gateway: Gateway = await serve(
        lambda request: scripted.Say(hold=hold if request.model == "slow" else None), max_idle_sessions=1
    )
    busy = gateway.open_session("busy")
    async with openai.AsyncOpenAI(base_url=busy.base_url, api_key="x") as client:
        waiting = asyncio.create_task(client.chat.completions.create(**BODY | {"model": "slow"}))
        while not gateway.num_in_flight:
            await asyncio.sleep(0.005)
        for number in range(5):
            url = gateway.open_session(f"s{number}").base_url
            async with openai.AsyncOpenAI(base_url=url, api_key="x") as other:
                await other.chat.completions.create(**BODY)
        assert gateway.sessions.in_memory("busy") is not None
        hold.set()
        await waiting


async def test_deleting_a_session_stops_its_calls_and_leaves_nothing(
    serve: Serve, scripted: ModuleType, tmp_path: Path
) -> None:
    gateway: Gateway = await serve(lambda request: scripted.Say(hold=asyncio.Event()))
    session = gateway.open_session("s")
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key="x", max_retries=0) as client:
        waiting = asyncio.create_task(client.chat.completions.create(**BODY))
        while not gateway.num_in_flight:
            await asyncio.sleep(0.005)
        deletion = aiohttp.ClientSession(headers=bearer(gateway))
        async with deletion as http, http.delete(gateway.url + "/sessions/s") as reply:
            assert reply.status == 200
        with pytest.raises(openai.APIStatusError):
            await waiting
    assert session.traces() == []
    assert gateway.ledger.sessions() == []
