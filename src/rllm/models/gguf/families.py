"""The model families that GGUF files are read and written for, and the names of their tensors and settings.

    GGUF `llama`, `qwen2`, `qwen3`, `gemma3`  ⇄  Hugging Face `llama`, `qwen2`, `qwen3`, `gemma3_text`

Source of the names and of the two differences in the numbers (`has_paired_rotary`, `norm_offset`): llama.cpp,
convert_hf_to_gguf.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllm.errors import ModelDirectoryError

EMBEDDING, OUTPUT_NORM, OUTPUT_LAYER = "model.embed_tokens", "model.norm", "lm_head"
ROTARY_FACTORS = "rope_freqs.weight"
"""The tensor of a Llama 3 with the divisors of the rotary frequencies."""
GEMMA_PATTERN = 6
"""Every sixth layer of Gemma 3 sees the whole text."""
GEMMA_WINDOW_THETA = 10_000.0
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings that every published Llama 3 has."""

_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_PLAIN = {**_ATTENTION, "post_attention_layernorm": "ffn_norm", **_MLP}


@dataclass(kw_only=True, slots=True, frozen=True)
class Family:
    """One architecture in both formats."""

    architecture: str
    """Name in GGUF; also the prefix of its settings."""
    model_type: str
    """Name in config.json."""
    class_name: str
    layer: Mapping[str, str]
    """Hugging Face name of a module in a layer -> its GGUF name."""
    has_paired_rotary: bool = False
    """Whether GGUF holds the rows of queries and keys with both halves of a rotary pair side by side."""
    norm_offset: float = 0.0
    """Added to the weights of norms in GGUF."""

    def tensor_names(self, num_layers: int) -> dict[str, str]:
        """Return GGUF name -> Hugging Face name of every tensor that the family may have."""
        modules = {"token_embd": EMBEDDING, "output_norm": OUTPUT_NORM, "output": OUTPUT_LAYER}
        for layer in range(num_layers):
            modules |= {
                f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for theirs, ours in self.layer.items()
            }
        return {
            f"{gguf}.{kind}": f"{name}.{kind}"
            for gguf, name in modules.items()
            for kind in ("weight", "bias")
        }


FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            architecture="llama",
            model_type="llama",
            class_name="LlamaForCausalLM",
            layer=_PLAIN,
            has_paired_rotary=True,
        ),
        Family(architecture="qwen2", model_type="qwen2", class_name="Qwen2ForCausalLM", layer=_PLAIN),
        Family(
            architecture="qwen3",
            model_type="qwen3",
            class_name="Qwen3ForCausalLM",
            layer={**_PLAIN, **_QK_NORMS},
        ),
        Family(
            architecture="gemma3",
            model_type="gemma3_text",
            class_name="Gemma3ForCausalLM",
            layer={
                **_ATTENTION,
                **_QK_NORMS,
                "post_attention_layernorm": "post_attention_norm",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
                **_MLP,
            },
            norm_offset=1.0,
        ),
    )
}


def gemma_query_scale(config: Mapping[str, Any], head_dim: int) -> int:
    """Return `query_pre_attn_scalar` as llama.cpp takes it: of the 27B another one than of smaller models."""
    if config["num_hidden_layers"] == 62:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return head_dim


def gemma_layer_types(num_layers: int) -> list[str]:
    """Return `layer_types` of Gemma 3, whose pattern no GGUF file writes down."""
    return [
        "full_attention" if (layer + 1) % GEMMA_PATTERN == 0 else "sliding_attention"
        for layer in range(num_layers)
    ]


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Return [head_dim / 2] the divisors of the rotary frequencies of a Llama 3 with these `rope_parameters`.

    Source: transformers, `_compute_llama3_parameters`.
    """
    frequencies = float(rope["rope_theta"]) ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def llama3_rope(theta: float, factors: np.ndarray) -> dict[str, Any]:
    """Return the `rope_parameters` whose divisors are `factors`.

    Raises ModelDirectoryError for divisors that no published Llama 3 has.
    """
    factor = float(factors.max())
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3_ROPE}
    if not np.allclose(llama3_factors(rope, 2 * len(factors)), factors, rtol=1e-4):
        raise ModelDirectoryError(
            f"has `{ROTARY_FACTORS}` that differ from those of Llama 3 ({LLAMA3_ROPE}); take the model in "
            "Hugging Face format."
        )
    return rope
