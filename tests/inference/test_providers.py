"""What a name given as `--model` means."""

from pathlib import Path

import pytest

from rllm.build.model_settings import ModelEntry, ModelSettings
from rllm.build.providers import PROVIDERS, ModelPlace, Protocol, resolve_model
from rllm.errors import ConfigError
from rllm.inference.anthropic import AnthropicClient
from rllm.inference.openai import OpenAIClient

KEPT = ModelSettings(
    entries={
        "judge": ModelEntry(name="judge", provider="openai", model="gpt", key="env:MY_KEY"),
        "local": ModelEntry(name="local", provider="vllm", model="qwen", base_url="http://10.0.0.1:8000/v1"),
    }
)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", "mine")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "theirs")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_files_stay_here(tmp_path: Path) -> None:
    (tmp_path / "runs" / "lake").mkdir(parents=True)
    for name in ("runs/lake", "./runs/lake", "builtin:tiny"):
        place = resolve_model(name, settings=KEPT)
        assert place == ModelPlace(path=name)
        assert not place.is_server
    with pytest.raises(ConfigError, match="server"):
        resolve_model("runs/lake", settings=KEPT).client()


def test_a_kept_name_is_its_server_with_its_key() -> None:
    judge = resolve_model("judge", settings=KEPT)
    assert (judge.name, judge.base_url) == ("gpt", "https://api.openai.com/v1")
    assert (judge.api_key, judge.key_from) == ("mine", "MY_KEY")
    assert "mine" not in repr(judge)
    local = resolve_model("local", settings=KEPT)
    assert (local.title, local.api_key) == ("qwen at http://10.0.0.1:8000/v1", None)


async def test_a_provider_and_its_model_need_no_setup() -> None:
    claude = resolve_model("anthropic:claude", settings=KEPT)
    assert (claude.protocol, claude.api_key) == (Protocol.ANTHROPIC, "theirs")
    assert isinstance(claude.client(), AnthropicClient)
    llama = resolve_model("ollama:llama3:8b", settings=KEPT)
    assert (llama.name, llama.api_key) == ("llama3:8b", None)
    assert isinstance(llama.client(), OpenAIClient)


def test_a_base_url_takes_any_name() -> None:
    place = resolve_model("judge", base_url="http://127.0.0.1:1/v1", api_key="given", settings=KEPT)
    assert (place.name, place.base_url, place.api_key) == ("judge", "http://127.0.0.1:1/v1", "given")


def test_a_name_that_means_nothing_is_refused(subtests: pytest.Subtests) -> None:
    for name, says in [
        ("", "No model is named"),
        ("jugde", "Did you mean `judge`?"),
        ("runs/absent", "model `runs/absent`"),
        ("opnai:gpt", "did you mean `openai`?"),
        ("openai:gpt", "set OPENAI_API_KEY"),
        ("azure:gpt", "has no address of its own"),
        ("deepseek", "say which model: deepseek:MODEL"),
    ]:
        with subtests.test(name=name, says=says), pytest.raises(ConfigError, match=says):
            resolve_model(name, settings=KEPT)


def test_no_name_is_the_default() -> None:
    settings = ModelSettings(entries=KEPT.entries, default="local")
    assert resolve_model("", settings=settings) == resolve_model("local", settings=settings)


def test_a_name_that_means_two_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "judge").mkdir()
    with pytest.raises(ConfigError, match=r"\./judge"):
        resolve_model("judge", settings=KEPT)
    assert resolve_model("./judge", settings=KEPT).path == "./judge"


def test_a_key_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="MY_KEY"):
        resolve_model("judge", settings=KEPT)


def test_every_provider_says_how_it_is_reached() -> None:
    for name, each in PROVIDERS.items():
        assert each.base_url.startswith(("https://", "http://127.0.0.1")) or each.url_example, name
        assert each.key_variable or not each.needs_key, name
        assert each.base_url.startswith("https://") == bool(each.needs_key and each.base_url), name
