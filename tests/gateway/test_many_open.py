"""More calls at once than connections or turns of the loop: they wait, and none fails for their number."""

import asyncio
import errno
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import rllm.gateway.upstream.http
from rllm.errors import RequestRefused
from rllm.files import descriptors
from rllm.gateway.server import Gateway
from rllm.gateway.server.pace import Pace
from rllm.gateway.upstream import UpstreamPolicy
from rllm.gateway.upstream.pool import UpstreamPool

sys.path.insert(0, str(Path(__file__).parent))
import keyed_upstream as keyed


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[Any, Gateway]]:
    async with (
        keyed.KeyedUpstream(pause_s=0.001) as upstream,
        Gateway(UpstreamPolicy([upstream.url]), directory, token=None, grace_s=1.0) as gateway,
    ):
        yield upstream, gateway


async def test_calls_wait_when_there_are_more_than_connections_to_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rllm.gateway.upstream.http, "most_connections", lambda: 3)

    async def ask(number: int) -> int:
        said = [{"role": "user", "content": f"key=s{number} go"}]
        body = {"model": "any", "messages": said, "stream": number % 2 == 0}
        async with session.post(f"{gateway.url}/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status

    async with serving(tmp_path) as (upstream, gateway), aiohttp.ClientSession() as session:
        calls = asyncio.gather(*(ask(number) for number in range(60)))
        most_queued = 0
        while not calls.done():
            most_queued = max(most_queued, gateway.policy.health()["queued"])
            await asyncio.sleep(0)
        assert set(calls.result()) == {200}
        assert 3 < most_queued <= 57, "what waits for a connection is told"
        assert upstream.most_open == 3
        assert gateway.ledger.counts()["ok"] == 60


async def test_requests_that_arrive_together_begin_a_few_in_each_turn_of_the_loop_and_in_order() -> None:
    pace = Pace(per_turn=4)
    begun: list[int] = []

    async def begin(number: int) -> None:
        await pace.take()
        begun.append(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(18)]
    tasks[9].cancel()
    turns: list[int] = []
    while not all(task.done() for task in tasks):
        before = len(begun)
        await asyncio.sleep(0)
        turns.append(len(begun) - before)
    assert begun == [number for number in range(18) if number != 9]
    assert max(turns) <= 4


async def test_a_server_that_breaks_down_under_hundreds_of_calls_is_tried_again_as_soon_as_under_one() -> (
    None
):
    pool = UpstreamPool.of(["http://127.0.0.1:1/v1"])
    (upstream,) = pool.upstreams
    for _ in range(300):
        pool.unreachable(upstream, "no connection")
    assert 0 < pool.retry_after_s < 1.0
    with pytest.raises(RequestRefused), pool.lease("s"):
        pass
    first = upstream.backoff_s()
    upstream.out_until -= 10.0
    with pool.lease("s"):
        pool.unreachable(upstream, "still none")
    assert upstream.failures == 2
    assert upstream.backoff_s() > first / 2


async def test_a_gateway_in_any_process_may_open_as_many_files_as_the_machine_allows(tmp_path: Path) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        async with serving(tmp_path) as (_, gateway):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
            assert gateway.policy._http._room._value >= min(hard, 1 << 22) // 6
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_a_server_without_descriptors_says_so_once_and_not_for_each_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors._SELDOM_REFUSED, "_written_s", float("-inf"))
    descriptors.quiet_refused_connections()
    descriptors.quiet_refused_connections()
    loop = asyncio.new_event_loop()
    context = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "files"),
    }
    for _ in range(1000):
        loop.call_exception_handler(context)
    loop.call_exception_handler({"message": "something else"})
    loop.close()
    assert [record.message for record in caplog.records] == [context["message"], "something else"]
    assert caplog.records[0].exc_info is None
