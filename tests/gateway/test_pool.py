"""Which server takes a call: the least loaded, or the one that knows the session, if it is in service."""

import asyncio
import socket
from contextlib import ExitStack

import pytest

from rllm.errors import ConfigError, RequestRefused
from rllm.gateway.upstream import UpstreamPolicy
from rllm.gateway.upstream.call import Failed
from rllm.gateway.upstream.http import HttpClient, SlowToConnect
from rllm.gateway.upstream.pool import FAILURES_BEFORE_OUT, HealthChecks, Upstream, UpstreamPool, base_url
from rllm.gateway.upstream.server_facts import Known

URLS = ["http://a:1", "http://b:1", "http://c:1"]


@pytest.fixture
def pool() -> UpstreamPool:
    return UpstreamPool.of(URLS)


def server_of(pool: UpstreamPool, session: str) -> Upstream:
    with pool.lease(session) as upstream:
        return upstream


def test_new_sessions_are_spread_and_each_stays_where_its_cache_is(pool: UpstreamPool) -> None:
    homes = {f"s{n}": server_of(pool, f"s{n}") for n in range(30)}
    assert [each.num_sessions for each in pool.upstreams] == [10, 10, 10]
    assert all(server_of(pool, session) is home for session, home in homes.items())


def test_calls_go_to_the_server_with_the_fewest_under_way(pool: UpstreamPool) -> None:
    with ExitStack() as under_way:
        busy = [under_way.enter_context(pool.lease(f"s{n}")) for n in range(2)]
        with pool.lease("new") as idle:
            assert idle not in busy
    assert [each.in_flight for each in pool.upstreams] == [0, 0, 0]


def test_a_server_of_twice_the_weight_takes_twice_the_calls() -> None:
    pool = UpstreamPool.of(URLS[:2], weights=[2, 1])
    with ExitStack() as under_way:
        for n in range(30):
            under_way.enter_context(pool.lease(f"s{n}"))
        assert [each.in_flight for each in pool.upstreams] == [20, 10]


def test_losing_a_server_moves_its_own_sessions_and_no_others(pool: UpstreamPool) -> None:
    homes = {f"s{n}": server_of(pool, f"s{n}") for n in range(30)}
    lost = pool.upstreams[1]
    pool.unreachable(lost, "no connection")
    for session, home in homes.items():
        now = server_of(pool, session)
        assert now is not lost
        assert (now is home) == (home is not lost)
    assert lost.num_sessions == 0


def test_a_session_that_was_sent_elsewhere_for_one_call_comes_home(pool: UpstreamPool) -> None:
    home = server_of(pool, "s")
    with pool.lease("s", avoid=[home]) as other:
        assert other is not home
    assert server_of(pool, "s") is home


def test_the_memory_of_sessions_is_bounded() -> None:
    pool = UpstreamPool([Upstream(url=url) for url in URLS], max_sticky=10)
    for n in range(100):
        server_of(pool, f"s{n}")
    assert sum(each.num_sessions for each in pool.upstreams) == 10
    assert pool.home_of("s99") is not None
    assert pool.home_of("s0") is None


def test_counters_return_to_zero_whatever_ends_a_call(pool: UpstreamPool) -> None:
    for error in (ValueError(), asyncio.CancelledError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), pool.lease("s"):
            raise error
    assert all(each.in_flight == 0 for each in pool.upstreams)


def test_an_unreachable_server_is_out_at_once_and_is_tried_again_by_one_call(pool: UpstreamPool) -> None:
    for each in pool.upstreams:
        pool.unreachable(each, "no connection")
    with pytest.raises(RequestRefused, match="http://b:1/v1: no connection") as refused, pool.lease("s"):
        pass
    assert refused.value.status == 503
    assert refused.value.retry_after == "1"
    due = pool.upstreams[2]
    due.out_until = 1e-9  # its time is up
    with pool.lease("s") as upstream:
        assert upstream is due
        with pytest.raises(RequestRefused), pool.lease("t"):
            pass
    due.note_success()
    assert server_of(pool, "t") is due


