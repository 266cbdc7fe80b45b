"""A call is tried again when another try may help, in one place, a bounded number of times."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import PartialAnswer, RequestRefused
from rllm.gateway.upstream import UpstreamPolicy
from rllm.gateway.upstream.pool import HealthChecks
from rllm.types.wire import Answer

sys.path.insert(0, str(Path(__file__).parent))
import fake_upstream as fake

Connect = Callable[..., Any]
NO_CHECKS = HealthChecks(interval_s=0)


@pytest.fixture
async def servers() -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(fake.FakeUpstream(answer=name)) for name in ("a", "b")]


@pytest.fixture
async def connect(servers: list[Any]) -> AsyncIterator[Connect]:
    policies: list[UpstreamPolicy] = []

    async def start(*upstreams: Any, **options: Any) -> UpstreamPolicy:
        urls = [each if isinstance(each, str) else each.url for each in upstreams or servers]
        policy = UpstreamPolicy(urls, **{"max_wait_s": 5.0, "checks": NO_CHECKS} | options)
        policies.append(policy)
        await policy.start()
        return policy

    yield start
    for policy in policies:
        health = policy.health()
        assert (health["in_flight"], health["queued"]) == (0, 0)
        assert all(each["in_flight"] == 0 for each in health["upstreams"])
        await policy.close()


@pytest.mark.parametrize("status", [429, 502, 503, 504, 529])
async def test_a_busy_server_is_asked_again_when_it_says(
    servers: list[Any], connect: Connect, status: int
) -> None:
    only = servers[0]
    only.script = [fake.refuse(status, retry_after="0")] * 2
    policy = await connect(only)
    assert (await policy.answer(fake.chat("hi"), fake.Session())).choices[0].text == "a"
    assert len(only.asked) == 3
    assert policy.health()["retries"] == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 500, 501])
async def test_other_errors_reach_the_client_after_one_try(
    servers: list[Any], connect: Connect, status: int
) -> None:
    only = servers[0]
    only.default = fake.refuse(status, "so it is")
    policy = await connect(only)
    with pytest.raises(RequestRefused, match="so it is") as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert refused.value.status == status
    assert len(only.asked) == 1


async def test_after_the_last_try_the_client_gets_the_servers_own_error(
    servers: list[Any], connect: Connect
) -> None:
    only = servers[0]
    only.default = fake.refuse(429, "slow down", retry_after="0.01")
    policy = await connect(only, max_retries=3)
    with pytest.raises(RequestRefused, match="slow down") as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert (refused.value.status, refused.value.retry_after) == (429, "0.01")
    assert len(only.asked) == 4


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_a_wait_that_is_too_long_is_left_to_the_client(
    servers: list[Any], connect: Connect, form: str
) -> None:
    retry_after = "3600" if form == "seconds" else formatdate(time.time() + 3600, usegmt=True)
    only = servers[0]
    only.default = fake.refuse(503, "later", retry_after=retry_after)
    policy = await connect(only)
    with pytest.raises(RequestRefused) as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert refused.value.retry_after == retry_after
    assert len(only.asked) == 1


async def test_another_server_is_asked_rather_than_waited_for(servers: list[Any], connect: Connect) -> None:
    policy = await connect()
    session = fake.Session()
    first = (await policy.answer(fake.chat("hi"), session)).choices[0].text
    busy = servers["ab".index(first)]
    busy.script = [fake.refuse(429, retry_after="3600")]
    assert (await policy.answer(fake.chat("hi"), session)).choices[0].text != first
    assert (await policy.answer(fake.chat("hi"), session)).choices[0].text == first


async def test_a_kept_connection_that_the_server_had_closed_costs_nothing(
    servers: list[Any], connect: Connect
) -> None:
    only = servers[0]
    only.script = [fake.speak, fake.drop]
    policy = await connect(only, max_retries=0)
    for _ in range(2):
        assert (await policy.answer(fake.chat("hi"), fake.Session())).choices[0].text == "a"
    assert policy.health()["upstreams"][0]["errors"] == 0


async def test_a_server_that_always_hangs_up_is_given_up(servers: list[Any], connect: Connect) -> None:
    only = servers[0]
    only.default = fake.drop
    policy = await connect(only, max_retries=1)
    with pytest.raises(RequestRefused, match="connection broke") as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert refused.value.status == 502
    assert len(only.asked) == 3


async def test_a_body_that_is_cut_off_is_asked_for_again(servers: list[Any], connect: Connect) -> None:
    async def cut(asked: Any) -> Any:
        response = fake.web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(asked.http)
        await response.write(b'{"choices": [')
        asked.http.transport.close()
        return response

    servers[0].script = [cut]
    policy = await connect(servers[0])
    assert (await policy.answer(fake.chat("hi"), fake.Session())).choices[0].text == "a"


async def test_nothing_is_tried_again_once_something_was_passed_on(
    servers: list[Any], connect: Connect
) -> None:
    hold = asyncio.Event()
    for server in servers:
        server.script = [fake.stream("hello", hold=hold, drop_after=2)]
    policy = await connect()
    heard = fake.Heard()
    call = asyncio.create_task(policy.answer(fake.chat("hi", stream=True), fake.Session(), heard))
    await asyncio.wait_for(heard.first.wait(), 10)
    hold.set()
    with pytest.raises(PartialAnswer):
        await call
    assert sum(len(server.asked) for server in servers) == 1


async def test_when_no_server_is_there_the_client_is_told_when_to_come_back(connect: Connect) -> None:
    policy = await connect(f"http://127.0.0.1:{fake.closed_port()}/v1", max_retries=0)
    assert not policy.health()["healthy"]
    with pytest.raises(RequestRefused, match="upstream") as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert (refused.value.status, refused.value.code) == (503, "no_upstream")
    assert int(refused.value.retry_after or "0") >= 1


async def test_a_call_is_given_up_when_its_only_server_stays_away(
    servers: list[Any], connect: Connect
) -> None:
    policy = await connect(servers[0], max_retries=0)
    await servers[0].stop()
    with pytest.raises(RequestRefused, match="no connection") as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert refused.value.status == 503
    assert int(refused.value.retry_after or "0") >= 1


async def test_a_call_waits_for_its_only_server_to_come_back(servers: list[Any], connect: Connect) -> None:
    policy = await connect(servers[0])
    await servers[0].stop()
    call = asyncio.create_task(policy.answer(fake.chat("hi"), fake.Session()))
    async with asyncio.timeout(10):
        while not policy.health()["queued"]:
            await asyncio.sleep(0.001)
    await servers[0].start()
    assert (await call).choices[0].text == "a"


async def test_a_client_that_goes_away_in_mid_stream_is_no_fault_of_the_server(
    servers: list[Any], connect: Connect
) -> None:
    async def gone(piece: Any) -> None:
        raise ConnectionResetError("the client is gone")

    policy = await connect(servers[0])
    with pytest.raises(ConnectionResetError):
        await policy.answer(fake.chat("hi", stream=True), fake.Session(), gone)
    assert policy.health()["upstreams"][0]["errors"] == 0


async def test_a_server_that_comes_late_is_found_and_asked_what_it_is(connect: Connect) -> None:
    server = fake.FakeUpstream(answer="late")
    server.port = fake.closed_port()
    policy = await connect(server.url, checks=HealthChecks(interval_s=0.01))
    assert policy.models() == []
    async with server:
        async with asyncio.timeout(10):
            while not policy.health()["healthy"]:
                await asyncio.sleep(0.01)
        answer = await policy.answer(fake.chat("hi"), fake.Session())
    assert answer.choices[0].completion_ids
    assert policy.models() == ["m"]


async def test_a_restart_between_two_calls_is_not_noticed(servers: list[Any], connect: Connect) -> None:
    only = servers[0]
    policy = await connect(only)
    session = fake.Session()
    await policy.answer(fake.chat("hi"), session)
    await only.stop()
    await only.start()
    assert (await policy.answer(fake.chat("hi"), session)).choices[0].text == "a"


async def test_a_sick_server_gets_no_calls_until_it_is_well(servers: list[Any], connect: Connect) -> None:
    sick = servers[0]
    policy = await connect(checks=HealthChecks(interval_s=0.005))
    sick.healthy = False
    async with asyncio.timeout(10):
        while policy.pool.upstreams[0].in_service:
            await asyncio.sleep(0.005)
    for n in range(10):
        assert (await policy.answer(fake.chat("hi"), fake.Session(id=f"s{n}"))).choices[0].text == "b"
    assert not sick.asked
    sick.healthy = True
    async with asyncio.timeout(10):
        while not policy.pool.upstreams[0].in_service:
            await asyncio.sleep(0.005)
    answers = [await policy.answer(fake.chat("hi"), fake.Session(id=f"t{n}")) for n in range(10)]
    assert "a" in {answer.choices[0].text for answer in answers}


async def test_a_server_without_a_health_path_is_asked_for_its_models(
    servers: list[Any], connect: Connect
) -> None:
    only = servers[0]
    only.health_path = False
    policy = await connect(only, checks=HealthChecks(interval_s=0.005))
    probes = only.num_probes
    async with asyncio.timeout(10):
        while only.num_probes < probes + 6:
            await asyncio.sleep(0.005)
    assert policy.health()["healthy"]


async def test_500_calls_at_once_are_spread_and_none_is_lost_when_a_server_dies(
    servers: list[Any], connect: Connect
) -> None:
    """Half of them streamed; one server is killed while its calls are under way."""
    gate = asyncio.Event()
    for server in servers:
        server.default = fake.say("whole answer", hold=gate)
    policy = await connect(max_retries=3)
    heard = [fake.Heard() for _ in range(500)]
    calls = [
        asyncio.create_task(
            policy.answer(fake.chat("hi", stream=n % 2 == 0), fake.Session(id=f"s{n}"), heard[n])
        )
        for n in range(500)
    ]
    async with asyncio.timeout(30):
        while sum(len(server.asked) for server in servers) < 500:
            await asyncio.sleep(0.01)
    assert [len(server.asked) for server in servers] == [250, 250]
    assert policy.health()["in_flight"] == 500
    await servers[0].stop()
    gate.set()
    answers = await asyncio.gather(*calls)
    assert all(answer.choices[0].text == "whole answer" for answer in answers)
    assert {answer.upstream for answer in answers} == {servers[1].url}
    assert all(heard[n].text == "whole answer" for n in range(0, 500, 2))
    assert not policy.pool.upstreams[0].in_service


async def test_every_call_of_a_batch_ends_whole_or_broken_off_when_its_server_dies_in_mid_stream(
    servers: list[Any], connect: Connect
) -> None:
    gate = asyncio.Event()
    for server in servers:
        server.default = fake.stream("whole answer", hold=gate)
    policy = await connect()
    heard = [fake.Heard() for _ in range(60)]
    calls = [
        asyncio.create_task(policy.answer(fake.chat("hi", stream=True), fake.Session(id=f"s{n}"), each))
        for n, each in enumerate(heard)
    ]
    async with asyncio.timeout(30):
        for each in heard:
            await each.first.wait()
    await servers[0].stop()
    gate.set()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    broken = [end for end in ends if isinstance(end, PartialAnswer)]
    whole = [end for end in ends if not isinstance(end, BaseException)]
    assert (len(whole), len(broken)) == (30, 30)
    assert all(isinstance(end.answer, Answer) and end.answer.choices[0].text == "w" for end in broken)
    assert sum(len(server.asked) for server in servers) == 60
