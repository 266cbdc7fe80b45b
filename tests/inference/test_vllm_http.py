"""Replies of a vLLM server, over a real socket: chunks, refusals, and what a server does not have."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rllm.errors import ConfigError, InferenceError
from rllm.inference.vllm_http import VLLMHttp


class Server:
    """Answers by path with (status, type of the content, bytes)."""

    def __init__(self) -> None:
        self.replies: dict[str, tuple[int, str, bytes]] = {}
        self.bodies: list[Any] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        status, content_type, content = self.replies[request.path]
        return web.Response(status=status, content_type=content_type, body=content)

    def say(self, path: str, reply: Any, status: int = 200) -> None:
        self.replies[path] = (status, "application/json", json.dumps(reply).encode())


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[VLLMHttp]:
    app = web.Application()
    app.router.add_post("/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    waits = {"timeout_s": 5.0, "connect_timeout_s": 5.0}
    http = VLLMHttp(f"http://{host}:{port}/v1", api_key=None, max_connections=1, **waits)
    yield http
    await http.close()
    await runner.cleanup()


async def _chunks(http: VLLMHttp, **options: str) -> list[dict[str, Any]]:
    return [chunk async for chunk in http.complete({"prompt": [1]}, **options)]


async def test_an_answer_is_one_reply_or_the_chunks_of_a_stream(http: VLLMHttp, server: Server) -> None:
    server.say("/v1/completions", {"id": "a"})
    assert await _chunks(http) == [{"id": "a"}]
    stream = b'data: {"id": 1}\n\ndata: {"id": 2}\n\ndata: [DONE]\n\ndata: {"id": 3}\n\n'
    server.replies["/v1/completions"] = (200, "text/event-stream", stream)
    assert await _chunks(http) == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert server.bodies == [{"prompt": [1]}] * 2
    async for chunk in http.complete({"prompt": [2]}):
        assert chunk == {"id": 1}
        break  # and lets the one connection go
    for content_type, content in (("text/event-stream", b"data: 5\n\n"), ("application/json", b"[]")):
        server.replies["/v1/completions"] = (200, content_type, content)
        with pytest.raises(InferenceError, match="JSON"):
            await _chunks(http)


@pytest.mark.parametrize(
    ("status", "needs", "error"),
    [
        (400, "", ValueError),
        (422, "", ValueError),
        (404, "", InferenceError),
        (401, "", InferenceError),
        (423, "", InferenceError),
        (404, "a newer server", ConfigError),
        (403, "a newer server", ConfigError),
        (405, "a newer server", InferenceError),
        (400, "a newer server", ValueError),
    ],
)
async def test_a_refusal_is_the_callers_fault_the_servers_or_that_of_how_it_was_started(
    http: VLLMHttp, server: Server, status: int, needs: str, error: type[Exception]
) -> None:
    server.say("/v1/other", {"error": {"message": "words"}}, status)
    with pytest.raises(error, match="words") as raised:
        await _chunks(http, path="/other", needs=needs)
    assert raised.type is error
    assert ("a newer server" in str(raised.value)) is (error is ConfigError)


async def test_a_call_that_manages_a_server_goes_to_its_root(http: VLLMHttp, server: Server) -> None:
    server.say("/pause", {"is": "paused"})
    assert await http.tell("/pause", {"mode": "wait"}) == {"is": "paused"}
    assert server.bodies == [{"mode": "wait"}]
    server.replies["/pause"] = (200, "text/plain", b"")
    assert await http.tell("/pause", {}) is None, "no JSON is no reply"
    for status, error in ((404, ConfigError), (500, InferenceError), (201, InferenceError)):
        server.replies["/pause"] = (status, "text/plain", b"x" * 9000)
        with pytest.raises(error) as raised:
            await http.tell("/pause", {}, "a newer server")
        assert ("a newer server" in str(raised.value)) is (status == 404)
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("reply", "status", "ids"),
    [
        ({"tokens": [1, 2]}, 200, [1, 2]),
        ({"tokens": []}, 200, []),
        ({"tokens": "1 2"}, 200, None),
        ({"count": 2}, 200, None),
        ([1, 2], 200, None),
        ("no such call", 404, None),
    ],
)
async def test_the_ids_of_a_text_are_told_where_the_server_does_so(
    http: VLLMHttp, server: Server, reply: Any, status: int, ids: list[int] | None
) -> None:
    server.say("/tokenize", reply, status)
    assert await http.tokenize({"prompt": "a"}) == ids
    assert server.bodies == [{"prompt": "a"}]
