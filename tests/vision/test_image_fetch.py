"""Images at addresses: fetched from the hosts that were named and from nowhere else, within limits."""

import io
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from image_server import HOST, PUBLIC, ImageServer, certificate
from PIL import Image

from rllm.build.gateways import Address, model_gateway
from rllm.cli.main import rllm as front_door
from rllm.errors import ConfigError
from rllm.gateway.server import Gateway
from rllm.models.builtin import TinyModel, create_model
from rllm.models.vision import fetch
from rllm.models.vision.fetch import MAX_REDIRECTS, ImageFetcher
from rllm.models.vision.pillow import MAX_PIXELS
from rllm.rendering.images import MAX_BYTES, MAX_PER_MESSAGE, image_of
from rllm.trainer import AgentDPOTrainer, AgentSFTTrainer
from rllm.types.content import source_of
from rllm.types.wire import CallRequest, Dialect

Make = Callable[..., Any]
URL = f"http://{HOST}/a.png"


@pytest.fixture
def server(picture: Make) -> Iterator[ImageServer]:
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    with ImageServer(file.getvalue()) as each:
        yield each


def _shows(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}


def test_an_image_at_an_address_stands_in_its_message_in_every_form(server: ImageServer) -> None:
    fetcher = ImageFetcher([HOST], network=server.network)
    parts = [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "url", "url": URL}},
        {"type": "text", "text": URL},
    ]
    words = {"role": "assistant", "content": URL}
    message, other = fetcher.inline([{"role": "user", "content": parts}, words])
    assert [image_of(source_of(each)).data for each in message["content"][:3]] == [server.picture] * 3
    assert message["content"][0]["image_url"]["detail"] == "low"
    assert (message["content"][3], other) == (parts[3], words)
    assert parts[1]["image_url"] == URL, "what was asked is not changed"
    assert server.requests == [(HOST, "/a.png")], "in one conversation an address is one image"
    fetcher.inline([_shows(URL)], "another")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://other.example.org/a.png", "other.example.org:80"),
        (f"http://{HOST}:8080/a.png", f"{HOST}:8080"),
        (f"http://sub.{HOST}/a.png", f"sub.{HOST}:80"),
        (f"http://{HOST}@10.0.0.1/a.png", "without a user"),
        ("http://127.0.0.1/a.png", "127.0.0.1:80"),
        ("http://2130706433/", "2130706433:80"),
        ("http://169.254.169.254/latest/meta-data", "169.254.169.254:80"),
        (f"http://{HOST}/a.png\r\nX: y", "http"),
        (f"http://{HOST}/{'a' * 3000}", "2000"),
        ("http://[::1", "::1"),
    ],
)
def test_no_other_host_is_asked_or_even_resolved(server: ImageServer, url: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ImageFetcher([HOST], network=server.network).inline([_shows(url)])
    assert reason in str(caught.value)
    assert (server.requests, server.connected) == ([], [])


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://images.example.org/a.png", "/etc/passwd"])
def test_what_is_no_address_of_the_web_stays_and_is_refused_where_it_is_read(
    server: ImageServer, url: str
) -> None:
    (message,) = ImageFetcher([HOST], network=server.network).inline([_shows(url)])
    with pytest.raises(ConfigError):
        image_of(source_of(message["content"][0]))
    assert server.requests == []


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["10.0.0.7"], ["169.254.169.254"], ["::1"], ["::ffff:10.0.0.1"], [PUBLIC, "192.168.1.1"]],
)
def test_a_name_that_leads_off_the_public_net_is_refused(server: ImageServer, addresses: list[str]) -> None:
    server.names[HOST] = [addresses]
    with pytest.raises(ConfigError, match="public"):
        ImageFetcher([HOST], network=server.network).fetch(URL)
    assert server.connected == []


