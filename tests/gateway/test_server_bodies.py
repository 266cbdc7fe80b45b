"""Bad bodies, paths and tokens get a 4xx in the client's own error shape, and the server lives on."""

import asyncio
import gzip
import io
import json
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.gateway.server import Gateway
from rllm.gateway.server.auth import Tokens
from rllm.gateway.server.bodies import MAX_DEPTH

Serve = Callable[..., Any]
POSTS = (
    "chat/completions",
    "completions",
    "responses",
    "messages",
    "messages?beta=true",
    "messages/count_tokens",
)
GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BAD_BODIES = {
    "empty": b"",
    "array": b"[1, 2]",
    "number": b"7",
    "no json": b"{'a': 1}",
    "cut off": b'{"messages": [',
    "not utf-8": b'{"messages": "\xff\xfe"}',
    "half a surrogate pair": b'{"model": "\\ud800", "messages": []}',
    "nan": b'{"temperature": NaN}',
    "very deep": b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "too deep": b'{"messages": ' + b"[" * 199 + b"[{}]" + b"]" * 199 + b"}",
    "too deep behind text": json.dumps({"a": "]" * 999}).encode()[:-1]
    + b', "b": '
    + b"[" * 300
    + b"]" * 300
    + b"}",
    "nothing in it": b"{}",
    "wrong types": b'{"model": 7, "messages": {"role": "user"}, "prompt": {}, "input": 3, "stream": "yes"}',
    "unknown role": b'{"messages": [{"role": "bard", "content": "x"}], "input": [{"role": "bard"}], '
    b'"prompt": null, "max_tokens": 3}',
    "bad session": b'{"session_id": 7, "messages": [{"role": "user", "content": "x"}]}',
    "long session": b'{"session_id": "' + b"x" * 600 + b'"}',
}


async def read_error(reply: aiohttp.ClientResponse, path: str) -> dict[str, Any]:
    """The error, once its shape is seen to be what the clients of `path` read."""
    body = json.loads(await reply.read())
    if path.startswith("messages"):
        assert body["type"] == "error"
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["type"], str)
    return body["error"]


def bearer(gateway: Gateway) -> dict[str, str]:
    return {"Authorization": f"Bearer {gateway.token}"}


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 this is TLS\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["tls", "header", "version", "length", "long line"],
)
async def test_what_is_no_http_is_refused_in_json(
    serve: Serve, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    gateway: Gateway = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # to the end: the connection is closed
    writer.close()
    assert head.split()[1] == b"400"
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert not caplog.records, "a port scan fills no log"
    async with aiohttp.ClientSession() as http, http.get(gateway.url + "/health") as reply:
        assert reply.status == 200


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_body_is_refused_on_a_connection_that_lives_on(serve: Serve, name: str) -> None:
    gateway: Gateway = await serve()
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector, headers=bearer(gateway)) as http:
        for path in POSTS:
            async with http.post(f"{gateway.url}/v1/{path}", data=BAD_BODIES[name]) as reply:
                assert reply.status == 400, await reply.text()
                error = await read_error(reply, path)
                assert (f"{MAX_DEPTH} levels" in error["message"]) == ("deep" in name)
        (connection,) = next(iter(connector._conns.values()))
        async with http.post(gateway.url + "/v1/chat/completions", json=GOOD) as reply:
            assert reply.status == 200
        assert connector._conns[next(iter(connector._conns))][0][0] is connection[0]


async def test_what_is_nested_less_than_the_limit_is_read(serve: Serve) -> None:
    gateway: Gateway = await serve()
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    body = json.dumps(GOOD)[:-1] + f', "metadata_of_mine": {deep}}}'
    async with (
        aiohttp.ClientSession(headers=bearer(gateway)) as http,
        http.post(gateway.url + "/v1/chat/completions", data=body) as reply,
    ):
        assert reply.status == 200, await reply.text()


