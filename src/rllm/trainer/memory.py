"""Numbers of parameters and of cached keys, from the sizes of a decoder."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rllm.models.decoder import DecoderShape

FLOAT = 4
"""Bytes of a float32."""
CACHE_GROWTH = 32
"""Room in the sampler's cache grows in multiples of so many tokens."""
LORA_INPUTS = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "out",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
}
"""Which matrix of a layer has a target of an adapter."""


def num_parameters(shape: "DecoderShape") -> int:
    """Parameters of the whole decoder."""
    return vocabulary_parameters(shape) + shape.hidden_size + shape.num_layers * layer_parameters(shape)


def vocabulary_parameters(shape: "DecoderShape") -> int:
    """Embedding, and the output layer where it is another."""
    return shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)


def layer_parameters(shape: "DecoderShape") -> int:
    """Parameters of one layer."""
    width, head = shape.hidden_size, shape.head_dim
    biases = (shape.num_heads + 2 * shape.num_kv_heads) * head * shape.qkv_bias + width * shape.out_bias
    norms = 2 * width + 2 * head * shape.qk_norm
    return matrix_parameters(shape) + biases + norms


def layer_matrices(shape: "DecoderShape") -> list[int]:
    """Parameters in each matrix of one layer, as the decoder stores them: `qkv`, `out`, `gate_up`, `down`."""
    width, head, inner = shape.hidden_size, shape.head_dim, shape.intermediate_size
    queries, keys = shape.num_heads * head, shape.num_kv_heads * head
    return [(queries + 2 * keys) * width, queries * width, 2 * width * inner, width * inner]


def matrix_parameters(shape: "DecoderShape") -> int:
    """Parameters in the matrices of one layer, which Muon may move."""
    return sum(layer_matrices(shape))


def lora_matrices(shape: "DecoderShape", rank: int, targets: frozenset[str]) -> list[int]:
    """Parameters in each matrix of an adapter: A and B of every target in every layer (Hu et al. 2021,
    arXiv:2106.09685, section 4.1)."""
    ends = shape.projections
    return [rank * end for target in sorted(targets) for end in ends[target]] * shape.num_layers


def lora_parameters(shape: "DecoderShape", rank: int, targets: frozenset[str]) -> int:
    """rank · (in + out) of every target in every layer."""
    return sum(lora_matrices(shape, rank, targets))


def cache_bytes(
    shape: "DecoderShape", num_slots: int, max_context: int, element: int, cache_tokens: int
) -> int:
    """Keys and values of every slot at its longest, or of `cache_tokens`: 2 · layers · heads · head size
    numbers a token (Kwon et al. 2023, arXiv:2309.06180, section 3), and a bias a head."""
    places = num_slots * -(-max_context // CACHE_GROWTH) * CACHE_GROWTH
    places = min(places, cache_tokens) if cache_tokens else places
    return element * places * shape.num_kv_heads * (2 * shape.num_layers * shape.head_dim + 1)


def readable(num_bytes: int) -> str:
    """In GB, or MB below one."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
