"""The bytes that an update needs, part by part, as formulas of sizes.

    weights ── gradients ── optimizer          one number a parameter (Rajbhandari et al. 2020, ZeRO)
    activations                                what a forward pass keeps for its backward pass, by layer
                                               (Korthikanti et al. 2023), or what enters each layer where
                                               the rest is computed again (Chen et al. 2016)

A pass over N tokens keeps in every layer what its backward kernels read: inputs of norms and matrices,
queries, keys and values, and both factors of the gate. The last layer computes only the M tokens that predict
a trained one. Gradients come as activations go, so the most that exists at one time is where the backward
pass begins or where it ends, and this module looks at both. It holds for the built-in decoder.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rllm.models.packing import MOST_LAID_OUT, needs_mask

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


@dataclass(kw_only=True, slots=True, frozen=True)
class MicroBatch:
    """The contents of one forward and backward pass: rows of one length behind prompts of one length.

    The first row behind each prompt is one path with it, and read in place.
    """

    num_prefixes: int
    """Prompts that several rows share, each computed once."""
    prefix: int
    """Tokens of each; 0 where nothing is shared."""
    num_rows: int
    suffix: int
    """Tokens of each row behind its prefix."""
    trained_tokens: int
    """Trained tokens of each row."""

    @classmethod
    def apart(cls, num_rows: int, length: int, trained_tokens: int) -> "MicroBatch":
        """Rows that share nothing."""
        return cls(num_prefixes=0, prefix=0, num_rows=num_rows, suffix=length, trained_tokens=trained_tokens)

    @property
    def num_tokens(self) -> int:
        """N: tokens of the pass."""
        return self.num_prefixes * self.prefix + self.num_rows * self.suffix

    @property
    def num_trained(self) -> int:
        """M: tokens whose log-probability is computed."""
        return self.num_rows * self.trained_tokens

    @property
    def num_states(self) -> int:
        """K: states that they are predicted by; rows that share a prompt share its last one."""
        return self.num_trained - (self.num_rows - self.num_prefixes if self.prefix else 0)

    @property
    def num_keys(self) -> int:
        """Keys that attention lays out for the rows behind the first of each prompt: each has a copy of its
        prefix. 0 without prefixes, where they are read in place."""
        return (self.num_rows - self.num_prefixes) * (self.prefix + self.suffix) if self.prefix else 0

    def num_queries(self, *, is_last: bool) -> int:
        """Queries that attention lays out at their places in the paths, where it takes no mask for them."""
        return sum(
            rows * self._columns
            for rows, queries, length in self._runs(is_last=is_last)
            if (queries, length) != (self._columns, self._columns)
            and not needs_mask(rows, queries, length, self._columns)
        )

    @property
    def mask(self) -> int:
        """Elements of the masks, made once for all layers: who sees whom behind a prefix, and what the
        trained tokens see in the last layer."""
        return sum(
            rows * queries * self._columns
            for is_last in (False, True)[: 1 + (self.num_states < self.num_tokens)]
            for rows, queries, length in self._runs(is_last=is_last)
            if needs_mask(rows, queries, length, self._columns)
        )

    @property
    def _columns(self) -> int:
        """Keys that a row's last token sees."""
        return self.prefix + self.suffix

    def _runs(self, *, is_last: bool) -> list[tuple[int, int, int]]:
        """(rows, queries of each, tokens of each) of those that are one path with their prefix, and of those
        that have it laid out."""
        behind = self.num_rows - self.num_prefixes if self.prefix else 0
        is_kept = is_last and self.num_states < self.num_tokens
        own = (self.trained_tokens, self.trained_tokens - 1) if is_kept else (self._columns, self.suffix)
        runs = ((self.num_rows - behind, own[0], self._columns), (behind, own[1], self.suffix))
        return [each for each in runs if each[0] and each[1]]