async def test_compressed_and_chunked_bodies_of_any_content_type_are_read(serve: Serve) -> None:
    gateway: Gateway = await serve()
    plain = json.dumps(GOOD).encode()

    async def bit_by_bit() -> AsyncIterator[bytes]:
        for byte in plain:
            yield bytes([byte])

    raw = zlib.compressobj(wbits=-15)
    ways: list[tuple[Any, dict[str, str]]] = [
        (gzip.compress(plain), {"Content-Encoding": "gzip"}),
        (gzip.compress(plain[:9]) + gzip.compress(plain[9:]), {"Content-Encoding": "gzip"}),
        (zlib.compress(plain), {"Content-Encoding": "deflate"}),
        (raw.compress(plain) + raw.flush(), {"Content-Encoding": "deflate"}),
        (gzip.compress(zlib.compress(plain)), {"Content-Encoding": "deflate, gzip"}),
        (plain, {"Content-Encoding": "identity", "Content-Type": "text/csv"}),
        (plain, {"Expect": "100-continue"}),
        (bit_by_bit(), {}),
    ]
    async with aiohttp.ClientSession(headers=bearer(gateway)) as http:
        for data, headers in ways:
            async with http.post(
                gateway.url + "/v1/chat/completions/?x=1", data=data, headers=headers
            ) as reply:
                assert reply.status == 200, (headers, await reply.text())
        for data, headers, status in [
            (plain, {"Content-Encoding": "br"}, 415),
            (plain, {"Content-Encoding": "zstd"}, 415),
            (plain, {"Content-Encoding": "gzip"}, 400),
            (gzip.compress(plain)[:-9], {"Content-Encoding": "gzip"}, 400),
            (gzip.compress(b"") * 1000, {"Content-Encoding": "gzip"}, 400),
        ]:
            async with http.post(gateway.url + "/v1/messages", data=data, headers=headers) as reply:
                assert reply.status == status
                await read_error(reply, "messages")


async def test_bodies_that_are_too_large_are_refused_packed_or_not(serve: Serve) -> None:
    gateway: Gateway = await serve(max_body_bytes=3_000_000)
    bomb = gzip.compress(b" " * 50_000_000)
    within = gzip.compress(b'{"a": "' + b"x" * 2_500_000 + b'"}')

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b" " * 50_000

    async with aiohttp.ClientSession(headers=bearer(gateway)) as http:
        for data, headers, status in [
            (io.BytesIO(b" " * 3_000_001), {}, 413),
            (endless(), {}, 413),
            (bomb, {"Content-Encoding": "gzip"}, 413),
            (within, {"Content-Encoding": "gzip"}, 413),  # no honest text packs to a thousandth
            (gzip.compress(bomb), {"Content-Encoding": "gzip, gzip"}, 413),
        ]:
            async with http.post(gateway.url + "/v1/responses", data=data, headers=headers) as reply:
                assert reply.status == status
                assert (await read_error(reply, "responses"))["code"] == "body_too_large"
        async with http.post(gateway.url + "/v1/chat/completions", json=GOOD) as reply:
            assert reply.status == 200


