import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from rllm.models.builtin import TinyModel, create_model
from rllm.models.decoder import Attend

logging.disable_progress_bar()


@pytest.fixture(scope="session")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small built-in model directory; tests copy it before they break it."""
    directory = tmp_path_factory.mktemp("models") / "builtin"
    create_model(
        directory, TinyModel(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64), seed=3
    )
    return directory


@pytest.fixture
def copied(builtin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(builtin, tmp_path / "copy"))


@pytest.fixture(scope="session")
def saved(builtin: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """A directory that transformers saved, with random weights and our tokenizer; and the model it saved."""

    def save(config: PreTrainedConfig, std: float = 0.2) -> tuple[Path, Any]:
        torch.manual_seed(11)
        with torch.no_grad():
            reference = AutoModelForCausalLM.from_config(config).eval()
            for parameter in reference.parameters():
                parameter.normal_(0.0, std)  # norms and biases too, so that none can be forgotten
        directory = tmp_path_factory.mktemp("models") / config.model_type
        reference.save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(builtin / name, directory / name)
        return directory, reference

    return save


@pytest.fixture(scope="session")
def attend() -> Attend:
    """Plain causal attention over one row of tokens."""

    def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[0] != k.shape[0])
        return seen.transpose(0, 1)

    return causal
