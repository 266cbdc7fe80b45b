"""Facts of a model that its directory states, before any weight is loaded: size, context, origin."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rllm.models.builtin_templates import CHAT_TEMPLATE
from rllm.models.foreign import read_config

FROM_SCRATCH = "rllm_from_scratch"
"""Key of config.json that is true for a model whose first weights rLLM drew at random. Training keeps it."""
_HEADER_LIMIT = 100_000_000
"""Bytes; safetensors itself refuses a longer header."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelFacts:
    num_parameters: int | None = None
    """None where the directory does not say it."""
    from_scratch: bool = False
    """Whether rLLM drew its first weights at random; any other model counts as pretrained."""
    max_positions: int | None = None
    """Tokens that the model can read; None where the configuration does not say it."""


def directory_facts(directory: Path) -> ModelFacts:
    """Return the facts of a model directory. Raises ModelDirectoryError for one without a config.json."""
    config = read_config(directory)
    positions = config.get("text_config", config).get("max_position_embeddings")
    return ModelFacts(
        num_parameters=_num_parameters(directory),
        from_scratch=is_from_scratch(directory, config),
        max_positions=positions if isinstance(positions, int) else None,
    )


def is_from_scratch(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether rLLM made the model: by its mark, and in directories without marks by the chat template."""
    if FROM_SCRATCH in config:
        return config[FROM_SCRATCH] is True
    settings = directory / "tokenizer_config.json"
    try:
        chat = json.loads(settings.read_text("utf-8")) if settings.is_file() else {}
    except ValueError:  # loading the model reports what is wrong with the file
        return False
    return isinstance(chat, dict) and chat.get("chat_template") == CHAT_TEMPLATE


def _num_parameters(directory: Path) -> int | None:
    """Return the entries of all tensors in its safetensors files; None where one cannot be read: loading the
    model reports that."""
    try:
        return sum(map(_num_entries, directory.glob("*.safetensors"))) or None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _num_entries(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if length > min(_HEADER_LIMIT, path.stat().st_size):
            raise ValueError(f"{path} has no safetensors header.")
        header = json.loads(file.read(length))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