async def test_unknown_paths_and_wrong_methods_are_told_in_shape(serve: Serve) -> None:
    gateway: Gateway = await serve()
    async with aiohttp.ClientSession(headers=bearer(gateway)) as http:
        for method, path, status in [
            ("GET", "nothing", 404),
            ("POST", "v1/embeddings", 404),
            ("POST", "sessions/x/v1/embeddings", 404),
            ("POST", "other/v1/chat/completions", 404),
            ("GET", "v1/chat/completions", 405),
            ("PUT", "v1/messages", 405),
            ("PATCH", "sessions", 405),
            ("POST", "sessions/x", 405),
            ("DELETE", "health", 405),
            ("OPTIONS", "v1/models", 405),
            ("POST", "sessions/%ff/v1/chat/completions", 400),
            ("POST", "sessions/%00/v1/chat/completions", 400),
            ("POST", "sessions/" + "x" * 600 + "/v1/messages", 400),
        ]:
            async with http.request(method, f"{gateway.url}/{path}") as reply:
                assert reply.status == status, (method, path)
                await read_error(reply, path.partition("v1/")[2])
                assert ("Allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize("token", ["secret", None])
async def test_clients_find_somebody_at_every_base_url(serve: Serve, token: str | None) -> None:
    """Claude Code asks with HEAD before its first call, so before there is a session."""
    gateway: Gateway = await serve(token=token)
    async with aiohttp.ClientSession() as http:
        for path in ("/", "/v1", "/sessions/a/b", "/sessions/a/v1/", "/k/secret", "/k/wrong/"):
            for method in ("HEAD", "GET"):
                async with http.request(method, gateway.url + path) as reply:
                    is_read = token is None and method == "GET" and path.startswith("/sessions")
                    assert reply.status == (404 if is_read else 200), (method, path)
                    assert "secret" not in await reply.text()


async def test_a_token_is_asked_for_in_any_of_its_forms(serve: Serve) -> None:
    gateway: Gateway = await serve()
    mine, theirs = gateway.open_session("mine"), gateway.open_session("theirs")
    own = mine.base_url.split("/")[4]
    token = gateway.token
    cases: list[tuple[str, dict[str, str], int]] = [
        ("/v1", {}, 401),
        ("/v1", {"Authorization": "Bearer wrong"}, 401),
        ("/v1", {"Authorization": f"Basic {token}"}, 401),
        ("/v1", {"Authorization": f"Bearer {token}x"}, 401),
        ("/v1", {"Authorization": "Bearer é"}, 401),
        ("/k/wrong/v1", {}, 401),
        ("/sessions/mine/v1", {"x-api-key": own[:-2] + "AA"}, 401),
        ("/v1", {"Authorization": f"bearer {token}"}, 200),
        ("/v1", {"x-api-key": token, "Authorization": "Bearer EMPTY"}, 200),
        (f"/k/{token}/v1", {"Authorization": "Bearer EMPTY"}, 200),
        (f"/k/{token}/sessions/mine/v1", {}, 200),
        ("/sessions/mine/v1", {"x-api-key": own}, 200),
        (f"/k/{own}/sessions/mine/v1", {}, 200),
        (f"/k/{own}/sessions/theirs/v1", {}, 403),
        (f"/k/{own}/sessions/mine/theirs/v1", {}, 403),
        (f"/k/{own}/v1", {}, 403),
        (f"/k/{own}/v1", {"x-session-id": "theirs"}, 403),
        (f"/k/{own}/v1", {"x-session-id": "mine"}, 200),
    ]
    async with aiohttp.ClientSession() as http:
        for prefix, headers, status in cases:
            for path in ("chat/completions", "messages"):
                body = GOOD | {"max_tokens": 3}
                url = f"{gateway.url}{prefix}/{path}"
                async with http.post(url, json=body, headers=headers) as reply:
                    assert reply.status == status, (prefix, headers)
                    if status != 200:
                        error = await read_error(reply, path)
                        assert token not in error["message"]
        for url, status in [
            (theirs.root_url.replace(theirs.base_url.split("/")[4], own) + "/traces", 403),
            (mine.root_url + "/traces", 200),
            (f"{gateway.url}/k/{own}/sessions", 403),
            (f"{gateway.url}/k/{own}/metrics", 403),
            (f"{gateway.url}/metrics", 401),
            (f"{gateway.url}/sessions", 401),
            (f"{gateway.url}/sessions/mine/traces", 401),
        ]:
            async with http.get(url) as reply:
                assert reply.status == status, url
        async with http.delete(mine.root_url) as reply:
            assert reply.status == 403
        async with http.delete(gateway.url + "/sessions/mine") as reply:
            assert reply.status == 401


async def test_without_a_token_everybody_on_this_machine_may_call(serve: Serve) -> None:
    gateway: Gateway = await serve(token=None)
    assert gateway.token is None
    assert "/k/" not in gateway.open_session("s").base_url
    async with (
        aiohttp.ClientSession() as http,
        http.post(gateway.base_url + "/chat/completions", json=GOOD) as reply,
    ):
        assert reply.status == 200
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="set a token"):
            Gateway(gateway.policy, gateway.ledger, host=host, token=None)


