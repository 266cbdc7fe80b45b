"""A server that quotes the key it was sent, in every way that servers do: the key is nowhere afterwards."""

import asyncio
import base64
import html
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import Result

from rllm.errors import ContextLengthError, RequestRefused, RllmError
from rllm.gateway.server import Gateway
from rllm.gateway.upstream import UpstreamPolicy
from rllm.inference.anthropic import AnthropicClient
from rllm.inference.openai import OpenAIClient
from rllm.inference.vllm_http import VLLMHttp
from rllm.tools.web import Firecrawl, SerperSearch, TavilySearch
from rllm.tools.web_service import WebPatience
from rllm.types.messages import Message, ModelOutput
from rllm.types.wire import Dialect

sys.path.insert(0, str(Path(__file__).parent))
from http_thread import serving

Rllm = Callable[..., Result]
KEY = "sk-proj-Q7z/mK+e9<W&x2R4tY6uI8oP0aS1dF3gH5jK7lZ9xCvB"
ASK: list[Message] = [{"role": "user", "content": "2 + 2"}]
PIECE = 12
"""Characters of a key that are too many, wherever they stand."""

QUOTES: dict[str, Callable[[str], str]] = {
    "whole": lambda key: f"Incorrect API key provided: Bearer {key}.",
    "cut off": lambda key: f"No such key: {key[:30]}…",
    "its end": lambda key: f"No such key: …{key[-20:]}",
    "in an address": lambda key: f"GET /?key={quote(key, safe='')}",
    "in a page": lambda key: f"<b>{html.escape(key)}</b>",
    "packed": lambda key: f"Basic {base64.b64encode(key.encode()).decode()}",
    "often": lambda key: key * 3,
    "behind much": lambda key: "x" * 490 + key,
    "about the context": lambda key: f"maximum model length is 5; you are {key}",
}


class Server:
    """Refuses with `status`, or answers where it is 200, and quotes the key of the request in each field."""

    def __init__(self) -> None:
        self.status = 400
        self.quoted: Callable[[str], str] = QUOTES["whole"]
        self.form = "json"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.reply(self, 404)

            def do_POST(self) -> None:
                question = self.rfile.read(int(self.headers["content-length"]))
                outer.reply(self, 200 if b"Say hi" in question else outer.status)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def reply(self, request: BaseHTTPRequestHandler, status: int) -> None:
        headers = request.headers
        key = headers.get("x-api-key") or headers.get("Authorization", "").removeprefix("Bearer ")
        said = self.quoted(key)
        fields: dict[str, Any] = {"message": said, "type": said, "code": said, "param": said}
        value: dict[str, Any] = {"error": fields, "detail": said, "answer": said, "success": False}
        if status == 200:
            value = _answer(said, request.path)
        body = json.dumps(value)
        if self.form == "text":
            body = said
        if self.form == "escaped":
            body = body.replace("sk-", "\\u0073k\\u002d").replace("/", "\\/")
        data = body.encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


def _answer(said: str, path: str) -> dict[str, Any]:
    if path.endswith("/messages"):
        return {
            "id": said,
            "content": [{"type": "text", "text": said}, {"type": "thinking", "thinking": said}],
            "stop_reason": "end_turn",
            "usage": {},
        }
    call = {"id": said, "function": {"name": said, "arguments": json.dumps({said: said})}}
    message = {"role": "assistant", "content": said, "reasoning_content": said, "tool_calls": [call]}
    choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    return {"id": said, "model": said, "choices": choices, "results": [{"title": said, "content": said}]}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with serving(server.http):
        yield server


def leaks(*texts: object, key: str = KEY) -> list[str]:
    """Pieces of the key in the texts."""
    whole = "\n".join(str(text) for text in texts)
    forms = (key, quote(key, safe=""), html.escape(key), base64.b64encode(key.encode()).decode())
    pieces = {form[start : start + PIECE] for form in forms for start in range(len(form) - PIECE + 1)}
    return sorted(piece for piece in pieces if piece in whole)


def files_of(directory: Path) -> list[str]:
    return [path.read_bytes().decode("latin-1") for path in directory.rglob("*") if path.is_file()]


async def _of_openai(server: Server) -> ModelOutput:
    client = OpenAIClient(server.url, "m", KEY)
    try:
        return await client.get_model_response(ASK)
    finally:
        await client.close()


async def _of_anthropic(server: Server) -> ModelOutput:
    client = AnthropicClient(server.url, "m", KEY)
    try:
        return await client.get_model_response(ASK)
    finally:
        await client.close()


async def _of_vllm(server: Server) -> Any:
    http = VLLMHttp(server.url, api_key=KEY, timeout_s=30, connect_timeout_s=30)
    try:
        return [chunk async for chunk in http.complete({"prompt": [1]})]
    finally:
        await http.close()


async def _of_a_managed_vllm(server: Server) -> Any:
    http = VLLMHttp(server.url, api_key=KEY, timeout_s=30, connect_timeout_s=30)
    try:
        return await http.tell("/pause", {})
    finally:
        await http.close()


