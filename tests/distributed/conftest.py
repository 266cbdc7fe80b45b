import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rllm.distributed import ALONE
from rllm.models.builtin import TinyModel, create_model

Ranks = Callable[[str, Sequence[Any], int], list[dict[str, Any]]]
Trained = dict[str, tuple[dict[str, torch.Tensor], list[dict[str, Any]]]]
"""By kind: parameters, and the metrics of each step."""
ROUNDED = "return_mean"
"""A sum of numbers in float32, so that the order shows earlier."""
CANCELLED = 5e-7
"""A loss of terms that are about 1 each is known no better in float32, also where they add up to nearly 0."""


@pytest.fixture(scope="session")
def smallest_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand parameters, to be read only."""
    directory = tmp_path_factory.mktemp("models") / "smallest"
    create_model(
        directory, TinyModel(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, vocab_size=400)
    )
    return directory


@pytest.fixture(scope="session")
def made(smallest_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[Any]], Path]:
    """A model whose heads share keys and values, where its family can."""

    def make(family: type[Any]) -> Path:
        directory = tmp_path_factory.mktemp("models") / family.model_type
        config = family(
            vocab_size=400,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            intermediate_size=32,
            tie_word_embeddings=family.model_type == "qwen3",
            pad_token_id=0,
        )
        torch.manual_seed(5)
        with torch.no_grad():
            model = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2)
        model.save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(smallest_model / name, directory / name)
        return directory

    return make


def beside(name: str) -> ModuleType:
    """A program of this directory, imported as the ranks import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        return import_module(name)


@pytest.fixture(scope="session")
def recorded() -> ModuleType:
    return beside("recorded")


@pytest.fixture(scope="session")
def letters_program() -> ModuleType:
    return beside("letters")


@pytest.fixture(scope="session")
def words_program() -> ModuleType:
    return beside("words")


@pytest.fixture(scope="session")
def moved() -> ModuleType:
    return beside("moved")


def trained_alone(recorded: ModuleType, directory: Path, steps: int) -> Trained:
    kinds = (*recorded.KINDS, recorded.IN_FLOAT32)
    return {kind: recorded.trained(kind, directory, ALONE, steps) for kind in kinds}


@pytest.fixture(scope="session")
def alone_for_one_step(recorded: ModuleType, smallest_model: Path) -> Trained:
    return trained_alone(recorded, smallest_model, 1)


@pytest.fixture(scope="session")
def alone_for_twenty_steps(recorded: ModuleType, smallest_model: Path) -> Trained:
    return trained_alone(recorded, smallest_model, 20)


@pytest.fixture(scope="session")
def require_all_well() -> Callable[[list[dict[str, Any]]], None]:
    def require(ended: list[dict[str, Any]]) -> None:
        assert not any(each["code"] for each in ended), "\n".join(each["errors"] for each in ended)

    return require


@pytest.fixture(scope="session")
def require_same(recorded: ModuleType) -> Callable[[Trained, Trained], None]:
    """In float64 parameters within 1e-10 of each other, and metrics but for their last digits; in float32
    parameters within 1e-4, loss and norm within 1e-5, and a loss that cancels within what float32 leaves."""

    def require(alone: Trained, together: Trained) -> None:
        for kind, (parameters, metrics) in alone.items():
            theirs, their_metrics = together[kind]
            assert parameters.keys() == theirs.keys()
            furthest = {name: float((parameters[name] - theirs[name]).abs().max()) for name in parameters}
            in_float32 = kind == recorded.IN_FLOAT32
            assert max(furthest.values()) < (1e-4 if in_float32 else 1e-10), (kind, furthest)
            for step, (mine, other) in enumerate(zip(metrics, their_metrics, strict=True)):
                assert mine.keys() == other.keys()
                for name in ("loss", "grad_norm") if in_float32 else mine:
                    rel = 1e-5 if in_float32 else 1e-6 if ROUNDED in name else 1e-9
                    least = CANCELLED if in_float32 and name == "loss" else 1e-12
                    assert other[name] == pytest.approx(mine[name], rel=rel, abs=least), (kind, step, name)

    return require


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Run a program of this directory as so many ranks, as torchrun would, until all have ended; returns how
    each did. What may be asked: nursery.py."""
    nursery = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "nursery.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    stdin, stdout = nursery.stdin, nursery.stdout
    assert stdin is not None
    assert stdout is not None
    assert stdout.readline() == "ready\n"

    def run(program: str, words: Sequence[Any], num_ranks: int) -> list[dict[str, Any]]:
        request = {"program": program, "words": [str(each) for each in words], "places": places(num_ranks)}
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    try:
        yield run
    finally:
        nursery.kill()
        nursery.communicate()


def places(num_ranks: int) -> list[dict[str, str]]:
    """What each rank finds in its environment."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    shared = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