def test_a_name_that_changes_its_mind_leads_nowhere_else(server: ImageServer) -> None:
    """The resolver gives a public address to who looks first, and this machine's to who looks again."""
    server.names[HOST] = [[PUBLIC], ["127.0.0.1"]]
    fetcher = ImageFetcher([HOST], network=server.network)
    assert fetcher.fetch(URL).data == server.picture
    assert server.connected == [(PUBLIC, 80)]
    with pytest.raises(ConfigError, match="public"):
        fetcher.fetch(URL)
    server.names[HOST] = [[PUBLIC], [PUBLIC], [PUBLIC], ["127.0.0.1"]]
    with pytest.raises(ConfigError, match="public"):
        fetcher.fetch(f"http://{HOST}/to?/a.png")
    assert {address for address, _ in server.connected} == {PUBLIC}


def test_a_redirect_is_looked_at_like_an_address(server: ImageServer) -> None:
    fetcher = ImageFetcher([HOST, "cdn.example.org:8443"], network=server.network)
    server.names["cdn.example.org"] = [[PUBLIC]]
    assert fetcher.fetch(f"http://{HOST}/to?/a.png").data == server.picture
    assert fetcher.fetch(f"http://{HOST}/to?http://cdn.example.org:8443/a.png").data == server.picture
    assert server.connected[-1] == (PUBLIC, 8443)
    num_requests = len(server.requests)
    for target in (
        "http://127.0.0.1/a.png",
        "http://localhost:8080/",
        "http://169.254.169.254/latest/meta-data",
        "http://0x7f000001/",
        "//[::1]/a.png",
        "file:///etc/passwd",
        "http://cdn.example.org/a.png",
        "gopher://images.example.org/",
    ):
        with pytest.raises(ConfigError):
            fetcher.fetch(f"http://{HOST}/to?{target}")
    assert len(server.requests) == num_requests + 8, "each was asked for once, and what it leads to was not"
    with pytest.raises(ConfigError, match=str(MAX_REDIRECTS)):
        fetcher.fetch(f"http://{HOST}/to?to?to?to?to?a.png")


def _bomb() -> bytes:
    file = io.BytesIO()
    Image.new("1", (MAX_PIXELS // 1000, 1001)).save(file, "PNG")
    return file.getvalue()


def _film() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("L", (4, 4), shade) for shade in (0, 90)]
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("page", "text/html"),
        ("lie", "none of image/png"),
        ("missing", "404"),
        ("short", "999,999"),
        ("packed", "packed"),
        ("large", f"{MAX_BYTES:,}"),
        ("endless", f"{MAX_BYTES:,}"),
        ("bomb.png", f"{MAX_PIXELS:,}"),
        ("film.png", "2 frames"),
    ],
)
def test_what_is_no_image_within_the_limits_is_refused_with_the_value(
    server: ImageServer, name: str, reason: str
) -> None:
    server.files |= {"bomb.png": _bomb(), "film.png": _film()}
    with pytest.raises(ConfigError) as caught:
        ImageFetcher([HOST], network=server.network).fetch(f"http://{HOST}/{name}")
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["trickle", "headers", "hangs"])
def test_a_server_that_takes_its_time_is_cut_at_the_end_of_it(server: ImageServer, name: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"0\.3 s"):
        ImageFetcher([HOST], network=server.network, timeout_s=0.3).fetch(f"http://{HOST}/{name}")
    assert time.monotonic() - began_s < 10, "no server decides how long it takes"


