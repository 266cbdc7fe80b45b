"""A model directory in Hugging Face format as a GGUF file, for llama.cpp and Ollama.

    config.json, tokenizer.json, *.safetensors ──► settings, tokens, matrices in f16 or q8_0 ──► file.gguf

Vectors stay float32, as llama.cpp's converter leaves them. A model that llama.cpp would compute otherwise is
refused before anything is written.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from rllm.errors import ConfigError, MissingExtraError, choices_of
from rllm.files.atomic import StorageErrors, sync_directory
from rllm.models.directory import read_config, weight_files
from rllm.models.foreign import json_object
from rllm.models.gguf.families import (
    FAMILIES,
    GEMMA_WINDOW_THETA,
    ROTARY_FACTORS,
    Family,
    gemma_layer_types,
    gemma_query_scale,
    llama3_factors,
)
from rllm.models.gguf.tokenizer_settings import tokenizer_settings

BLOCK = 32
"""Numbers that share a scale in q8_0."""
F16_MAX = 65_504.0


class Precision(StrEnum):
    """Number format of the matrices in a file."""

    F16 = "f16"
    Q8_0 = "q8_0"


def export_gguf(directory: Path, path: Path, precision: Precision = Precision.F16) -> None:
    """Write the model in `directory` to `path`, which is replaced in one step.

    Raises ConfigError for a model that GGUF, as llama.cpp reads it, would compute otherwise.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "gguf", "train") from error
    config = read_config(directory)
    family = _find_family(directory, config)
    settings = _settings(directory, family, config)
    tensors = _tensors(directory, family, config)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    writer = gguf.GGUFWriter(temporary, family.architecture)
    try:
        _add_settings(writer, settings, _tokenizer(directory, config))
        writer.add_string("general.type", "model")
        writer.add_string("general.name", directory.resolve().name)
        file_type = {Precision.F16: "MOSTLY_F16", Precision.Q8_0: "MOSTLY_Q8_0"}[precision]
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        with StorageErrors(path):
            _write(writer, tensors, precision)
            os.replace(temporary, path)
            sync_directory(path.absolute().parent)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)


def _find_family(directory: Path, config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    families = {family.model_type: family for family in FAMILIES.values()}
    if model_type not in families:
        raise ConfigError(
            f"{directory} is a model of the type {model_type!r}; GGUF is written for others: "
            f"{choices_of(model_type, families)}."
        )
    return families[model_type]


def _settings(directory: Path, family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the architecture, by their names without its prefix."""
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    settings: dict[str, Any] = {
        "block_count": int(config["num_hidden_layers"]),
        "context_length": int(config["max_position_embeddings"]),
        "embedding_length": int(config["hidden_size"]),
        "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": heads,
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "vocab_size": int(config["vocab_size"]),
    }
    if family.norm_offset:
        return settings | _gemma_settings(directory, config, head_dim)
    _refuse(directory, config, {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False})
    return settings | _rope_settings(directory, read_rope(config))


def _gemma_settings(directory: Path, config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return what Gemma 3 has beside the sizes; refuse a model that llama.cpp would compute otherwise."""
    _refuse(
        directory,
        config,
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
            "layer_types": gemma_layer_types(int(config["num_hidden_layers"])),
            "query_pre_attn_scalar": gemma_query_scale(config, head_dim),
        },
    )
    ropes = config.get("rope_parameters") or {}
    local = ropes.get("sliding_attention") or {
        "rope_theta": config.get("rope_local_base_freq", GEMMA_WINDOW_THETA)
    }
    whole = ropes.get("full_attention") or read_rope(config, theta=1_000_000.0)
    settings = {
        "attention.sliding_window": int(config["sliding_window"]),
        "rope.freq_base_swa": float(local["rope_theta"]),
        **_rope_settings(directory, whole),
    }
    cap = config.get("final_logit_softcapping")
    return settings if cap is None else {**settings, "final_logit_softcapping": float(cap)}


def read_rope(config: Mapping[str, Any], *, theta: float = 10_000.0) -> dict[str, Any]:
    """Return `rope_parameters`, also of a config.json that writes them as `rope_theta` and `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", theta))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _rope_settings(directory: Path, rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope["rope_type"]
    settings: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if kind == "linear":
        return {**settings, "rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind not in ("default", "llama3"):  # the divisors of llama3 are a tensor
        raise ConfigError(
            f"{directory} scales rotary positions by {kind!r}; GGUF is written for default, linear, llama3."
        )
    return settings


def _refuse(directory: Path, config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that is given and is not as llama.cpp computes the family."""
    for name, value in expected.items():
        setting = config.get(name, value)
        if setting != value and (setting or value):
            raise ConfigError(
                f"{directory / 'config.json'} has `{name}` {setting!r}; llama.cpp computes the family with "
                f"{value!r}, so a GGUF file would be another model."
            )


Read = Callable[[], np.ndarray]


def _tensors(
    directory: Path, family: Family, config: Mapping[str, Any]
) -> dict[str, tuple[tuple[int, ...], Read]]:
    """Return GGUF name -> shape and what reads the values, in the order of the layers."""
    places = {name: path for path in weight_files(directory) for name in _names(path)}
    names = family.tensor_names(int(config["num_hidden_layers"]))
    is_tied = bool(config.get("tie_word_embeddings"))
    unknown = sorted(places.keys() - set(names.values()))
    if unknown:
        raise ConfigError(
            f"{directory} has the weight `{unknown[0]}`, which no {family.model_type} has in GGUF; merge an "
            "adapter into the model first."
        )
    tensors: dict[str, tuple[tuple[int, ...], Read]] = {}
    for name, theirs in names.items():
        if theirs not in places or (is_tied and name == "output.weight"):
            continue
        tensors[name] = _tensor(
            places[theirs], theirs, lambda values, name=name: to_gguf(family, name, values, config)
        )
    rope = read_rope(config)
    if rope["rope_type"] == "llama3":
        head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        factors = llama3_factors(rope, head_dim)
        tensors[ROTARY_FACTORS] = (factors.shape, lambda: factors)
    return tensors


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _tensor(
    path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]
) -> tuple[tuple[int, ...], Read]:
    with safe_open(path, framework="pt") as file:
        shape = tuple(file.get_slice(name).get_shape())

    def read() -> np.ndarray:
        with safe_open(path, framework="pt") as file:
            values = change(file.get_tensor(name).float().numpy())
        if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) > F16_MAX:
            raise ConfigError(f"{path}: `{name}` has numbers beyond {F16_MAX:,.0f}, which f16 cannot hold.")
        return values

    return shape, read


