"""With the settings that a run chooses, the first steps move a pretrained model little and spoil nothing."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.models.named_templates import chat_template_named
from rllm.tracking.jsonl import read_metrics

RELAY = Path(__file__).resolve().parents[2] / "examples" / "pretrained" / "relay.py"
SMALL: dict[str, Any] = {
    "rollout": {"tasks_per_step": 4, "group_size": 4, "max_tokens_per_turn": 10},
    "evaluation": {"num_tasks": 4, "every_steps": 0},
    "threads": 1,
}


@pytest.fixture(scope="module")
def relay() -> ModuleType:
    spec = importlib.util.spec_from_file_location("relay", RELAY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_chat_template(model: Path, place: Path) -> Path:
    """A directory with the files of a base model and the ChatML template."""
    shutil.copytree(model, place)
    (place / "chat_template.jinja").write_text(chat_template_named("chatml", begins_texts=True))
    return place


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_five_steps_keep_the_policy_near_and_varied(
    relay: ModuleType, tmp_path: Path, request: pytest.FixtureRequest, name: str, rank: int
) -> None:
    model: Path = request.getfixturevalue(name)
    settings = {**SMALL, "lora": {"rank": rank}} if rank else SMALL
    if name == "gemma3":
        model = with_chat_template(model, tmp_path / "gemma3")
    relay.trainer(str(model), tmp_path / "run", steps=5, **settings).train()
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["phase"] == "train"]
    print(json.dumps([{key: line[key] for key in ("update_kl", "policy_entropy")} for line in lines]))
    assert all(line["update_kl"] < 0.1 for line in lines)
    assert lines[-1]["policy_entropy"] > 0.3 * lines[0]["policy_entropy"]
