"""What a served model keeps of its conversations, on machines of little memory."""

import asyncio
import logging
import math
from pathlib import Path

import pytest

from rllm.build.models import local_client
from rllm.config.schema import InferenceConfig
from rllm.errors import ConfigError
from rllm.models.builtin import TinyModel, create_model
from rllm.models.directory import LoadedModel, load_model
from rllm.trainer import free_memory
from rllm.trainer.fitting import GROWING, SHARE
from rllm.types import SamplingParams

A_TOKEN = 4 * (2 * 2 * 2 * 16 + 2)
"""Bytes of one: keys and values of two layers with two heads of 16, and a bias a head."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("served") / "tiny"
    create_model(path, TinyModel(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64))
    return load_model(path)


def memory_for(tokens: int, loaded: LoadedModel, patch: pytest.MonkeyPatch) -> None:
    """Let half of what the weights leave of the free memory have room for so many, as in a run. The machine
    has more memory, which other programs have."""
    weights = sum(each.numel() * each.element_size() for each in loaded.model.parameters())
    free = math.ceil((weights + 2 * GROWING * tokens * A_TOKEN) / SHARE)
    patch.setattr(free_memory, "free_bytes", lambda device: free)
    patch.setattr(free_memory, "machine_bytes", lambda device: 100 * free)


async def test_many_are_answered_in_the_room_that_there_is(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory_for(300, loaded, monkeypatch)
    with caplog.at_level(logging.WARNING):
        client = local_client(loaded, InferenceConfig(num_slots=64, lockstep=False), max_context=256)
    assert "288 tokens" in caplog.text
    calls = (
        client.generate_ids(list(range(10, 60 + number)), SamplingParams(max_tokens=30, seed=number))
        for number in range(12)
    )
    outputs = await asyncio.gather(*calls)
    held = sum(
        tensor.numel() * tensor.element_size()
        for shelf in client.engine._cache.shelves
        for tensor in (shelf.keys, shelf.values, shelf.bias)
    )
    await client.close()
    assert len(outputs) == 12
    assert all(output.completion_ids for output in outputs)
    assert held <= 300 * A_TOKEN


async def test_a_machine_with_room_for_all_says_nothing(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory_for(64 * 256, loaded, monkeypatch)
    with caplog.at_level(logging.WARNING):
        client = local_client(loaded, InferenceConfig(num_slots=64, lockstep=False), max_context=256)
    await client.close()
    assert not caplog.text


def test_a_machine_without_room_for_one_conversation_is_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_for(200, loaded, monkeypatch)
    with pytest.raises(ConfigError, match=r"256 tokens .*fewer"):
        local_client(loaded, InferenceConfig(lockstep=False), max_context=256)


def test_less_than_one_conversation_is_refused_before_any_model_is_loaded(tmp_path: Path) -> None:
    from rllm.config.loader import load_config

    with pytest.raises(ConfigError, match=r"`inference.cache_tokens` is 100, .*`inference.max_context` 512"):
        load_config(["inference.cache_tokens=100", "inference.max_context=512"])