def fullest(batch: MicroBatch, group_size: int, max_tokens: int) -> MicroBatch:
    """The largest pass that rows like those of `batch`, in groups of `group_size`, are packed into.

    Whole groups first, then as many rows of one more as fit; a row that is longer has a pass of its own.
    """
    prefix, suffix = batch.prefix, batch.suffix
    laid_out = -(-(prefix + suffix) // MOST_LAID_OUT) if prefix else 0
    group_load = max(prefix + group_size * suffix, (group_size - 1) * laid_out)
    if (batch.num_prefixes * group_load if prefix else batch.num_tokens) <= max_tokens:
        return batch
    whole, room = divmod(max_tokens, group_load)
    more = max(0, room - prefix) // max(suffix, laid_out)
    rows = whole * group_size + more
    if rows <= 1:
        return MicroBatch.apart(1, prefix + suffix, batch.trained_tokens)
    return MicroBatch(
        num_prefixes=(whole + (more > 0)) if prefix else 0,
        prefix=prefix,
        num_rows=rows,
        suffix=suffix,
        trained_tokens=batch.trained_tokens,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class LayerSizes:
    """Elements that a layer keeps for each token, by where they are kept."""

    every_token: int
    """Bytes for each of all N tokens: the layer's input and its norm."""
    projections: int
    """Bytes for each of all N tokens: queries, keys and values, the first two of them rotated as well."""
    behind_attention: int
    """Bytes for each token that the layer computes to its end: attention's output, the second norm, the
    MLP."""
    mlp: int
    """The part of those bytes that is free again once the MLP's gradient is there."""
    keys: int
    """Bytes for each of `MicroBatch.num_keys`, keys and values together."""


def layer_sizes(shape: "DecoderShape", *, kept_inputs: frozenset[str], widening: int) -> LayerSizes:
    """`kept_inputs`: the matrices (`qkv`, `out`, `gate_up`, `down`) whose input the backward pass reads,
    because they, or an adapter beside them, are trained. `widening`: how much larger their elements are than
    those of activations, where they are copies in another precision.

    After Korthikanti et al. 2023 (arXiv:2205.05198, section 4.1), for a gated MLP with RMS norms and without
    dropout: a norm keeps its input, a trained matrix its input, attention queries, keys, values and its
    output (Dao et al. 2022, arXiv:2205.14135: no scores), the gate its two factors and silu(gate).
    """
    width, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_heads * shape.head_dim
    keys = 2 * shape.num_kv_heads * shape.head_dim
    before_rotation = queries + keys  # values are a view into it
    after_rotation = queries + keys // 2
    mlp_inputs = ("down" in kept_inputs) * inner + ("gate_up" in kept_inputs) * width
    mlp = 3 * inner + widening * mlp_inputs
    out_input = widening * queries * ("out" in kept_inputs and widening > 1)  # else attention's own output
    return LayerSizes(
        every_token=width + widening * ("qkv" in kept_inputs) * width,
        projections=before_rotation + after_rotation,
        behind_attention=queries + out_input + width + mlp,
        mlp=mlp + width,
        keys=keys,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class PassMemory:
    """Bytes that a forward and backward pass needs beyond weights and gradients, at three moments."""

    at_loss: int
    """Everything is kept, and the logits are there."""
    at_layer: int
    """The most while one of the upper layers works backwards."""
    of_layer: int
    """Bytes that are let go behind each layer but the last."""
    at_first_layer: int
    """The most while the first layer does, when the gradients of all others are there."""
    at_embedding: int
    """The gradient of the embedding, when all others are there."""
    at_only_embedding: int
    """The same in the only pass of an update, where nothing is there to add it to, unless it is tied."""
    in_chunks: bool
    """Whether logits are computed in chunks, which add up the output layer's gradient while all is kept."""

    @property
    def most(self) -> int:
        return max(self.at_loss, self.at_layer, self.at_embedding)

    def with_gradients(self, gradients: int, *, of_layer: int, of_vocabulary: int, is_only: bool) -> int:
        """The most bytes of both together. Behind the first pass of an update all gradients are there; in its
        only pass they come as activations go, those of the output layer (`of_vocabulary`) first."""
        if not is_only:
            return self.most + gradients
        return max(
            self.at_loss + (of_vocabulary if self.in_chunks else 0),
            self.at_layer + of_vocabulary,
            self.at_first_layer + gradients - of_layer,
            self.at_only_embedding + gradients,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class Pass:
    """A forward pass, and a backward pass where something is trained, of the built-in decoder."""

    shape: "DecoderShape"
    batch: MicroBatch
    element: int
    """Bytes of weights and activations each."""
    logit_tokens: int
    """Tokens that have logits at the same time; 0 for a critic, which has none."""
    kept_inputs: frozenset[str] = frozenset({"qkv", "out", "gate_up", "down"})
    lora_columns: int = 0
    """The rank of an adapter times the layers of each block that have one; 0 without an adapter."""
    trains_vocabulary: bool = True
    """Whether embedding and output layer have gradients."""
    recomputes: bool = False
    """`optimizer.gradient_checkpointing`."""
    with_entropy: bool = False
    upcasts_norms: bool = False
    """Whether norms keep what they read and its norm in float32, as torch does in 16 bits on a CPU."""

    def training(self) -> PassMemory:
        """Peak of a forward and a backward pass, in bytes."""
        batch, below = self.batch, self.shape.num_layers - 1
        full, last, fixed_bytes = (
            self._activations(is_last=False),
            self._activations(is_last=True),
            self._fixed_bytes(),
        )
        full_backward = self._backward(batch.num_tokens)
        full_top = full + full_backward
        last_top = last + self._backward(batch.num_states)
        first_top = full_top if below else last_top
        entering = batch.num_tokens * self.element * self.shape.hidden_size
        if self.recomputes:
            peak_bytes = fixed_bytes + (below + 1) * entering
            upper = (max(full_top, last_top) if below else last_top) - entering
            below_loss = peak_bytes
        else:
            peak_bytes = fixed_bytes + below * full
            upper = max(full_backward, last_top) if below else last_top
            below_loss = peak_bytes + last
        return PassMemory(
            at_loss=below_loss + self._outputs() + self._logits(),
            at_layer=peak_bytes + upper,
            of_layer=entering if self.recomputes else full,
            at_first_layer=fixed_bytes + first_top,
            at_embedding=fixed_bytes + entering + self._vocabulary(),
            at_only_embedding=fixed_bytes + entering + self._vocabulary() * self.shape.tied,
            in_chunks=0 < self.logit_tokens < batch.num_trained,
        )

    def scoring(self) -> int:
        """Bytes of a forward pass that nothing is trained by: what one layer works with, then logits."""
        shape, batch, sizes = self.shape, self.batch, self._sizes
        queries = shape.num_heads * shape.head_dim
        working = (
            2 * shape.hidden_size + sizes.every_token + sizes.projections + queries + shape.hidden_size
        ) * batch.num_tokens + max(
            4 * shape.intermediate_size * batch.num_tokens, sizes.keys * batch.num_keys
        )
        return self._fixed_bytes() + max(
            self.element * working, self.element * batch.num_trained * shape.hidden_size + self._logits()
        )

    @property
    def _sizes(self) -> LayerSizes:
        widening = FLOAT // self.element if self.lora_columns else 1
        return layer_sizes(self.shape, kept_inputs=self.kept_inputs, widening=widening)

    def _activations(self, *, is_last: bool) -> int:
        """Bytes that a layer keeps. The last one takes its queries out of the others."""
        sizes, batch, shape = self._sizes, self.batch, self.shape
        num_finished = batch.num_states if is_last else batch.num_tokens
        queries = shape.num_heads * shape.head_dim
        query_copies = queries * num_finished if is_last or batch.prefix else 0  # taken out, or put together
        elements = (
            (sizes.every_token + sizes.projections) * batch.num_tokens
            + sizes.behind_attention * num_finished
            + sizes.keys * batch.num_keys
            + 2 * queries * batch.num_queries(is_last=is_last)
            + query_copies
        )
        lora = self.lora_columns * batch.num_tokens
        norms = self._norms(batch.num_tokens + num_finished)
        if shape.qk_norm and self.upcasts_norms:
            norms += 2 * FLOAT * (queries + sizes.keys // 2) * batch.num_tokens
        return self.element * elements + FLOAT * lora + norms

    def _norms(self, num_states: int) -> int:
        """Bytes that norms of so many states keep beyond the states themselves."""
        copies = 1 if self.lora_columns else 2  # without a trained weight its other factor is not kept
        each = (copies * FLOAT - self.element) * self.shape.hidden_size
        return each * num_states if self.upcasts_norms else 0

    def _backward(self, num_finished: int) -> int:
        """Bytes beyond what is kept, at most, while a layer works backwards; less where it has let go of more
        than it made. First its MLP: gradients of the gate's factors. Then attention: gradients of queries,
        keys and values, when what the MLP kept is free."""
        shape, batch, sizes = self.shape, self.batch, self._sizes
        queries = shape.num_heads * shape.head_dim
        gate = (2 * shape.intermediate_size + shape.hidden_size) * num_finished
        laid_out = sizes.keys * batch.num_keys
        attention_bytes = laid_out + queries * num_finished
        prefixes = sizes.keys * batch.num_rows * batch.prefix // 2
        split = 2 * (queries + sizes.keys) * batch.num_tokens + queries * num_finished + prefixes
        attention = max(attention_bytes, split) - sizes.mlp * num_finished
        return self.element * max(gate, attention)

    def _outputs(self) -> int:
        """The last norm's input and output, and the columns of the loss."""
        shape, num_trained, num_states = self.shape, self.batch.num_trained, self.batch.num_states
        of_each = num_trained if self.batch.prefix else 0
        states = self.element * shape.hidden_size * (2 * num_states + of_each) + self._norms(num_states)
        return states + 16 * FLOAT * num_trained

    def _logits(self) -> int:
        """Where all tokens have logits at the same time: log-probabilities, their gradient, and the logits'.
        An entropy takes its products and a gradient of its own beside them. In chunks: logits and
        log-probabilities, which turn into the gradient; the output layer's gradient grows in place, but in
        16 bits, where each chunk has one of its own."""
        vocabulary, num_trained = self.shape.vocab_size, self.batch.num_trained
        if not self.logit_tokens:
            return 0
        of_token = FLOAT * vocabulary
        if num_trained <= self.logit_tokens:
            return (3 + 2 * self.with_entropy) * of_token * num_trained
        of_chunk = 2 * of_token * self.logit_tokens
        of_output_layer = self._vocabulary() if self.element < FLOAT else 0
        return of_chunk + self.element * self.shape.hidden_size * num_trained + of_output_layer

    def _vocabulary(self) -> int:
        """The gradient of the embedding or the output layer, before it is added to what is there."""
        return FLOAT * self.shape.vocab_size * self.shape.hidden_size if self.trains_vocabulary else 0

    def _fixed_bytes(self) -> int:
        """Ids, cosines and sines of every token, masks."""
        batch = self.batch
        # 16: the id and the position of a token have 8 bytes each.
        columns = (16 + 2 * self.element * self.shape.head_dim) * batch.num_tokens + 80 * batch.num_trained
        return columns + self.element * batch.mask


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