def to_gguf(family: Family, name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Return the values as GGUF orders them; the inverse of `reading.to_hugging_face`."""
    if family.norm_offset and name.endswith("norm.weight"):
        return values + np.float32(family.norm_offset)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if not family.has_paired_rotary or heads is None:
        return values
    num_heads = int(config.get(heads) or config["num_attention_heads"])
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _write(writer: Any, tensors: Mapping[str, tuple[tuple[int, ...], Read]], precision: Precision) -> None:
    """Write one tensor after the other, so that one is in memory."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape, quantize

    kinds: dict[str, GGMLQuantizationType] = {}
    for name, (shape, _) in tensors.items():
        kind = GGMLQuantizationType.F32
        if len(shape) > 1:
            fits = precision == Precision.Q8_0 and shape[-1] % BLOCK == 0
            kind = GGMLQuantizationType.Q8_0 if fits else GGMLQuantizationType.F16
        kinds[name] = kind
        byte_shape = quant_shape_to_byte_shape(shape, kind) if kind == GGMLQuantizationType.Q8_0 else shape
        dtype = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(
            kind, np.uint8
        )
        num_bytes = int(np.prod(byte_shape)) * np.dtype(dtype).itemsize
        writer.add_tensor_info(name, byte_shape, np.dtype(dtype), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (_, read) in tensors.items():
        writer.write_tensor_data(np.ascontiguousarray(quantize(read(), kinds[name])))


def _add_settings(writer: Any, settings: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> None:
    prefix = writer.arch
    for name, value in [
        *((f"{prefix}.{name}", value) for name, value in settings.items()),
        *tokenizer.items(),
    ]:
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)


def _tokenizer(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{directory} has no tokenizer.json; load its tokenizer with transformers and save it again."
        )
    files = {name: json_object(directory / name) for name in _SETTINGS if (directory / name).is_file()}
    settings = {**files.get("special_tokens_map.json", {}), **files.get("tokenizer_config.json", {})}
    template = directory / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    ends = [*_ids(files.get("generation_config.json", {})), *_ids(config)]
    try:
        return tokenizer_settings(
            json_object(path), settings, vocab_size=int(config["vocab_size"]), end_token_ids=ends
        )
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from error


_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json", "generation_config.json")


def _ids(settings: Mapping[str, Any]) -> Iterator[int]:
    value = settings.get("eos_token_id")
    yield from value if isinstance(value, list) else [] if value is None else [value]
