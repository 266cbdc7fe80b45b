"""The web clients against a server that speaks the services' forms, in health and in sickness."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from rllm.errors import ConfigError
from rllm.tools import MultiTool, tool_named
from rllm.tools.web import Firecrawl, SerperSearch, TavilyExtract, TavilySearch
from rllm.tools.web_service import MAX_ANSWER_BYTES, WebPatience, WebServiceError

KEY = "secret-key-123"
QUICK = WebPatience(timeout_s=5.0, attempts=3, wait_s=0.0)


@dataclass
class Asked:
    """One request that the server has seen."""

    path: str
    body: Any
    headers: Any


@dataclass
class Server:
    """Answers with what `script` says, then as the services do."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    script: list[Callable[[Any], Any]] = field(default_factory=list)
    pages: dict[str, str] = field(default_factory=dict)

    async def handle(self, request: Any) -> Any:
        body = json.loads(await request.text())
        self.asked.append(Asked(request.path, body, request.headers.copy()))
        if self.script:
            answer = self.script.pop(0)(request)
            return await answer if asyncio.iscoroutine(answer) else answer
        return web.json_response(self.answers(request.path, body))

    def answers(self, path: str, body: Any) -> Any:
        if path == "/extract":
            url = body["urls"][0]
            if url in self.pages:
                return {"results": [{"url": url, "raw_content": self.pages[url]}], "failed_results": []}
            return {"results": [], "failed_results": [{"url": url, "error": "no such page"}]}
        if path == "/v2/scrape":
            known = body["url"] in self.pages
            markdown = self.pages.get(body["url"], "")
            status = 200 if known else 404
            return {"success": True, "data": {"markdown": markdown, "metadata": {"statusCode": status}}}
        if "q" in body:
            organic = [
                {"title": f"T{n}", "link": f"https://{n}.example", "snippet": f"s{n} {body['q']}"}
                for n in range(body["num"])
            ]
            return {"answerBox": {"snippet": "It is Oslo."}, "organic": organic}
        results = [
            {
                "title": f"T{n}",
                "url": f"https://{n}.example",
                "content": f"c{n} {body['query']}",
                "score": 0.5,
            }
            for n in range(body["max_results"])
        ]
        return {"query": body["query"], "answer": None, "results": results}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("TAVILY_API_KEY", "SERPER_API_KEY", "FIRECRAWL_API_KEY"):
        monkeypatch.setenv(name, KEY)
    served = Server()
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/{path:.*}", served.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(10)
    yield served
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def answer(status: int, text: str = "", **headers: str) -> Callable[[Any], Any]:
    return lambda request: web.Response(status=status, text=text, headers=headers)


# ---- what they say -------------------------------------------------------------------------------------


def test_a_search_gives_titles_addresses_and_excerpts(server: Server) -> None:
    tavily = TavilySearch(base_url=server.url, num_results=2, max_result_chars=12, patience=QUICK)
    assert tavily(query="capital of Norway").text == (
        "[1] T0\nhttps://0.example\nc0 capital o [… 8 characters left out …]\n\n"
        "[2] T1\nhttps://1.example\nc1 capital o [… 8 characters left out …]"
    )
    assert server.asked[0].path == "/search"
    assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"
    assert server.asked[0].body == {"query": "capital of Norway", "max_results": 2, "search_depth": "basic"}

    serper = SerperSearch(base_url=server.url, num_results=1, patience=QUICK)
    assert serper(query="norway").text == "Answer: It is Oslo.\n\n[1] T0\nhttps://0.example\ns0 norway"
    assert server.asked[1].headers["X-API-KEY"] == KEY
    assert server.asked[1].body == {"q": "norway", "num": 1}


@pytest.mark.parametrize("kind", [TavilyExtract, Firecrawl])
def test_a_page_is_read_a_part_at_a_time(server: Server, kind: Any) -> None:
    page = "".join(f"line {number}\n" for number in range(100))
    server.pages["https://a.example/x"] = page
    tool = kind(base_url=f"{server.url}/", max_page_chars=300, patience=QUICK)
    parts: list[str] = []
    begin = 0
    while True:
        text = tool(url="https://a.example/x", first_char=begin).text
        part, mark, rest = text.partition("\n[… ")
        parts.append(part)
        if not mark:
            break
        left, _, after = rest.partition(" characters left out; read on with first_char=")
        begin = int(after.partition(" ")[0])
        assert int(left.replace(",", "")) == len(page) - begin
    assert "".join(parts) == page


@pytest.mark.parametrize("kind", [TavilyExtract, Firecrawl])
def test_a_page_that_is_not_there_is_told_to_the_model(server: Server, kind: Any) -> None:
    error = kind(base_url=server.url, patience=QUICK)(url="https://gone.example").error
    assert "no such page" in str(error) or "HTTP 404" in str(error)


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "ftp://a.example", "https://a b", "x" * 3000])
def test_what_is_no_web_address_is_never_asked_for(server: Server, url: str) -> None:
    assert "`url` is" in str(Firecrawl(base_url=server.url, patience=QUICK)(url=url).error)
    assert server.asked == []


