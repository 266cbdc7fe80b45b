"""A server's errors, and what they mean for who asked: try later, never again, or a prompt too long."""

import asyncio
import resource
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import aiohttp
import orjson
import pytest
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


def test_why_a_server_cannot_be_reached_is_told_without_speaking_of_ssl() -> None:
    key = ConnectionKey("host", 80, False, True, None, None, None)
    refused = aiohttp.ClientConnectorError(key, OSError(111, "whatever"))
    resolved = aiohttp.ClientConnectorError(key, OSError(-2, "Name or service not known"))
    assert openai_http._cause(refused) == "Connection refused"
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
