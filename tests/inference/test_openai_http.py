"""A server's errors, and what they mean for who asked: try later, never again, or a prompt too long."""

import asyncio
import gc
import os
import resource
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey

from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.inference import openai_http
from rllm.inference.openai_http import AskedOnce, HttpRefusal, ServerHttp, error_text


def error_of(status: int, reply: Any, retry_after: str | None = None) -> Exception:
    body = reply if isinstance(reply, bytes) else orjson.dumps(reply)
    return openai_http._error("http://s/v1", status, body, retry_after)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_is_too_long_is_told_by_its_code_or_its_words(status: int) -> None:
    by_code = {"error": {"code": "context_length_exceeded", "message": "no"}}
    by_words = {"error": {"message": "This is longer than the maximum model length"}}
    for reply in (by_code, by_words, {"detail": "the context length is 5"}):
        assert isinstance(error_of(status, reply), ContextLengthError)
        assert not isinstance(error_of(404, reply), ContextLengthError)


REFUSALS = dict.fromkeys((400, 401, 404, 499), True) | dict.fromkeys(
    (302, 399, 408, 409, 425, 429, 500, 503), False
)


@pytest.mark.parametrize(("status", "is_refusal"), REFUSALS.items())
def test_what_a_server_would_say_again_is_a_refusal_and_the_rest_may_be_asked_for_again(
    status: int, is_refusal: bool
) -> None:
    error = error_of(status, {"error": {"message": "words", "param": "top_k"}}, "3")
    assert isinstance(error, HttpRefusal if is_refusal else InferenceError)
    assert "words" in str(error)
    assert str(status) in str(error)
    if isinstance(error, HttpRefusal):
        assert (error.status, error.message, error.param, error.is_json) == (status, "words", "top_k", True)
    elif isinstance(error, InferenceError):
        assert error.retry_after_s == 3.0
        assert not error.is_final


def test_a_page_is_no_word_of_the_server_and_a_long_one_is_cut() -> None:
    page = error_of(404, b"<html>" + b"x" * 10_000)
    assert isinstance(page, HttpRefusal)
    assert not page.is_json
    assert page.param == ""
    assert page.message.startswith("<html>")
    assert len(page.message) < 10_000


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ({"error": {"message": "a", "detail": "b"}}, "a"),
        ({"error": {"detail": "b"}}, "b"),
        ({"error": "plain"}, "plain"),
        ({"detail": "of FastAPI"}, "of FastAPI"),
        ({"message": "m"}, "m"),
        ({}, ""),
        (None, ""),
        ("words", "words"),
    ],
)
def test_the_message_of_an_error_is_found_in_every_form(reply: Any, text: str) -> None:
    assert error_text(reply) == text


def test_when_to_come_back_is_told_in_seconds_or_by_a_date() -> None:
    now = datetime.now(UTC)
    seconds_of = openai_http._seconds
    assert [seconds_of(each) for each in (None, "soon", "nan", "inf")] == [None] * 4
    assert [seconds_of(each) for each in ("2.5", "0", "-1")] == [2.5, 0.0, 0.0]
    assert seconds_of(format_datetime(now - timedelta(hours=1))) == 0.0
    assert 3000 < (seconds_of(format_datetime(now + timedelta(hours=1))) or 0.0) < 4000


