"""The floating-point operations of an update, as formulas of sizes.

    sizes of a pass ──► forward ─► gradients of states ─► gradients of weights ──► operations of the pass
    N tokens, K states, U predictions, pairs of a query and a key

A product with a matrix of P numbers takes 2·P operations a token; its backward pass as many for the gradient
of what enters it, and as many for the gradient of the matrix: the 6·N·T of Kaplan et al. 2020
(arXiv:2001.08361, section 2.1). Attention adds 4 · heads · head size for each pair, forward (Chowdhery et al.
2022, PaLM, arXiv:2204.02311, appendix B, without its halving for causal masks), and twice that backward.

These are a model's operations, whatever a machine makes of them: a prompt that rows share counts once, as it
is computed once; padding, layers that are computed again, logits that are computed twice in chunks, norms,
softmax and the optimizer count nothing. Beside an adapter weights have no gradient, and below the first
adapted matrix nothing has. It holds for the built-in decoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rllm.trainer.memory import LORA_INPUTS

if TYPE_CHECKING:
    from rllm.models.decoder import DecoderShape


@dataclass(kw_only=True, slots=True, frozen=True)
class PassSizes:
    """The work of a pass. The last layer computes queries, attention and MLP of the kept states alone."""

    tokens: int
    """N: each token of shared beginnings once."""
    states: int
    """K: those that predict a trained token."""
    predictions: int
    """U: those that have logits."""
    pairs: int
    """Pairs of a token and a key of its row up to the row's end, in all layers but the last."""
    kept_pairs: int
    """The same of the kept states."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FlopRates:
    """Operations for each of what a pass has."""

    token: int
    state: int
    prediction: int
    pair: int
    kept_pair: int

    def of(self, sizes: PassSizes) -> int:
        """Operations of a pass."""
        return (
            self.token * sizes.tokens
            + self.state * sizes.states
            + self.prediction * sizes.predictions
            + self.pair * sizes.pairs
            + self.kept_pair * sizes.kept_pairs
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class AdapterSizes:
    """Numbers in the matrices A and B of the adapters beside one matrix of a layer."""

    a: int = 0
    b: int = 0


Adapters = Mapping[tuple[int, str], AdapterSizes]
"""By layer and by the matrix that they stand beside."""
NO_ADAPTER = AdapterSizes()


def forward_rates(shape: "DecoderShape") -> FlopRates:
    """Rates of a pass that nothing is learned from."""
    return _rates(shape, {}, trains_weights=False, has_logits=True)


def update_rates(shape: "DecoderShape", adapters: Adapters, *, has_logits: bool) -> FlopRates:
    """Rates of a forward and a backward pass; without `adapters` all weights are trained. A critic with a
    trunk of its own has no logits."""
    return _rates(shape, adapters, trains_weights=not adapters, has_logits=has_logits)


def adapters_of(num_numbers: Mapping[str, int]) -> dict[tuple[int, str], AdapterSizes]:
    """`num_numbers`: numbers in each matrix of an adapter, by peft's name of the parameter, such as
    `model.layers.3.self_attn.q_proj.lora_A.default.weight`."""
    adapters: dict[tuple[int, str], AdapterSizes] = {}
    for name, count in num_numbers.items():
        *path, target, kind, _, _ = name.split(".")
        key = (int(path[path.index("layers") + 1]), LORA_INPUTS[target])
        sizes, is_a = adapters.get(key, NO_ADAPTER), kind == "lora_A"
        adapters[key] = AdapterSizes(a=sizes.a + count * is_a, b=sizes.b + count * (not is_a))
    return adapters


def _rates(shape: "DecoderShape", adapters: Adapters, *, trains_weights: bool, has_logits: bool) -> FlopRates:
    """A matrix is passed through once forward, once more for the gradient of what enters it, where that has
    one, and once for its own, where it is trained."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    numbers = {
        "qkv": shape.hidden_size * (queries + 2 * keys),
        "out": queries * shape.hidden_size,
        "gate_up": 2 * shape.hidden_size * shape.intermediate_size,
        "down": shape.intermediate_size * shape.hidden_size,
    }
    counts = {"token": 0, "state": 0, "pair": 0, "kept_pair": 0}
    stream_has_gradient = trains_weights  # embeddings are trained with all other weights
    for layer in range(shape.num_layers):
        is_last = layer == shape.num_layers - 1
        inside_has_gradient = stream_has_gradient
        for matrix, count in numbers.items():
            entering = stream_has_gradient if matrix in ("qkv", "gate_up") else inside_has_gradient
            adapter = adapters.get((layer, matrix), NO_ADAPTER)
            # A is trained, and what enters it may have a gradient; what enters B, which is A's output, always
            # has one.
            passes = count * (1 + entering + trains_weights) + adapter.a * (2 + entering) + adapter.b * 3
            counts["state" if is_last and matrix != "qkv" else "token"] += 2 * passes
            inside_has_gradient = entering or trains_weights or adapter.a > 0
            if matrix == "qkv":
                counts["kept_pair" if is_last else "pair"] += 4 * queries * (1 + 2 * inside_has_gradient)
            elif matrix in ("out", "down"):
                stream_has_gradient |= inside_has_gradient
    logits = 2 * shape.hidden_size * shape.vocab_size * has_logits
    return FlopRates(**counts, prediction=logits * (1 + stream_has_gradient + trains_weights))
