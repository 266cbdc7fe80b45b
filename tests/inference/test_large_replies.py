"""Servers that answer a question with gigabytes, packed into a few bytes or not."""

import asyncio
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rllm.errors import InferenceError
from rllm.inference import openai_http
from rllm.inference.openai import OpenAIClient

PIECE = b" " * (1 << 20)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._flood()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._flood()

    def _flood(self) -> None:
        packed = self.server.packed  # type: ignore[attr-defined]
        body = gzip.compress(PIECE * 64) if packed else PIECE * 64
        self.send_response(400 if self.path.endswith("/refused") else 200)
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has heard enough

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.packed = request.param  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}/v1"
    made.shutdown()
    made.server_close()
    thread.join()


async def test_an_answer_without_end_is_not_read_to_its_end(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_http, "MAX_REPLY_BYTES", 4 << 20)
    client = OpenAIClient(url, "m")
    try:
        with pytest.raises(InferenceError, match="4 MiB"):
            await client.get_model_response([{"role": "user", "content": "a"}])
    finally:
        await client.close()


@pytest.mark.parametrize("url", [False], indirect=True)
async def test_an_answer_that_is_not_read_to_its_end_lets_go_of_its_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_http, "MAX_REPLY_BYTES", 1 << 20)
    http = openai_http.ServerHttp(url, api_key=None, timeout_s=20, connect_timeout_s=20, max_connections=1)
    kept: list[Exception] = []
    """Whoever keeps an error keeps what its traceback holds."""
    async with asyncio.timeout(20):
        for path in ("/chat/completions", "/refused") * 2:
            with pytest.raises((InferenceError, openai_http.HttpRefusal)) as caught:
                await http.post(path, {})
            kept.append(caught.value)
    assert [type(each) for each in kept] == [InferenceError, openai_http.HttpRefusal] * 2
    await http.close()