def test_https_is_spoken_with_who_has_a_certificate_of_the_name(
    server: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = certificate(tmp_path, HOST)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(path)
    names = {HOST: [[PUBLIC]], "other.example.org": [[PUBLIC]]}
    with ImageServer(server.picture, names=names, tls=tls) as secure:
        url = f"https://{HOST}/a.png"
        fetcher = ImageFetcher([HOST, "other.example.org"], network=secure.network, timeout_s=5.0)
        with pytest.raises(ConfigError, match="certificate"):
            fetcher.fetch(url)
        monkeypatch.setattr(fetch, "_tls_context", lambda: ssl.create_default_context(cafile=path))
        assert fetcher.fetch(url).data == server.picture
        assert secure.connected[-1] == (PUBLIC, 443)
        assert secure.requests == [(HOST, "/a.png")]
        with pytest.raises(ConfigError, match="certificate"):
            fetcher.fetch("https://other.example.org/a.png")
        quick = ImageFetcher([HOST], network=secure.network, timeout_s=0.5)
        with pytest.raises(ConfigError, match=r"0\.5 s"):
            quick.fetch(f"https://{HOST}/trickle")


def test_a_resolver_that_hangs_is_not_waited_for(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(host: str) -> list[Any]:
        server.ended.wait(20)
        return []

    monkeypatch.setattr(server, "resolve", hangs)
    with pytest.raises(ConfigError, match=r"0\.2 s"):
        ImageFetcher([HOST], network=server.network, timeout_s=0.2).fetch(URL)


@pytest.mark.parametrize(
    "host",
    [
        "http://example.org",
        "*.example.org",
        "example.org/a",
        "127.0.0.1",
        "localhost",
        "10.0.0.1:80",
        "",
        "a b.c",
        "metadata.google.internal",
        "user@example.org",
        "example.org:99999",
    ],
)
def test_hosts_that_are_none_are_refused_at_start(host: str) -> None:
    with pytest.raises(ConfigError):
        ImageFetcher([host])


def test_a_message_has_no_more_addresses_than_images(server: ImageServer) -> None:
    with pytest.raises(ConfigError, match=str(MAX_PER_MESSAGE)):
        ImageFetcher([HOST], network=server.network).inline([_shows(*[URL] * (MAX_PER_MESSAGE + 1))])
    assert server.requests == []


async def test_the_gateway_keeps_what_it_fetched_and_reads_it_anew_for_nobody(
    server: ImageServer, vision_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three protocols; then a second turn, and a restart on the ledger, after the picture has changed."""
    monkeypatch.setattr(fetch, "Network", lambda: server.network)
    vision = vision_model("idefics3")
    text = {"type": "text", "text": "What is it?"}
    chat = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, text]}
    source = {"type": "url", "url": URL}
    message = {"role": "user", "content": [{"type": "image", "source": source}, text]}
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": text["text"]}]
    bodies = {
        "chat/completions": {"messages": [chat], "max_tokens": 5},
        "messages": {"messages": [message], "max_tokens": 5},
        "responses": {"input": [{"role": "user", "content": parts}], "max_output_tokens": 5},
    }
    ids = []
    async with _gateway(vision.directory, tmp_path / "ledger") as gateway:
        for name, body in bodies.items():
            session = gateway.open_session(name.partition("/")[0])
            assert await _status(f"{session.base_url}/{name}", body) == 200
            ids.append(session.traces()[0].prompt_ids)
        assert ids[0] == ids[1] == ids[2]
        num_requests = len(server.requests)
        server.files["a.png"] = b"another"
        session = gateway.open_session("chat")
        (first,) = session.traces()
        again = [chat, {"role": "assistant", "content": first.response["content"]}, chat]
        assert (
            await _status(f"{session.base_url}/chat/completions", {"messages": again, "max_tokens": 5}) == 200
        )
        _, second = session.traces()
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids, "it goes on by appending"
        assert len(server.requests) == num_requests == 3
        for record in (first, second):
            assert URL not in json.dumps(record.messages)
            assert image_of(source_of(record.messages[0]["content"][0])).data == server.picture
    async with _gateway(vision.directory, tmp_path / "ledger") as gateway:
        session = gateway.open_session("chat")
        messages = [*second.messages, {"role": "assistant", "content": second.response["content"]}]
        body = {"messages": [*messages, {"role": "user", "content": "And?"}], "max_tokens": 5}
        assert await _status(f"{session.base_url}/chat/completions", body) == 200
        third = session.traces()[-1]
        assert third.prompt_ids[: len(second.prompt_ids)] == second.prompt_ids
        assert len(server.requests) == num_requests, "a restored session fetches nothing"
        request = CallRequest(dialect=Dialect.CHAT, body={}, messages=[chat])
        server.files["a.png"] = server.picture
        await gateway.policy.count_tokens(request)
        assert request.num_bytes > len(server.picture), "a small body with large images is a large request"
        refused = {"messages": [_shows("http://169.254.169.254/latest")], "max_tokens": 5}
        assert await _status(f"{session.base_url}/chat/completions", refused) == 400


@asynccontextmanager
async def _gateway(directory: Path, ledger: Path) -> AsyncIterator[Gateway]:
    address = Address(ledger=ledger)
    async with (
        model_gateway(address, directory, max_context=400, allowed_media_domains=[HOST]) as gateway,
        gateway,
    ):
        yield gateway


async def _status(url: str, body: dict[str, Any]) -> int:
    async with aiohttp.ClientSession() as http, http.post(url, json={"model": "m", **body}) as reply:
        return reply.status


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_rows_of_files_have_their_images_fetched_once_and_kept_in_the_run(
    server: ImageServer, vision_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(fetch, "Network", lambda: server.network)
    server.files["b.png"] = _film_of_one()
    rows: list[dict[str, Any]] = []
    for name in ("a.png", "b.png"):
        question = _shows(f"http://{HOST}/{name}")
        answer, other = [{"role": "assistant", "content": text} for text in "AB"]
        row = {"messages": [question, answer]}
        rows.append(row if kind == "sft" else {"prompt": [question], "chosen": [answer], "rejected": [other]})
    trainer_class = AgentSFTTrainer if kind == "sft" else AgentDPOTrainer
    config = {
        "threads": 1,
        "max_steps": 1,
        "model": {"path": str(vision_model("idefics3").directory)},
        "data": {"heldout_fraction": 0.0, "allowed_media_domains": [HOST]},
    }
    run = tmp_path / "run"
    trainer_class(config, train_dataset=rows, output=run).train()
    files = {each.name for each in (run / "images").iterdir()}
    assert len(files) == 3
    assert json.loads((run / "images" / "addresses.jsonl").read_text().split("\n")[1])["sha256"] in files
    num_requests = len(server.requests)
    assert num_requests == 2
    server.files.clear()
    (run / "summary.json").unlink()  # as if it had been killed at the very end
    trainer_class(config, train_dataset=rows, output=run).train()
    assert len(server.requests) == num_requests
    refused = [
        {"messages": [_shows("http://other.example.org/a.png"), {"role": "assistant", "content": "A"}]}
    ]
    config["data"] = {"heldout_fraction": 0.0, "allowed_media_domains": [HOST]}
    with pytest.raises(ConfigError, match=r"row 0.*other\.example\.org"):
        AgentSFTTrainer(config, train_dataset=refused, output=tmp_path / "other").train()


def _film_of_one() -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((48, 40)).save(file, "PNG")
    return file.getvalue()


def test_a_model_of_text_has_nothing_fetched_and_says_so_at_start(tmp_path: Path) -> None:
    tiny = TinyModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
    create_model(tmp_path / "tiny", tiny)
    row = {"prompt": "a", "completion": "b"}
    data = {"heldout_fraction": 0.0, "allowed_media_domains": [HOST]}
    config = {"model": {"path": str(tmp_path / "tiny")}, "data": data}
    with pytest.raises(ConfigError, match=r"`data\.allowed_media_domains`"):
        AgentSFTTrainer(config, train_dataset=[row], output=tmp_path / "run").train()
    words = ["serve", "model", str(tmp_path / "tiny"), "--port", "0", "--ledger", str(tmp_path / "ledger")]
    result = CliRunner().invoke(front_door, [*words, "--allowed-media-domains", HOST])
    assert result.exit_code == 2
    assert "--allowed-media-domains" in result.output
