"""A model directory in Hugging Face format ⇄ a model in memory.

`load_model` reads config, weights and tokenizer of any causal language model. Dense Llama-like families run on the
built-in decoder; every other architecture runs on transformers' own code through the same interface.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rllm.errors import ModelDirectoryError
from rllm.models.decoder import Attend, Decoder, DecoderShape
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.store.files import write_directory_atomic


class CausalModel(Protocol):
    """A causal language model whose attention is handed in; see `rllm.models.decoder`."""

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor: ...
    def logits(self, hidden_N_D: Tensor) -> Tensor: ...
    def state_dict_hf(self) -> dict[str, Tensor]: ...
    def load_hf(self, weights: dict[str, Tensor]) -> None: ...


@dataclass(kw_only=True, slots=True)
class LoadedModel:
    """Everything that sampling and training need of a model directory."""

    model: Any
    """A `CausalModel` that is also a `torch.nn.Module`."""
    tokenizer: HuggingFaceTokenizer
    config: dict[str, Any]
    directory: Path
    end_token_ids: tuple[int, ...]
    max_positions: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def load_model(directory: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Raises ModelDirectoryError naming the missing or broken file."""
    config = read_config(directory)
    tokenizer = HuggingFaceTokenizer(directory)
    weights = _read_weights(directory)
    shape = DecoderShape.from_config(config)
    if shape is not None:
        model: Any = Decoder(shape)
    else:
        from rllm.models.huggingface import HuggingFaceDecoder

        model = HuggingFaceDecoder(directory)
    model.load_hf(weights)
    model.to(device=device, dtype=dtype)
    heads = config.get("num_attention_heads") or config["n_head"]
    width = config.get("hidden_size") or config["n_embd"]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        directory=directory,
        end_token_ids=_end_token_ids(directory, config, tokenizer),
        max_positions=config.get("max_position_embeddings") or config.get("n_positions") or 2048,
        num_layers=config.get("num_hidden_layers") or config["n_layer"],
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or width // heads,
    )


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ModelDirectoryError when it is absent or no JSON object."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelDirectoryError(f"{directory} is no model directory: it has no config.json.")
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ModelDirectoryError(f"{path} is not valid JSON: {error}") from error


def save_model(loaded: LoadedModel, directory: Path) -> None:
    """Write `loaded` as a Hugging Face directory, replacing what was there in one step."""
    texts = {
        path.name: path.read_text()
        for path in sorted(loaded.directory.iterdir())
        if path.name in TEXT_FILES or path.suffix == ".jinja"
    }
    write_model(directory, loaded.config, loaded.model.state_dict_hf(), texts)


TEXT_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "generation_config.json",
    }
)


def write_model(
    directory: Path, config: dict[str, Any], weights: dict[str, Tensor], texts: dict[str, str]
) -> None:
    """Write a whole model directory or nothing."""

    def fill(target: Path) -> None:
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name, text in texts.items():
            (target / name).write_text(text)
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})

    write_directory_atomic(directory, fill)


def copy_model_directory(source: Path, target: Path) -> None:
    """Copy config, tokenizer and weights, so that a run does not depend on where its model came from."""

    def fill(directory: Path) -> None:
        for path in sorted(source.iterdir()):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)

    write_directory_atomic(target, fill)


def _read_weights(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelDirectoryError(
            f"{directory} has no weights (*.safetensors); weights in another format can be converted by loading the model "
            "with transformers and calling save_pretrained."
        )
    weights: dict[str, Tensor] = {}
    for path in files:
        try:
            weights.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise ModelDirectoryError(f"{path} cannot be read: {error}; copy the file again.") from error
    return weights


def _end_token_ids(
    directory: Path, config: dict[str, Any], tokenizer: HuggingFaceTokenizer
) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    declared = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    ids: set[int] = set()
    for value in (declared, config.get("eos_token_id"), tokenizer.end_token_id):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if not ids:
        raise ModelDirectoryError(
            f"{directory} names no end token, so no answer would ever end; set `eos_token_id` in config.json."
        )
    return tuple(sorted(ids))