def test_nothing_found_is_said(server: Server) -> None:
    server.script = [lambda request: web.json_response({"results": []})]
    assert TavilySearch(base_url=server.url, patience=QUICK)(query="x").text == "Nothing was found."
    assert "write 1 to 400" in str(TavilySearch(base_url=server.url, patience=QUICK)(query="x" * 401).error)


# ---- when they are ill ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "illness",
    [
        answer(429, "slow down", **{"Retry-After": "0"}),
        answer(500, "oops"),
        answer(503, "later", **{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        answer(200, "<html>no JSON"),
        answer(200, "[1, 2]"),
        answer(200, "[" * 100_000),
    ],
)
def test_what_may_pass_is_tried_again(server: Server, illness: Callable[[Any], Any]) -> None:
    server.script = [illness, illness]
    tool = TavilySearch(base_url=server.url, num_results=1, patience=QUICK)
    assert tool(query="x").text.startswith("[1] T0")
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("illness", "words"),
    [
        (answer(500, f"oops {KEY}"), r"failed 3 time\(s\): HTTP 500 oops \[key\]"),
        (answer(200, "no JSON"), "no JSON"),
    ],
)
def test_a_service_that_stays_ill_fails_the_episode_and_not_the_model(
    server: Server, illness: Callable[[Any], Any], words: str
) -> None:
    server.script = [illness] * 9
    tools = MultiTool([TavilySearch(base_url=server.url, patience=QUICK)])
    with pytest.raises(WebServiceError, match=words) as caught:
        tools.call({"name": "web_search", "arguments": {"query": "x"}})
    assert KEY not in str(caught.value)
    assert len(server.asked) == 3


def test_a_wait_that_is_too_long_is_not_waited(server: Server) -> None:
    server.script = [answer(429, "", **{"Retry-After": "3600"})]
    with pytest.raises(WebServiceError, match=r"failed 1 time\(s\): HTTP 429"):
        SerperSearch(base_url=server.url, patience=QUICK)(query="x")


async def silent(request: Any) -> Any:
    while request.transport is not None:
        await asyncio.sleep(0.02)
    return web.Response()


async def trickling(request: Any) -> Any:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("illness", [silent, trickling])
def test_an_answer_that_does_not_come_or_trickles_is_given_up(server: Server, illness: Any) -> None:
    server.script = [illness]
    impatient = WebPatience(timeout_s=0.2, attempts=1, wait_s=0.0)
    with pytest.raises(WebServiceError, match=r"no answer|whole"):
        SerperSearch(base_url=server.url, patience=impatient)(query="x")


def test_a_service_that_is_not_there_is_an_outage(server: Server) -> None:
    with pytest.raises(WebServiceError, match="no answer"):
        SerperSearch(
            base_url="http://127.0.0.1:1", patience=WebPatience(timeout_s=2.0, attempts=2, wait_s=0.0)
        )(query="x")


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_a_mistake_of_the_configuration(server: Server, status: int) -> None:
    server.script = [answer(status, f"bad key {KEY}")]
    with pytest.raises(ConfigError, match=r"Serper .*HTTP \d+ bad key \[key\]"):
        SerperSearch(base_url=server.url, patience=QUICK)(query="x")
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [400, 422])
def test_a_question_that_is_refused_is_told_to_the_model(server: Server, status: int) -> None:
    server.script = [answer(status, "query too odd")]
    output = TavilySearch(base_url=server.url, patience=QUICK)(query="x")
    assert output.error == f"Tavily refuses the question: HTTP {status} query too odd"


def test_a_redirect_is_not_followed_with_the_key(server: Server) -> None:
    server.script = [answer(302, "", Location="http://127.0.0.1:1/")]
    with pytest.raises(WebServiceError, match="HTTP 302"):
        SerperSearch(base_url=server.url, patience=QUICK)(query="x")


def test_an_answer_of_another_shape_is_an_outage(server: Server) -> None:
    server.script = [
        lambda request: web.json_response({"hits": []}),
        lambda request: web.json_response({"success": True}),
    ]
    with pytest.raises(WebServiceError, match="another form"):
        TavilySearch(base_url=server.url, patience=QUICK)(query="x")
    with pytest.raises(WebServiceError, match="another form"):
        Firecrawl(base_url=server.url, patience=QUICK)(url="https://a.example")


def test_a_page_beyond_all_measure_is_refused(server: Server) -> None:
    server.pages["https://big.example"] = "x" * (MAX_ANSWER_BYTES + 1)
    error = Firecrawl(base_url=server.url, patience=QUICK)(url="https://big.example").error
    assert error == "The answer has more than 8 MiB; ask for less."


def test_a_tool_without_its_key_or_with_an_odd_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="TAVILY_API_KEY"):
        tool_named("tavily_search")
    monkeypatch.setenv("TAVILY_API_KEY", KEY)
    with pytest.raises(ConfigError, match="`num_results` is 99"):
        tool_named("tavily_search", num_results=99)
    with pytest.raises(ConfigError, match="begins with http"):
        tool_named("tavily_extract", base_url="localhost:3")
    with pytest.raises(ConfigError, match="`attempts` at least 1"):
        WebPatience(attempts=0)