@pytest.mark.parametrize("name", ["timeout_s", "connect_timeout_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_wait_that_is_no_time_is_refused_by_name(name: str, value: float) -> None:
    waits: dict[str, float] = {"timeout_s": 1.0, "connect_timeout_s": 0.5, name: value}
    with pytest.raises(ConfigError, match=f"`{name}`"):
        ServerHttp("http://s", api_key=None, **waits)


@pytest.mark.parametrize(("num_files", "most"), [(1000, 750), (10, 8), (resource.RLIM_INFINITY, 0)])
async def test_as_many_connections_are_open_as_the_process_may_have_files_unless_it_is_told(
    monkeypatch: pytest.MonkeyPatch, num_files: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (num_files, num_files))
    for wanted, limit in ((0, most), (3, 3)):
        http = ServerHttp("http://s", api_key=None, timeout_s=1, connect_timeout_s=1, max_connections=wanted)
        connector = http.session.connector
        assert connector is not None
        assert connector.limit == limit
        await http.close()
    http = ServerHttp("http://s", api_key=None, timeout_s=1, connect_timeout_s=1)
    assert http.session.connector is not None
    assert http.session.connector.limit == most
    await http.close()
    with pytest.raises(ConfigError, match="`max_connections` is -1"):
        ServerHttp("http://s", api_key=None, timeout_s=1, connect_timeout_s=1, max_connections=-1)


async def test_a_key_is_sent_where_there_is_one() -> None:
    for key, headers in ((None, {}), ("k-1", {"Authorization": "Bearer k-1"})):
        http = ServerHttp("http://s", api_key=key, timeout_s=1, connect_timeout_s=1)
        assert {
            name: http.session.headers[name] for name in http.session.headers if name != "Accept-Encoding"
        } == headers
        await http.close()


def test_sessions_of_event_loops_that_ended_are_let_go() -> None:
    http = ServerHttp("http://s", api_key=None, timeout_s=1, connect_timeout_s=1)

    async def session() -> aiohttp.ClientSession:
        assert http.session is http.session, "one for each loop"
        return http.session

    first = asyncio.run(session())
    second = asyncio.run(session())
    assert first is not second
    assert list(http._sessions.values()) == [second]
    asyncio.run(http.close())
    assert not http._sessions
    assert second.connector is None, "nothing is left that warns when it is collected"


async def test_a_pool_of_another_threads_loop_is_closed_there() -> None:
    http = ServerHttp("http://s", api_key=None, timeout_s=1, connect_timeout_s=1)
    mine, loop = http.session, asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def session() -> aiohttp.ClientSession:
        return http.session

    theirs = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session(), loop))
    assert theirs is not mine
    await http.close()
    assert mine.closed
    assert theirs.closed
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Server:
    """Answers every call with what it is told to, and says what it was asked."""

    def __init__(self) -> None:
        self.reply = web.Response()
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, dict(request.headers), await request.read()))
        return self.reply


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, ServerHttp]]:
    """It, and a client that has one connection and a key."""
    server, app = Server(), web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    http = ServerHttp(
        f"http://{host}:{port}/v1", api_key=KEY, timeout_s=2, connect_timeout_s=2, max_connections=1
    )
    yield server, http
    await http.close()
    await runner.cleanup()


KEY = "of-a-test-7f3a9c21d4"


async def test_a_reply_is_json_or_nothing(server: tuple[Server, ServerHttp]) -> None:
    told, http = server
    for status, text, get_gives, post_gives in (
        (200, "[1]", [1], [1]),
        (200, "page", None, None),
        (201, "[1]", None, InferenceError),
        (404, "[1]", None, HttpRefusal),
        (500, "[1]", None, InferenceError),
        (302, "[1]", None, InferenceError),
    ):
        told.reply = web.Response(status=status, text=text)
        assert await http.get(f"{http.base_url}/models") == get_gives
        for path in ("/chat", f"{http.base_url}/chat"):  # each of which needs the one connection
            told.reply = web.Response(status=status, text=text)
            if isinstance(post_gives, type):
                with pytest.raises(post_gives):
                    await http.post(path, {})
            else:
                assert await http.post(path, {}) == post_gives
    assert {path for path, _, _ in told.requests} == {"/v1/models", "/v1/chat"}


@pytest.mark.parametrize("length", [3, 1 << 20, 3 << 20])
async def test_a_body_arrives_whole_with_the_headers_of_the_call(
    server: tuple[Server, ServerHttp], length: int
) -> None:
    told, http = server
    told.reply = web.Response(text="{}")
    await http.post("/chat", {"text": "a" * length}, {"X-Name": "b"})
    ((_, headers, content),) = told.requests
    assert orjson.loads(content) == {"text": "a" * length}
    assert (headers["X-Name"], headers["Content-Type"]) == ("b", "application/json")
    assert headers["Authorization"] == f"Bearer {KEY}"


