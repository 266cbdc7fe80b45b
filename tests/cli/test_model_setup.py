"""`rllm model setup`, `list`, `test`, `remove`: against servers of our own, with no key in any file."""

import json
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rllm.build.connection_check import wait_for_server
from rllm.build.model_settings import ModelSettings
from rllm.build.providers import PROVIDERS
from rllm.cli.main import rllm as front_door

sys.path.insert(0, str(Path(__file__).parent))
from http_thread import serving

SECRET = "sk-a-secret-that-no-file-may-hold"
Rllm = Callable[..., Result]


class Server:
    """Speaks both protocols, and takes one key."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.models = ["only"]
        self.needs_key = True
        self.says = "hi"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": name} for name in outer.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append((self.path, dict(self.headers.items()), body))
                key = self.headers.get("x-api-key") or self.headers.get("authorization", "")
                if outer.needs_key and SECRET not in key:
                    self.reply(401, {"error": {"message": "Incorrect API key provided", "type": "auth"}})
                elif self.path == "/v1/messages":
                    content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi"}]
                    usage = {"input_tokens": 3, "output_tokens": 1}
                    self.reply(
                        200, {"id": "m", "content": content, "stop_reason": "end_turn", "usage": usage}
                    )
                else:
                    message = {"role": "assistant", "content": outer.says}
                    choice = {"index": 0, "message": message, "finish_reason": "stop"}
                    usage = {"prompt_tokens": 4, "completion_tokens": 2}
                    self.reply(200, {"id": "c", "choices": [choice], "usage": usage})

            def reply(self, status: int, value: dict[str, Any]) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.root = f"http://127.0.0.1:{self.http.server_port}"
        self.url = f"{self.root}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with serving(server.http):
        yield server


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A home of its own, no key in the environment, and a keyring in memory."""
    import keyring
    from keyring.backend import KeyringBackend

    class InMemory(KeyringBackend):
        priority = 1  # pyright: ignore[reportAssignmentType]
        kept: dict[tuple[str, str], str]

        def __init__(self) -> None:
            super().__init__()
            self.kept = {}

        def get_password(self, service: str, username: str) -> str | None:
            return self.kept.get((service, username))

        def set_password(self, service: str, username: str, password: str) -> None:
            self.kept[service, username] = password

        def delete_password(self, service: str, username: str) -> None:
            del self.kept[service, username]

    for provider in PROVIDERS.values():
        monkeypatch.delenv(provider.key_variable or "NONE", raising=False)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    before = keyring.get_keyring()
    keyring.set_keyring(InMemory())
    yield tmp_path / "home"
    keyring.set_keyring(before)
    for file in (tmp_path / "home").rglob("*"):
        assert SECRET not in (file.read_text() if file.is_file() else ""), f"{file} holds a key"


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """`rllm WORD…` with somebody at the keyboard, who types these lines."""

    def call(*words: str, lines: list[str]) -> Result:
        return CliRunner().invoke(
            front_door, list(words), input="\n".join(lines) + "\n", prog_name="rllm", catch_exceptions=False
        )

    return call


def listed(rllm: Rllm) -> dict[str, Any]:
    return json.loads(rllm("model", "list", "--json").stdout)


