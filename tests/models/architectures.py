"""Tiny models of the architectures that transformers runs as causal language models."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

SMALL: dict[str, Any] = {
    "vocab_size": 604,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention"), 7),
    **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout", "residual_dropout", "activation_dropout", "embd_dropout"), 0.0),
    "qk_rope_head_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
    "state_size": 8,
    "time_step_rank": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 32,
}
"""By the names that configurations have for them; a configuration takes those that it knows."""

LINEAR = ["linear_attention", "full_attention"]
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "olmo_hybrid": {"layer_types": LINEAR},
    "qwen3_5_moe_text": {"layer_types": LINEAR},
    "qwen3_5_text": {"layer_types": LINEAR},
    "qwen3_next": {"layer_types": LINEAR},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
"""What an architecture needs beside that."""


def tiny(name: str) -> PreTrainedConfig:
    defaults = AutoConfig.for_model(name)
    # Some are derived from others, and take no value.
    derived = {key for key in SMALL if isinstance(getattr(type(defaults), key, None), property)}
    known = {key: value for key, value in SMALL.items() if hasattr(defaults, key) and key not in derived}
    if "kv_lora_rank" in known:  # a key for every query, of which one part alone is rotated
        known |= {"num_key_value_heads": known["num_attention_heads"]}
        known |= {"head_dim": known["qk_rope_head_dim"]} if "head_dim" in known else {}
    return AutoConfig.for_model(name, **{**known, **OWN.get(name, {})})
