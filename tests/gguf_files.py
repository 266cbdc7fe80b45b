"""GGUF files of tiny models with random weights, written as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

SPECIAL = ("<|end|>", "<|begin|>", "<tool>")
MERGES = ("t h", "th e", "Ġ the", "1 2")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
"""Settings of a configuration of transformers; the vocabulary is `len(tokens())`."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda sizes: LlamaConfig(**sizes, tie_word_embeddings=True),
    "llama3": lambda sizes: LlamaConfig(**sizes, rope_parameters=LLAMA3),
    "qwen2": lambda sizes: Qwen2Config(**{**sizes, "head_dim": 8}),
    "qwen3": lambda sizes: Qwen3Config(**sizes, tie_word_embeddings=True),
    "gemma3": lambda sizes: Gemma3TextConfig(
        **{**sizes, "num_hidden_layers": 7}, sliding_window=8, query_pre_attn_scalar=8
    ),
}
PROMPT = "the cat is at 12 and 123 <tool>\n  the end"


def tokens() -> list[str]:
    return [
        *SPECIAL,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(merge.replace(" ", "") for merge in MERGES),
    ]


def random_model(family: str) -> Any:
    """Return a model of transformers of one of `CONFIGS`."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]({**SIZES, "vocab_size": len(tokens())})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)  # norms and biases too, so that none can be forgotten
    return model


def write_gguf(path: Path, reference: Any, architecture: str, *, pre: str = "qwen2") -> Path:
    """Write a model of transformers; its names are those of the package `gguf`."""
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, config.head_dim))
    _add_tokenizer(writer, pre)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.detach().float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = _paired(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = _paired(values, config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert translated is not None, name
        writer.add_tensor(translated, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.USER_DEFINED]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens())
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(tokens()) - len(kinds)))
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _paired(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp, convert_hf_to_gguf.py, `LlamaModel.permute`."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Those that transformers divides the frequencies by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(rope_parameters=rope, head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return (plain / scaled).numpy()
