"""`--model org/name`: fetched from a hub of our own, checked, kept, and never asked for twice."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.build.models import initial_model_path, model_directory
from rllm.build.providers import resolve_model
from rllm.data.hub import is_model_id
from rllm.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import fake_hub

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("torch")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from rllm.models.builtin import create_model

    create_model(tmp_path / "model")
    files = {each.name: each.read_bytes() for each in (tmp_path / "model").iterdir()}
    files |= {"README.md": b"# One", "pytorch_model.bin": b"a pickle", "onnx/config.json": b"{}"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    repos = {"org/tiny": files, "org/pickle": {"config.json": b"{}", "pytorch_model.bin": b"x"}}
    repos["org/gated"] = files
    with fake_hub.running(fake_hub.FakeHub(repos, gated=("org/gated",))) as served:
        address = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        yield served


def test_a_model_of_the_hub_is_fetched_once_and_loads(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        place = resolve_model("org/tiny")
    assert place.path == str(tmp_path / "home" / "models" / "hub" / "org" / "tiny")
    assert "Fetching the model org/tiny" in caplog.text
    assert "model.safetensors" in caplog.text
    fetched = {name for name, _ in hub.served}
    assert "model.safetensors" in fetched
    assert not fetched & {"pytorch_model.bin", "README.md", "onnx/config.json"}
    from rllm.models.directory import load_model

    assert load_model(model_directory(Path(place.path))).num_parameters > 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.served.clear()
    assert resolve_model("org/tiny") == place
    assert initial_model_path("org/tiny") == place.path
    assert hub.served == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/absent", r"model org/absent.*hub"),
        ("org/gated", "https://huggingface.co/org/gated"),
        ("org/tiny@nowhere", r"`nowhere`.*org/tiny@REVISION"),
        ("org/pickle", r"\*\.safetensors"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_mend(hub: Any, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        resolve_model(name)
    assert str(refusal.value).startswith(f"There is no model `{name}`: it is no file here")


def test_a_file_that_was_changed_on_the_way_is_thrown_away(hub: Any, tmp_path: Path) -> None:
    hub.lies_about.add("tokenizer.json")
    with pytest.raises(ConfigError, match="checksum"):
        resolve_model("org/tiny")
    assert not (tmp_path / "home" / "models" / "hub").exists()
    hub.lies_about.clear()
    assert resolve_model("org/tiny").path


def test_without_a_network_the_error_says_what_to_do(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"hub.*reached"):
        resolve_model("org/tiny")
    assert hub.served == []


def test_paths_that_were_mistyped_are_no_models_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    names = ("runs/lake", "checkpoints/one", "./a/b", "../a", "a/b/c", "/a/b", "a", "a/", "openai:org/x")
    assert not any(is_model_id(name) for name in names)
    assert is_model_id("Qwen/Qwen3-0.6B")
    assert is_model_id("Qwen/Qwen3-0.6B@main")


def test_revisions_with_slashes_are_kept_apart_by_model(hub: Any, tmp_path: Path) -> None:
    hub.repos["org/other"] = dict(hub.repos["org/tiny"])
    places = {resolve_model(f"org/{name}@refs/pr/1").path for name in ("tiny", "other")}
    assert len(places) == 2
    assert all(Path(each).parent == tmp_path / "home" / "models" / "hub" / "org" for each in places)