def test_a_model_is_set_up_by_flags_tested_and_listed(
    rllm: Rllm, server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    words = ("judge", "--provider", "openai", "--model", "gpt", "--base-url", server.url)
    kept = rllm("model", "setup", *words, "--json")
    assert kept.exit_code == 0, kept.stderr
    assert json.loads(kept.stdout)["test"]["reply"] == "hi"
    file = home / "models.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["models"]["judge"]["key"] == "env:OPENAI_API_KEY"
    (row,) = listed(rllm)["models"]
    assert (row["name"], row["key"], row["key_is_there"], row["is_default"]) == (
        "judge",
        "OPENAI_API_KEY",
        True,
        True,
    )
    tested = json.loads(rllm("model", "test", "--json").stdout)
    assert (tested["model"], tested["prompt_tokens"], tested["completion_tokens"]) == ("gpt", 4, 2)
    assert tested["latency_s"] > 0
    assert "judge (default)" in rllm("model", "list").stdout
    monkeypatch.delenv("OPENAI_API_KEY")
    assert listed(rllm)["models"][0]["key_is_there"] is False
    assert "OPENAI_API_KEY" in rllm("model", "test", "judge").stderr
    assert rllm("model", "remove", "judge").exit_code == 0
    assert listed(rllm)["models"] == []


def test_anthropic_is_reached_through_its_own_api(
    rllm: Rllm, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", SECRET)
    kept = rllm(
        "model", "setup", "--provider", "anthropic", "--model", "claude", "--base-url", server.root, "--json"
    )
    assert json.loads(kept.stdout)["test"] | {"latency_s": 0} == {
        "latency_s": 0,
        "reply": "hi",
        "prompt_tokens": 3,
        "completion_tokens": 1,
    }
    ((path, headers, body),) = server.asked
    assert path == "/v1/messages"
    assert {name.lower() for name in headers} >= {"x-api-key", "anthropic-version"}
    assert "Authorization" not in headers
    assert body == {
        "model": "claude",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hi."}]}],
    }


def test_the_wizard_asks_and_keeps_the_key_in_the_keyring(answering: Any, rllm: Rllm, server: Server) -> None:
    said = answering("model", "setup", lines=["opnai", "server", server.url, "y", SECRET, "", "mine"])
    assert said.exit_code == 0, said.output
    assert "did you mean `openai`?" in said.stderr
    assert "It serves only." in said.stderr
    assert SECRET not in said.output
    entry = ModelSettings.load().entries["mine"]
    assert (entry.provider, entry.model, entry.base_url, entry.key) == (
        "server",
        "only",
        server.url,
        "keyring",
    )
    assert json.loads(rllm("model", "test", "mine", "--json").stdout)["reply"] == "hi"
    rllm("model", "remove", "mine")
    import keyring

    assert keyring.get_password("rllm", "mine") is None


def test_a_wrong_answer_is_asked_for_again_and_a_key_in_the_wrong_place_is_not_kept(
    answering: Any, server: Server, home: Path
) -> None:
    lines = ["11", "server", "ftp://x", server.url, "y", SECRET, SECRET, "only", SECRET, "a b", "mine"]
    said = answering("model", "setup", lines=lines)
    assert said.exit_code == 0, said.output
    for words in ("It is 1 to 10", "'ftp://x', which is no base URL", "That looks like a key", "use letters"):
        assert words in said.stderr
    assert ModelSettings.load().entries["mine"].model == "only"
    assert SECRET not in (home / "models.json").read_text()


def test_a_key_is_read_from_stdin_and_from_no_flag(answering: Any, server: Server) -> None:
    words = ("model", "setup", "--provider", "deepseek", "--model", "chat", "--base-url", server.url)
    kept = answering(*words, "--keyring", "--json", lines=[SECRET])
    assert kept.exit_code == 0, kept.stderr
    assert json.loads(kept.stdout)["key"] == "keyring"


def test_a_local_server_needs_nothing_but_its_address(rllm: Rllm, server: Server) -> None:
    server.needs_key = False
    kept = rllm("model", "setup", "--base-url", server.url, "--json")
    assert kept.exit_code == 0, kept.stderr
    assert json.loads(kept.stdout)["model"] == "only"
    server.says = "\x1b[31mred\nand \x07 loud"
    told = rllm("model", "test", "server", "--json").stdout
    assert json.loads(told)["reply"] == "\x1b[31mred and \x07 loud"
    assert "\x1b" not in told + rllm("model", "test", "server").stdout
    server.models = ["a", "b"]
    several = rllm("model", "setup", "other", "--base-url", server.url)
    assert several.exit_code == 2
    assert "Give --model;" in several.stderr
    assert "serves a, b." in several.stderr
    server.models = []
    silent = rllm("model", "setup", "other", "--base-url", server.url)
    assert "a key" in " ".join(silent.stderr.split())


def test_nothing_is_kept_of_a_model_that_does_not_answer(
    answering: Any, rllm: Rllm, server: Server, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    words = ("model", "setup", "--provider", "openai", "--model", "gpt", "--base-url", server.url)
    refused = rllm(*words)
    assert refused.exit_code == 2
    assert "Nothing was kept" in refused.stderr
    assert "Incorrect API key provided" in refused.stderr
    assert "OPENAI_API_KEY" in " ".join(refused.stderr.split())
    dead = rllm("model", "setup", "--base-url", "http://127.0.0.1:9/v1", "--model", "x", "--wait", "0")
    assert dead.exit_code == 1
    assert "cannot be reached" in dead.stderr
    assert "Connection refused" in dead.stderr
    assert "ssl" not in dead.stderr, "the address is http"
    assert not home.exists()
    assert rllm(*words, "--no-test").exit_code == 0
    asked = answering("model", "setup", lines=["vllm", "http://127.0.0.1:9/v1", "n", "x", "mine", "y"])
    assert asked.exit_code == 0, asked.output
    assert set(ModelSettings.load().entries) == {"openai", "mine"}


async def test_a_server_that_was_just_started_is_waited_for() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
        waits: list[str] = []

        def listen() -> None:
            waits.append("refused once")
            reserved.listen()

        await wait_for_server(url, 60.0, listen)
        assert waits == ["refused once"]
        await wait_for_server(url, 60.0, lambda: waits.append("refused again"))
        assert waits == ["refused once"]


async def test_a_server_elsewhere_is_not_waited_for() -> None:
    waits: list[str] = []
    await wait_for_server("http://models.invalid/v1", 60.0, lambda: waits.append("waited"))
    assert waits == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("setup", "--provider", "opnai"), "did you mean `openai`?"),
        (("setup", "--provider", "openai", "--model", "m"), "OPENAI_API_KEY is not set; export it"),
        (("setup", "--provider", "azure", "--model", "m"), "needs --base-url, such as https://RESOURCE"),
        (("setup", "--provider", "server", "--base-url", "here", "--model", "m"), "is no base URL"),
        (("setup", "--base-url", "http://a:b@x/v1", "--model", "m", "--no-test"), "a name or password in it"),
        (("setup", "--base-url", "http://x/v1", "--model", SECRET, "--no-test"), "--model looks like a key"),
        (("setup", SECRET, "--base-url", "http://x/v1", "--model", "m"), "NAME looks like a key"),
        (("setup", "--provider", "openai", "--key-variable", SECRET), "--key-variable looks like a key"),
        (("setup", "a b", "--base-url", "http://x", "--model", "m", "--no-test"), "use letters, digits"),
        (("setup", "--provider", "openai", "--no-key", "--keyring"), "one of --key-variable, --keyring"),
        (("setup", "--json"), "--json asks nothing"),
        (("test", "opnai:gpt"), "did you mean `openai`?"),
        (("test", "openai:gpt"), "OpenAI needs a key: set OPENAI_API_KEY"),
        (("test", "openai:"), "names no model"),
        (("test", "openai"), "`openai` is a provider; say which model: openai:MODEL"),
        (("test", "nowhere"), "There is no model `nowhere`"),
        (("test", "builtin:tiny"), "is not on a server"),
        (("test",), "No model is named"),
        (("remove", "nobody"), "No model `nobody` was set up"),
    ],
)
def test_bad_words_are_refused_and_nothing_is_kept(
    words: tuple[str, ...], message: str, rllm: Rllm, home: Path
) -> None:
    result = rllm("model", *words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert SECRET not in result.output
    assert not home.exists()


def test_a_machine_without_a_keyring_says_what_to_do_instead(rllm: Rllm, answering: Any) -> None:
    import keyring
    from keyring.backends.fail import Keyring

    keyring.set_keyring(Keyring())
    words = ("model", "setup", "--base-url", "http://x/v1", "--model", "m", "--keyring", "--no-test")
    result = answering(*words, lines=[SECRET])
    assert result.exit_code == 2
    assert "environment variable" in " ".join(result.stderr.split())


@pytest.mark.parametrize("text", ["{", '{"version": 2}', '{"version": 1, "models": {"a": {"x": 1}}}', "[]"])
def test_broken_settings_name_the_file(text: str, rllm: Rllm, home: Path) -> None:
    home.mkdir()
    (home / "models.json").write_text(text)
    result = rllm("model", "list")
    assert result.exit_code == 2
    assert "models.json" in result.stderr
