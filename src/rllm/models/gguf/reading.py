"""A GGUF file as a model directory in Hugging Face format, dequantized to float32.

    file.gguf ──► settings, tensors ──► config.json, tokenizer.json, model.safetensors ──► any command

Weights become what the quantized numbers stand for: float32, and trainable as any others.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rllm.errors import MissingExtraError, ModelDirectoryError, choices_of
from rllm.files.atomic import write_directory_atomic
from rllm.models.directory import INDEX, write_weights_file
from rllm.models.gguf.families import (
    FAMILIES,
    GEMMA_WINDOW_THETA,
    ROTARY_FACTORS,
    Family,
    gemma_layer_types,
    gemma_query_scale,
    llama3_rope,
)
from rllm.models.gguf.tokenizer import end_token_ids, tokenizer_files

MAX_FILE_BYTES = 2 << 30
"""Size of one file of weights; a larger model is written to several."""


class GgufFile:
    """An open GGUF file of a family that is known.

    Raises ModelDirectoryError for one that cannot be read, or is of another family.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "gguf", "train") from error
        try:
            reader = GGUFReader(path)
            fields = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, LookupError, OSError, OverflowError, TypeError, MemoryError) as error:
            raise ModelDirectoryError(f"{path} cannot be read as GGUF: {error}") from error
        self.path = path
        self.fields: dict[str, Any] = fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = str(fields.get("general.architecture"))
        if architecture not in FAMILIES:
            raise ModelDirectoryError(
                f"{path} holds a model of the architecture {architecture!r}; "
                f"{choices_of(architecture, FAMILIES)}, or take the model in Hugging Face format."
            )
        if (num_parts := int(fields.get("split.count", 1))) > 1:
            raise ModelDirectoryError(
                f"{path} is one of {num_parts} parts of a model; join them with llama.cpp's "
                "`llama-gguf-split --merge` first."
            )
        self.family = FAMILIES[architecture]

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting of the architecture; ModelDirectoryError where it is absent and has no default."""
        value = self.fields.get(f"{self.family.architecture}.{name}", default)
        if value is None:
            raise ModelDirectoryError(f"{self.path} has no setting `{self.family.architecture}.{name}`.")
        return value

    @property
    def quantizations(self) -> list[str]:
        """Types of its matrices, such as Q4_1."""
        return sorted({tensor.tensor_type.name for tensor in self.tensors.values() if len(tensor.shape) > 1})


def import_gguf(path: Path, directory: Path) -> GgufFile:
    """Write the model in a GGUF file as a model directory, which is replaced in one step. Returns the file.

    Raises ModelDirectoryError, naming the file and what is wrong with it.
    """
    file = GgufFile(path)
    try:
        config = read_gguf_config(file)
        files = tokenizer_files(file.fields, max_positions=config["max_position_embeddings"])
    except ModelDirectoryError as error:
        message = str(error)
        raise ModelDirectoryError(
            message if message.startswith(str(path)) else f"{path} {message}"
        ) from error
    ends = end_token_ids(file.fields)
    generation = {
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": ends if len(ends) > 1 else config.get("eos_token_id"),
    }
    names = _tensor_names(file, config)

    def fill(target: Path) -> None:
        files["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
        files["generation_config.json"] = (json.dumps(generation, indent=2) + "\n").encode()
        for name, content in files.items():
            (target / name).write_bytes(content)
        _write_weights(target, file, names)

    write_directory_atomic(directory, fill)
    return file


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return config.json of the model."""
    heads = int(file.setting("attention.head_count"))
    width = int(file.setting("embedding_length"))
    tokens = {name: file.fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_IDS.items()}
    config = {
        "architectures": [file.family.class_name],
        "model_type": file.family.model_type,
        "dtype": "float32",
        "vocab_size": int(_tensor(file, "token_embd.weight").shape[1]),
        "hidden_size": width,
        "intermediate_size": int(file.setting("feed_forward_length")),
        "num_hidden_layers": int(file.setting("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.setting("attention.head_count_kv", heads)),
        "head_dim": int(file.setting("attention.key_length", width // heads)),
        "max_position_embeddings": int(file.setting("context_length")),
        "rms_norm_eps": _decimal(file.setting("attention.layer_norm_rms_epsilon")),
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "use_cache": True,
        **{name: int(token) for name, token in tokens.items() if token is not None},
    }
    return config | (_gemma_settings(file, config) if file.family.norm_offset else _plain_settings(file))


_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _plain_settings(file: GgufFile) -> dict[str, Any]:
    """Return what Llama and Qwen have beside the sizes."""
    has_bias = "blk.0.attn_q.bias" in file.tensors
    settings: dict[str, Any] = {"hidden_act": "silu", "rope_parameters": _rope(file)}
    if file.family.architecture == "qwen2":
        return {**settings, "use_sliding_window": False}
    return {**settings, "attention_bias": has_bias}


def _gemma_settings(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Gemma 3 has beside the sizes. Layers and the scale of queries follow llama.cpp."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": gemma_query_scale(config, config["head_dim"]),
        "sliding_window": int(file.setting("attention.sliding_window")),
        "layer_types": gemma_layer_types(config["num_hidden_layers"]),
        "rope_parameters": {
            "full_attention": _rope(file),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": _decimal(file.setting("rope.freq_base_swa", GEMMA_WINDOW_THETA)),
            },
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": file.fields.get("gemma3.final_logit_softcapping"),
    }


def _rope(file: GgufFile) -> dict[str, Any]:
    theta = _decimal(file.setting("rope.freq_base", 10_000.0))
    scaling = file.setting("rope.scaling.type", "none")
    if ROTARY_FACTORS in file.tensors:
        return llama3_rope(theta, np.asarray(file.tensors[ROTARY_FACTORS].data, dtype=np.float32))
    if scaling == "linear":
        factor = _decimal(file.setting("rope.scaling.factor"))
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling != "none":
        raise ModelDirectoryError(
            f"scales rotary positions by `{scaling}`; none and linear can be read. Take the model in Hugging "
            "Face format."
        )
    return {"rope_type": "default", "rope_theta": theta}


def _decimal(value: Any) -> float:
    """Return the shortest decimal of a float32: 1e-05 for 9.99999974e-06."""
    return float(str(np.float32(value)))


def _tensor(file: GgufFile, name: str) -> Any:
    if name not in file.tensors:
        raise ModelDirectoryError(f"{file.path} has no tensor `{name}`; it is cut, or holds no whole model.")
    return file.tensors[name]


def _tensor_names(file: GgufFile, config: Mapping[str, Any]) -> dict[str, str]:
    """Return GGUF name -> Hugging Face name of the tensors that are there; checks that none is missing."""
    family_names = file.family.tensor_names(config["num_hidden_layers"])
    unknown = sorted(file.tensors.keys() - family_names.keys() - {ROTARY_FACTORS})
    if unknown:
        raise ModelDirectoryError(
            f"{file.path} has the tensor `{unknown[0]}`, which no {file.family.model_type} has; take the "
            "model in Hugging Face format."
        )
    for name in family_names:
        if name.endswith(".weight") and name != "output.weight":
            _tensor(file, name)
    return {name: theirs for name, theirs in family_names.items() if name in file.tensors}


def _write_weights(directory: Path, file: GgufFile, names: Mapping[str, str]) -> None:
    """Write them a part at a time, so that one part is in memory."""
    parts = list(_parts(file, names))
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts):
        target = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        target = target if len(parts) > 1 else "model.safetensors"
        write_weights_file(directory / target, {names[name]: read_tensor(file, name) for name in part})
        weight_map |= {names[name]: target for name in part}
    if len(parts) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _parts(file: GgufFile, names: Mapping[str, str]) -> Iterator[list[str]]:
    part: list[str] = []
    num_bytes = 0
    for name in names:
        size = 4 * int(file.tensors[name].n_elements)
        if part and num_bytes + size > MAX_FILE_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(name)
        num_bytes += size
    yield part


def read_tensor(file: GgufFile, name: str) -> Tensor:
    """Return a tensor in float32, in the layout of Hugging Face."""
    from gguf.quants import QuantError, dequantize

    tensor = file.tensors[name]
    try:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except (QuantError, NotImplementedError, ValueError) as error:
        raise ModelDirectoryError(
            f"{file.path}: `{name}` is quantized as {tensor.tensor_type.name}, which cannot be read: {error}"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(to_hugging_face(file.family, name, values, file)))


def to_hugging_face(family: Family, name: str, values: np.ndarray, file: GgufFile) -> np.ndarray:
    """Return the values as Hugging Face orders them."""
    if family.norm_offset and name.endswith("norm.weight"):
        return values - np.float32(family.norm_offset)
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(name.split(".")[-2])
    if not family.has_paired_rotary or heads is None:
        return values
    num_heads = int(file.setting(heads, file.setting("attention.head_count")))
    rows = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)
