"""The server of the page: who may look, what the browser may do, and which files there are."""

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.view.server import HEADERS, ViewServer, kept_token, static_names
from rllm.view.sources import Sources

TOKEN = "a-token-of-twenty-four-ch"
MARKUP_OF_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|createContextualFragment"
    r"|\beval\(|new Function|srcdoc|javascript:"
)


@pytest.fixture
def server(runs: Path) -> Iterator[ViewServer]:
    server = ViewServer(Sources([runs]), token=TOKEN)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.stop()
    thread.join()


def get(server: ViewServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(server.origin + path, headers=headers)
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=30) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def test_nothing_is_shown_without_the_token_and_a_cookie_takes_its_place(server: ViewServer) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/?token=wrong", "/api/runs?token=%F0%9F"):
        assert get(server, path)[0] == 401
    status, headers, _ = get(server, f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert get(server, "/", Cookie=cookie.partition(";")[0])[0] == 200
    status, _, body = get(server, "/api/runs", Authorization=f"Bearer {TOKEN}")
    assert status == 200
    assert json.loads(body)["runs"][0]["key"] == "lake"


def test_pages_of_others_cannot_reach_it_by_another_name(server: ViewServer) -> None:
    status, _, body = get(server, "/api/runs", Authorization=f"Bearer {TOKEN}", Host="evil.example")
    assert (status, body) == (403, b"This page is for this machine alone.")


def test_every_answer_tells_the_browser_to_run_nothing_else(server: ViewServer) -> None:
    for path in ("/", "/api/runs", "/api/run?run=none", "/static/main.js", "/static/none"):
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}):
            shown = {name.lower(): value for name, value in get(server, path, **headers)[1].items()}
            assert all(shown[name.lower()] == value for name, value in HEADERS.items())
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "http" not in policy


def test_only_files_of_the_page_are_files(server: ViewServer) -> None:
    for name in ("../server.py", "%2e%2e/server.py", "/etc/passwd", "pages", "", "pages/../../server.py"):
        assert get(server, f"/static/{name}", Authorization=f"Bearer {TOKEN}")[0] == 404
    for name in static_names():
        assert get(server, f"/static/{name}", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_an_error_is_one_sentence(server: ViewServer) -> None:
    status, _, body = get(server, "/api/run?run=none", Authorization=f"Bearer {TOKEN}")
    assert status == 404
    assert json.loads(body)["error"].startswith("There is no run 'none' here")


def test_nothing_can_be_written(server: ViewServer) -> None:
    request = urllib.request.Request(
        f"{server.origin}/api/runs", data=b"{}", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=30)
    with refusal.value:
        assert refusal.value.code == 405


def test_other_machines_are_not_served_without_a_token(runs: Path) -> None:
    with pytest.raises(ConfigError, match="other machines"):
        ViewServer(Sources([runs]), host="0.0.0.0", token=None)


def test_a_taken_port_is_said_before_anything_is_served(runs: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(ConfigError, match="listened"):
            ViewServer(Sources([runs]), port=holder.getsockname()[1], token=TOKEN)


def test_the_token_is_kept_for_its_owner_alone(home: Path) -> None:
    token = kept_token()
    assert kept_token() == token
    assert (home / "view" / "token").stat().st_mode & 0o077 == 0


def test_a_token_file_that_a_crash_left_empty_opens_nothing(home: Path, runs: Path) -> None:
    kept_token()
    (home / "view" / "token").write_text("")
    token = kept_token()
    assert token
    assert kept_token() == token
    assert (home / "view" / "token").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError):
        ViewServer(Sources([runs]), token="")


def test_no_script_makes_markup_of_text() -> None:
    own = [path for name, path in static_names().items() if name.endswith(".js") and "vendor" not in name]
    assert len(own) > 8
    found = {path.name: MARKUP_OF_TEXT.findall(path.read_text()) for path in own}
    assert not any(found.values()), found


def test_pages_lead_only_to_pages_that_there_are() -> None:
    texts = {name: path.read_text() for name, path in static_names().items() if name.endswith(".js")}
    pages = re.search(r"const PAGES = \{(.*?)\};", texts["main.js"], re.DOTALL)
    assert pages is not None
    names = set(re.findall(r"(\w+): \w+Page\b", pages[1]))
    targets = {each for text in texts.values() for each in re.findall(r"\b(?:link|address)\(\"(\w+)\"", text)}
    assert len(targets) > 4
    assert targets <= names


def test_nothing_is_loaded_from_elsewhere() -> None:
    for name, path in static_names().items():
        if "vendor" not in name:
            addresses = re.findall(r"https?://[^\s\"'`)]+", path.read_text())
            assert [each for each in addresses if "w3.org" not in each and "127.0.0.1" not in each] == []


def test_the_licence_of_what_others_wrote_comes_along() -> None:
    assert "MIT" in static_names()["vendor/uPlot.LICENSE"].read_text()


def test_silent_connections_and_slow_heads_are_closed_and_honest_readers_answered(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.view.server.HEAD_TIMEOUT_S", 0.3)
    server = ViewServer(Sources([runs]), token=TOKEN)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(20)]
        connections[0].sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert get(server, "/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        for connection in connections:
            with connection:
                assert connection.recv(1) == b""
    finally:
        server.stop()
        thread.join()