async def test_a_redirection_is_not_followed(server: tuple[Server, ServerHttp]) -> None:
    told, http = server
    told.reply = web.Response(status=307, headers={"Location": "/elsewhere"})
    with pytest.raises(InferenceError, match="307"):
        await http.post("/chat", {})
    assert len(told.requests) == 1


async def test_a_key_that_a_server_repeats_is_not_repeated_here(server: tuple[Server, ServerHttp]) -> None:
    told, http = server
    told.reply = web.Response(status=401, text=f"the key {KEY} is wrong")
    with pytest.raises(HttpRefusal) as refusal:
        await http.post("/chat", {})
    told.reply = web.Response(text=orjson.dumps({"key": KEY, "plain": "text"}).decode())
    reply = await http.post("/chat", {})
    assert KEY not in f"{refusal.value} {refusal.value.message} {reply}"
    assert "401" in str(refusal.value)
    assert reply["plain"] == "text"


@pytest.mark.parametrize(("num_bytes", "is_read"), [(10, True), (11, False)])
async def test_of_a_reply_no_more_is_read_than_an_answer_can_have(
    server: tuple[Server, ServerHttp], monkeypatch: pytest.MonkeyPatch, num_bytes: int, is_read: bool
) -> None:
    monkeypatch.setattr(openai_http, "MAX_REPLY_BYTES", 10)
    told, http = server
    told.reply = web.Response(text=f'"{"a" * (num_bytes - 2)}"')
    if is_read:
        assert await http.get(http.base_url) == "a" * 8
    else:
        with pytest.raises(InferenceError, match="more than"):
            await http.get(http.base_url)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_failure_that_nobody_waits_for_any_more_is_no_news(is_cancelled: bool) -> None:
    news: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: news.append(context))
    may_answer = asyncio.Event()

    async def ask() -> int:
        await may_answer.wait()
        raise asyncio.CancelledError if is_cancelled else InferenceError("away")

    fact = AskedOnce(ask)
    waiting = asyncio.create_task(fact())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    may_answer.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del fact, waiting, ask
    gc.collect()
    await asyncio.sleep(0)
    assert news == []


def test_why_a_server_cannot_be_reached_is_told_without_speaking_of_ssl() -> None:
    key = ConnectionKey("host", 80, False, True, None, None, None)
    refused = aiohttp.ClientConnectorError(key, OSError(111, "whatever"))
    resolved = aiohttp.ClientConnectorError(key, OSError(-2, "Name or service not known"))
    not_permitted = aiohttp.ClientConnectorError(key, OSError(1, "whatever"))
    without_number = aiohttp.ClientConnectorError(key, OSError("whatever"))
    assert openai_http._cause(refused) == "Connection refused"
    assert openai_http._cause(not_permitted) == os.strerror(1)
    assert openai_http._cause(without_number) != os.strerror(0), "which would be: success"
    assert openai_http._cause(resolved) == "Name or service not known"
    assert openai_http._cause(TimeoutError()) == "TimeoutError"
    assert openai_http._cause(aiohttp.ClientPayloadError("cut")) == "cut"


async def test_a_fact_is_asked_for_once_by_all_that_wait_and_again_after_a_failure() -> None:
    calls: list[int] = []
    may_answer = asyncio.Event()

    async def ask() -> int:
        calls.append(len(calls))
        await may_answer.wait()
        if len(calls) == 1:
            raise InferenceError("away")
        return 7

    fact = AskedOnce(ask)
    waiting = [asyncio.create_task(fact()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    may_answer.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in outcomes] == [asyncio.CancelledError, InferenceError, InferenceError]
    assert (len(calls), fact.value) == (1, None)
    assert [await fact(), await fact(), fact.value, len(calls)] == [7, 7, 7, 2]