def _through_a_gateway(dialect: Dialect) -> Callable[[Server], Any]:
    async def ask(server: Server) -> Any:
        policy = UpstreamPolicy([server.url], dialect=dialect, api_key=KEY, max_retries=0)
        async with Gateway(policy, Path("ledger"), token=None) as gateway:
            client = OpenAIClient(f"{gateway.url}/v1", "m", "of-the-client")
            try:
                return await client.get_model_response(ASK)
            finally:
                await client.close()

    return ask


def _by_a_tool(kind: Any, *arguments: str) -> Callable[[Server], Any]:
    async def ask(server: Server) -> Any:
        tool = kind(base_url=server.url, patience=WebPatience(attempts=1))
        return await asyncio.to_thread(tool, *arguments)

    return ask


CLIENTS: dict[str, Callable[[Server], Any]] = {
    "openai": _of_openai,
    "anthropic": _of_anthropic,
    "vllm": _of_vllm,
    "vllm, managed": _of_a_managed_vllm,
    "gateway, chat": _through_a_gateway(Dialect.CHAT),
    "gateway, messages": _through_a_gateway(Dialect.MESSAGES),
    "tavily": _by_a_tool(TavilySearch, "a"),
    "serper": _by_a_tool(SerperSearch, "a"),
    "firecrawl": _by_a_tool(Firecrawl, "https://example.com"),
}


@pytest.mark.parametrize("client", CLIENTS)
async def test_no_client_repeats_a_key(
    client: str,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG, "rllm")
    for variable in ("TAVILY_API_KEY", "SERPER_API_KEY", "FIRECRAWL_API_KEY"):
        monkeypatch.setenv(variable, KEY)
    found: dict[tuple[int, str, str], list[str]] = {}
    for status in (200, 400, 429, 500):
        server.status = status
        for form in ("json", "text", "escaped"):
            server.form = form
            for style, quoted in QUOTES.items():
                if style != "whole" and (status not in (200, 400, 500) or form == "escaped"):
                    continue
                server.quoted = quoted
                said: list[object] = []
                try:
                    said.append(repr(await CLIENTS[client](server)))
                except (RllmError, ValueError) as error:
                    said += [vars(error), *traceback.format_exception(error)]
                if leaks(*said):
                    found[status, form, style] = [each for each in map(str, said) if leaks(each)]
    assert not found
    assert not leaks(caplog.text, *files_of(tmp_path))


def test_an_evaluation_keeps_no_key_that_model_judge_or_program_quotes(
    rllm: Rllm,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "rllm")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    rows = [{"question": f"{each} + 1 = ?", "answer": str(each + 1)} for each in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "flow.py").write_text(
        "import os, rllm\n"
        "@rllm.rollout\n"
        "def solve(task, config):\n"
        "    raise RuntimeError('401 for ' + os.environ['OPENAI_API_KEY'])\n"
        "def score(task, episode):\n"
        "    raise RuntimeError('401 for ' + os.environ['OPENAI_API_KEY'][:30])\n"
    )
    shown: list[str] = []

    def say(*words: str) -> Result:
        done = rllm(*words)
        shown.extend((done.stdout, done.stderr))
        return done

    say("dataset", "register", "sums", "rows.jsonl", "--evaluator", "math")
    there = server.url.removesuffix("/v1")
    say("model", "setup", "wise", "--provider", "anthropic", "--model", "w", "--base-url", there)
    of_server = ("--base-url", server.url, "--model", "m")
    judged = ("--evaluator", "equality", "--judge-model", "wise")
    number = 0
    for status in (200, 400, 401, 500):
        server.status = status
        for words in (
            ("sums", *of_server),
            ("sums", "--model", "wise"),
            ("sums", *of_server, *judged),
            ("sums", *of_server, "--agent", "flow.py:solve"),
            ("sums", *of_server, "--evaluator", "flow.py:score"),
        ):
            if status != 400 and len(words) > 5:
                continue
            number += 1
            output = f"e{number}"
            say("eval", *words, "--output", output, "--json")
            for store in (tmp_path / output).rglob("store.sqlite"):
                say("runs", "show", str(store.parent), "--json")
                say("runs", "show", str(store.parent), "--episode", "0", "--json")
                say("runs", "show", str(store.parent), "--episode", "0")
            say("eval", *words, "--output", output)
    assert number >= 10
    assert any("[key]" in text for text in shown)
    assert any("[key]" in text for text in files_of(tmp_path / "e1"))
    assert not leaks(*shown, caplog.text)
    assert not {str(path) for path in tmp_path.rglob("*") if path.is_file() and leaks(path.read_bytes())}


def test_words_that_are_no_keys_stay() -> None:
    client = OpenAIClient("http://127.0.0.1:9/v1", "m", "EMPTY")
    assert str(RllmError("EMPTY and sk-proj- stay")) == "EMPTY and sk-proj- stay"
    OpenAIClient(client.base_url, "m", KEY)
    refused = RequestRefused(f"a {KEY}", code=KEY, param=KEY, kind=KEY)
    assert (refused.message, refused.code, refused.param, refused.kind) == ("a [key]", *["[key]"] * 3)
    assert str(ContextLengthError(f"{KEY[:20]} and {KEY[-20:]}")) == "[key] and [key]"
