"""`rllm model push`: a model directory and its card arrive on a hub of our own, and load from there."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.build.model_push import push_model
from rllm.build.providers import resolve_model
from rllm.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import fake_hub

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("torch")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with fake_hub.running(fake_hub.FakeHub({})) as served:
        address = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        yield served


def test_a_model_arrives_with_a_card_and_is_fetched_again(hub: Any, tmp_path: Path) -> None:
    from rllm.models.builtin import create_model

    create_model(tmp_path / "tiny")
    address = push_model("tiny", "me/tiny", private=True)
    assert address.startswith(f"{hub.endpoint}/me/tiny/commit/")
    files = hub.repos["me/tiny"]
    assert files.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert "manifest.json" not in files
    assert files["model.safetensors"] == (tmp_path / "tiny" / "model.safetensors").read_bytes()
    fetched = Path(resolve_model("me/tiny").path)
    assert (fetched / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_the_card_of_a_run_has_data_settings_and_figures(hub: Any, tmp_path: Path) -> None:
    from rllm.build.configs import training_config
    from rllm.build.training import build_run

    config = training_config(
        "frozenlake",
        None,
        (
            *(
                "warm_start.steps=1",
                "steps=1",
                "rollout.tasks_per_step=2",
                "rollout.group_size=2",
                "threads=1",
            ),
            *("evaluation.num_tasks=4", "evaluation.every_steps=0", "task.num_train_tasks=50"),
        ),
    )
    build_run(config, tmp_path / "run").train()
    push_model("run", "me/lake", private=False)
    card = hub.repos["me/lake"]["README.md"].decode()
    assert "| `optimizer.learning_rate` |" in card
    assert "| after training |" in card
    assert "frozen" in card.lower()
    assert "–100.0)" in card or " (0.0–" in card


def test_a_key_that_may_not_write_and_a_name_that_is_none_are_refused(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rllm.models.builtin import create_model

    create_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="ORGANISATION/NAME"):
        push_model("tiny", "tiny", private=False)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(ConfigError, match=r"me/tiny .*HF_TOKEN"):
        push_model("tiny", "me/tiny", private=False)