def test_tokens_are_new_each_time_and_safe_in_a_url() -> None:
    assert Tokens.new() != Tokens.new()
    with pytest.raises(ConfigError, match="safe in a URL"):
        Tokens("two words")
    assert Tokens("a").of_session("s") != Tokens("b").of_session("s")


async def test_a_connection_that_sends_no_http_harms_nobody(serve: Serve) -> None:
    gateway: Gateway = await serve()
    for data in (
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        + bearer(gateway)["Authorization"][7:].encode()
        + b"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(data)
        await writer.drain()
        writer.close()
    async with (
        aiohttp.ClientSession(headers=bearer(gateway)) as http,
        http.post(gateway.url + "/v1/chat/completions", json=GOOD) as reply,
    ):
        assert reply.status == 200


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
)
FIELDS = (
    "messages", "input", "prompt", "model", "stream", "n", "stop", "tools", "tool_choice", "max_tokens",
    "temperature", "top_p", "top_k", "seed", "logprobs", "top_logprobs", "response_format", "text", "system",
    "session_id", "stream_options", "echo", "logit_bias", "thinking", "instructions", "reasoning", "metadata",
    "max_completion_tokens", "parallel_tool_calls", "user", "functions", "return_token_ids", "output_config",
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "?"])},
        optional={
            "content": ANYTHING
            | st.lists(
                st.fixed_dictionaries(
                    {
                        "type": st.sampled_from(
                            [
                                "text",
                                "input_text",
                                "output_text",
                                "tool_use",
                                "tool_result",
                                "thinking",
                                "image_url",
                            ]
                        )
                    },
                    optional={"text": ANYTHING, "id": ANYTHING, "input": ANYTHING, "tool_use_id": ANYTHING},
                ),
                max_size=3,
            ),
            "tool_calls": ANYTHING,
            "tool_call_id": ANYTHING,
            "name": ANYTHING,
        },
    ),
    max_size=4,
)
BODIES = st.one_of(
    st.binary(max_size=60),
    ANYTHING.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(FIELDS, ANYTHING) | {"messages": MESSAGES, "input": MESSAGES},
    ).map(lambda value: json.dumps(value).encode()),
)


async def test_no_body_makes_the_server_fail(serve: Serve) -> None:
    """Every body is refused with a 4xx, or answered; whatever it is, never a 500."""
    gateway: Gateway = await serve(token=None)
    loop = asyncio.get_running_loop()

    async def post(http: aiohttp.ClientSession, path: str, body: bytes) -> None:
        async with http.post(f"{gateway.url}/v1/{path}", data=body) as reply:
            told = await reply.read()
            assert reply.status == 200 or 400 <= reply.status < 500, (path, body, told)
            if reply.status != 200:
                await read_error(reply, path)

    async with aiohttp.ClientSession() as http:

        @given(path=st.sampled_from(POSTS), body=BODIES)
        def fuzz(path: str, body: bytes) -> None:
            asyncio.run_coroutine_threadsafe(post(http, path, body), loop).result()

        await asyncio.to_thread(fuzz)
        await post(http, "chat/completions", json.dumps(GOOD).encode())
    gateway.counts.require_conserved(gateway.num_in_flight)


async def test_a_temperature_above_two_is_refused_in_every_protocol(serve: Serve) -> None:
    gateway: Gateway = await serve()
    asked = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}
    async with aiohttp.ClientSession(headers=bearer(gateway)) as http:
        for path in POSTS[:4]:
            for temperature, status in ((2, 200), (2.01, 400), (1e300, 400)):
                sent = {**asked.get(path, {**GOOD, "max_tokens": 4}), "temperature": temperature}
                async with http.post(f"{gateway.url}/v1/{path}", json=sent) as reply:
                    assert reply.status == status, (path, temperature, await reply.text())
                    if status == 400:
                        assert "from 0 to 2" in (await read_error(reply, path))["message"]