def test_each_failure_in_a_row_keeps_a_server_out_for_longer(pool: UpstreamPool) -> None:
    upstream = pool.upstreams[0]
    waits: list[float] = []
    for _ in range(10):
        upstream.failed("no", take_out=False)
        waits.append(upstream.backoff_s())
    assert waits[0] < 1 < waits[3] < waits[5]
    assert max(waits) <= 37.5
    upstream.note_success()
    assert upstream.failures == 0


def test_errors_take_a_server_out_unless_it_is_the_last(pool: UpstreamPool) -> None:
    first, second, last = pool.upstreams
    for _ in range(FAILURES_BEFORE_OUT - 1):
        pool.note_trouble(first, "500")
    assert first.in_service
    pool.note_trouble(first, "500")
    assert not first.in_service
    pool.unreachable(second, "gone")
    for _ in range(10):
        pool.note_trouble(last, "500")
    assert last.in_service


async def test_checks_bring_a_server_back_and_take_a_sick_one_out() -> None:
    pool = UpstreamPool.of(URLS[:2], checks=HealthChecks(interval_s=0.001, timeout_s=0.01))
    first, second = pool.upstreams
    pool.unreachable(first, "no connection")

    async def check(upstream: Upstream) -> None:
        if upstream is second:
            raise OSError("its health check answered 503")

    pool.start(check)
    async with asyncio.timeout(10):
        while not first.in_service or second.in_service:
            await asyncio.sleep(0.001)
    await pool.close()
    assert "503" in second.last_error


async def test_a_check_that_hangs_counts_as_a_failure() -> None:
    pool = UpstreamPool.of(URLS[:2], checks=HealthChecks(interval_s=0.001, timeout_s=0.005))

    async def check(upstream: Upstream) -> None:
        if upstream is pool.upstreams[0]:
            await asyncio.Event().wait()

    pool.start(check)
    async with asyncio.timeout(10):
        while pool.upstreams[0].in_service:
            await asyncio.sleep(0.001)
    await pool.close()
    assert "more than 0.005 s" in pool.upstreams[0].last_error


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/openai/v1/", "https://h/openai/v1"),
        ("http://[::1]:80/v1", "http://[::1]:80/v1"),
    ],
)
def test_a_host_alone_is_taken_for_its_v1(url: str, base: str) -> None:
    assert base_url(url) == base


def test_what_is_no_url_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for url in ("", "h:8000", "ftp://h/v1", "http://", "http://h:x/v1", "http://h/v1?a=b", "http://u:p@h/v1"):
        with subtests.test(url=url), pytest.raises(ConfigError):
            base_url(url)


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("inf")]])
def test_weights_that_do_not_fit_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        UpstreamPool.of(URLS[:2], weights=weights)


def test_a_server_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        UpstreamPool.of(["http://a:1", "http://a:1/v1"])


async def test_one_slow_connect_is_no_reason_to_take_a_server_out() -> None:
    """A full backlog, as of a server under load: its connections hang, and none is refused."""
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for each in waiting:
        each.setblocking(False)
        each.connect_ex(full.getsockname())
    client = HttpClient(timeout_s=5.0, connect_timeout_s=0.05, max_body_bytes=100)
    pool = UpstreamPool.of([f"http://127.0.0.1:{full.getsockname()[1]}", URLS[1]])
    slow, other = pool.upstreams
    policy = UpstreamPolicy(URLS[:1])
    policy.pool, policy._facts = pool, {each: Known() for each in pool.upstreams}
    try:
        for number in range(FAILURES_BEFORE_OUT):
            assert slow.in_service, f"after {number}"
            with pytest.raises(SlowToConnect, match="--connect-timeout") as error:
                async with client.post(slow.url, b"{}"):
                    pass
            refused = RequestRefused(str(error.value), status=503)
            policy._note(slow, Failed(refused, is_reached=False, slow=True))
        assert not slow.in_service
        policy._note(other, Failed(refused, is_reached=False))
        assert not other.in_service, "a connection that is refused says enough at once"
    finally:
        await client.close()
        for each in (*waiting, full):
            each.close()
