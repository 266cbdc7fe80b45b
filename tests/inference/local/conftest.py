import asyncio
import dataclasses
import functools
import inspect
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, Qwen3Config
from transformers.utils import logging

from rllm.inference.local.client import LocalClient
from rllm.models.builtin import TinyModel, create_model
from rllm.models.directory import LoadedModel, load_model

logging.disable_progress_bar()

TOKENS: dict[str, Any] = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "qwen3": Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        **TOKENS,
    ),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, **TOKENS),
    "gpt_neox": GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        **TOKENS,
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An engine that loses a request would hang the test that waits for it: here that is a failure."""
    for item in items:
        here = isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent
        if here and inspect.iscoroutinefunction(item.obj):
            item.obj = _bounded(item.obj)


def _bounded(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(120):
            await test(*args, **kwargs)

    return run


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by name: ours, and some that transformers saved."""
    root = tmp_path_factory.mktemp("models")
    size = TinyModel(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_positions=256)
    create_model(root / "builtin", size, seed=3)
    for name, config in CONFIGS.items():
        torch.manual_seed(11)
        with torch.no_grad():
            model = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
        model.save_pretrained(root / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(root / "builtin" / file, root / name / file)
    return {name: root / name for name in ("builtin", *CONFIGS)}


@pytest.fixture(scope="session")
def models(directories: dict[str, Path]) -> dict[str, LoadedModel]:
    """Loaded once; nobody changes their weights."""
    return {name: load_model(directory) for name, directory in directories.items()}


@pytest.fixture(scope="session")
def tiny(models: dict[str, LoadedModel]) -> LoadedModel:
    return models["builtin"]


@pytest.fixture(scope="session")
def endless(tiny: LoadedModel) -> LoadedModel:
    """The same weights without an end token: answers are as long as they are asked to be."""
    return dataclasses.replace(tiny, end_token_ids=())


@pytest.fixture
def own(directories: dict[str, Path]) -> LoadedModel:
    """A model without end token whose weights a test may change."""
    return dataclasses.replace(load_model(directories["builtin"]), end_token_ids=())


Serve = Callable[..., LocalClient]


@pytest.fixture
def serve() -> Iterator[Serve]:
    clients: list[LocalClient] = []

    def start(loaded: LoadedModel, **options: Any) -> LocalClient:
        client = LocalClient(loaded, **{"num_slots": 4, "max_context": 192, **options})
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.engine.close()


@pytest.fixture(scope="session")
def logprobs_of() -> Callable[..., Tensor]:
    """[T - 1, V] log-probabilities of each next token by one plain forward pass over the whole row."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    def compute(loaded: LoadedModel, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
        row = torch.tensor(ids[:-1])
        with torch.no_grad():
            logits = loaded.model.logits(loaded.model.hidden(row, torch.arange(len(row)), attend))
        return torch.log_softmax(logits.double() / temperature, dim=-1)

    return compute


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], Any]:
    """Give way to the other tasks, and to the engine's thread, until something is the case."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0)

    return wait
