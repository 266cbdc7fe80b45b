"""A dense decoder (Llama, Mistral, Qwen2, Qwen3) whose attention is handed in.

    tokens_N, positions_N ──► embed ──► × L layers ──► norm ──► hidden_N_D
                                           │
                      norm ─► qkv ─► rotate ─► ATTEND ─► out, norm ─► gated MLP

Tokens are one flat row without padding, whatever sequences they belong to: linear layers do no wasted work.
Only attention needs to know who may see whom, so the caller supplies it: the inference engine one that reads
and writes its KV cache, the trainer one that knows packed rows and shared prompts. Both run these very
parameters, so publishing weights to the sampler is a no-op in memory. Query, key and value (and gate and up)
are stored as one matrix each; `load` and `state_dict_hf` translate from and to Hugging Face names. An adapter
(`rllm.models.lora`) adds to what the four matrices of a layer give.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rllm.errors import ConfigError, ModelDirectoryError
from rllm.models.unused_rows import with_unused_rows_masked

Attend = Callable[..., Tensor]
"""(layer, q [M, H, d], k [N, K, d], v [N, K, d]) -> [M, H, d]; scaling by 1/sqrt(d) is the callee's.

M is N, except in the last layer of a pass that keeps fewer states. A layer that asks for more than
softmax(q·k)·v gives its `rllm.models.attention.Wishes` as a fifth argument; then M is N.
"""


class Adapt(Protocol):
    """The addition of an adapter to the output of one matrix."""

    def __call__(self, x: Tensor, output: Tensor, /) -> Tensor:
        """[N, out] `output`, which the matrix made of `x` [N, in], with what the adapter adds to it."""
        ...

    def look_up(self) -> None:
        """Use the parameters that stand in the adapter's layers now."""
        ...

    def divide(self, num_parts: int) -> None:
        """Add to one of so many equal parts of the output from now on: some rows of each layer in it."""
        ...


class Together(Protocol):
    """The processes that compute a layer together, each some of its heads and columns (Shoeybi et al. 2019,
    arXiv:1909.08053, section 3)."""

    def enter(self, x: Tensor, /) -> Tensor:
        """`x`, which all of them have; its gradient is the sum of theirs."""
        ...

    def leave(self, x: Tensor, /) -> Tensor:
        """The sum of what all of them have; each gets the gradient of it."""
        ...


Change = Callable[[], Tensor]
"""The change that an adapter adds to a weight, of the weight's shape."""

ONLY_WHAT_ENTERS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""The arguments of checkpointing for layers: they draw no random numbers."""

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

MAX_COUNT = 1 << 24
"""The greatest count in a config; the longest published context has 10 million positions."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DecoderShape:
    """The numbers of a Hugging Face config that this decoder is built from."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer of a block, by its Hugging Face name."""
        width, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (queries, width),
            "k_proj": (keys, width),
            "v_proj": (keys, width),
            "o_proj": (width, queries),
            "gate_proj": (inner, width),
            "up_proj": (inner, width),
            "down_proj": (width, inner),
        }

    def part(self, num_parts: int) -> "DecoderShape":
        """The share of a layer that each of so many processes computes: some of its heads and columns.

        Raises ConfigError where they cannot have as many each.
        """
        for what, count in (
            ("heads of keys and values", self.num_kv_heads),
            ("columns of its MLP", self.intermediate_size),
        ):
            if count % num_parts:
                raise ConfigError(
                    f"`distributed.tensor_parallel` is {num_parts}, and a layer of the model has {count} "
                    f"{what}; choose a divisor of both {self.num_kv_heads} and {self.intermediate_size}."
                )
        return replace(
            self,
            num_heads=self.num_heads // num_parts,
            num_kv_heads=self.num_kv_heads // num_parts,
            intermediate_size=self.intermediate_size // num_parts,
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DecoderShape | None":
        """None when the config asks for something this decoder does not do: then the generic one serves.

        Raises ModelDirectoryError for a number that is none, or that no model has.
        """
        family = config.get("model_type")
        if family not in SUPPORTED:
            return None
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ModelDirectoryError(f"has {rope!r} as `rope_parameters`; it must be an object.")
        plain_rope = rope.get("rope_type", rope.get("type", "default")) == "default"
        # Qwen configs may name a window that is off; Mistral's have no `use_sliding_window`: theirs is on.
        window = (
            config.get("sliding_window") if config.get("use_sliding_window", family == "mistral") else None
        )
        max_positions = _count(config, "max_position_embeddings", 2048)
        # A window as long as the longest row hides nothing.
        is_windowed = window and not (isinstance(window, int) and window >= max_positions)
        if not plain_rope or is_windowed or config.get("hidden_act", "silu") != "silu":
            return None
        if config.get("mlp_bias"):
            return None
        heads, width = _count(config, "num_attention_heads"), _count(config, "hidden_size")
        num_kv_heads = _count(config, "num_key_value_heads", heads)
        head_dim = _count(config, "head_dim", max(1, width // heads))
        if heads % num_kv_heads or head_dim % 2:
            raise ModelDirectoryError(
                f"has {heads} attention heads of size {head_dim} for {num_kv_heads} of keys and values; the "
                "size must be even, and the heads a multiple of those of keys and values."
            )
        return cls(
            vocab_size=_count(config, "vocab_size"),
            hidden_size=width,
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=_count(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            rope_theta=_positive(rope, "rope_theta", _positive(config, "rope_theta", 10_000.0)),
            max_positions=max_positions,
            tied=bool(config.get("tie_word_embeddings", False)),
            # Qwen2 always has these biases, and its config.json has no key for them.
            qkv_bias=family == "qwen2" or bool(config.get("attention_bias")),
            out_bias=family != "qwen2" and bool(config.get("attention_bias")),
            qk_norm=family == "qwen3",
        )


def _count(config: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Where there is no `default` the key must be there."""
    value = config.get(name)
    if value is None:
        value = default
    if value == 0 and name not in config:
        raise ModelDirectoryError(f"has no key '{name}'.")
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise ModelDirectoryError(
            f"has {value!r} as `{name}`; it must be a whole number from 1 to {MAX_COUNT:,}."
        )
    return value


def _positive(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0.0 < value < math.inf:
        raise ModelDirectoryError(f"has {value!r} as `{name}`; it must be a number above 0.")
    return float(value)


class _Linear(nn.Linear):
    """Its numbers come from a file or from `Decoder.initialize`; none are drawn before, which on the device
    `meta` would import torch's compiler."""

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """See `_Linear`."""

    def reset_parameters(self) -> None:
        pass


class Block(nn.Module):
    """One layer: attention and a gated MLP, each added to the states that enter it."""

    adapts: tuple[Adapt, Adapt, Adapt, Adapt] | None = None
    """The changes of an adapter, for `qkv`, `out`, `gate_up` and `down`."""
    together: Together | None = None
    """The ranks that have the rest of this layer, where `shape` is a part of it."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        width, head = shape.hidden_size, shape.head_dim
        qkv_rows = (shape.num_heads + 2 * shape.num_kv_heads) * head
        self.input_norm = nn.Parameter(torch.ones(width))
        self.qkv = _Linear(width, qkv_rows, bias=shape.qkv_bias)
        self.out = _Linear(shape.num_heads * head, width, bias=shape.out_bias)
        self.post_norm = nn.Parameter(torch.ones(width))
        self.gate_up = _Linear(width, 2 * shape.intermediate_size, bias=False)
        self.down = _Linear(shape.intermediate_size, width, bias=False)
        if shape.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(head))
            self.k_norm = nn.Parameter(torch.ones(head))

    @cached_property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """Input norm, qkv and its bias, out and its bias, post norm, gate and up, down.

        Looked up once, because nn.Module takes a sixth of a small model's step to find them by name.
        Parameters are written to; whoever replaces them calls `Decoder.look_up_parameters`.
        """
        qkv, out = self.qkv, self.out
        return (
            self.input_norm,
            qkv.weight,
            qkv.bias,
            out.weight,
            out.bias,
            self.post_norm,
            self.gate_up.weight,
            self.down.weight,
        )

    def forward(
        self,
        x: Tensor,
        layer: int,
        cosines_and_sines: tuple[Tensor, ...],
        attend: Attend,
        keep_M: Tensor | None,
    ) -> Tensor:
        """[N, D] states behind the layer, or [M, D] of those that `keep_M` names; see `Decoder.hidden`."""
        shape, eps, head = self.shape, self.shape.norm_eps, self.shape.head_dim
        num_heads, num_rotated = shape.num_heads, shape.num_heads + shape.num_kv_heads
        cos_N1d, sin_N1d = cosines_and_sines
        input_norm, qkv_weight, qkv_bias, out_weight, out_bias, post_norm, gate_up, down = self.parts
        adapts, together = self.adapts, self.together
        x_norm = rms_norm(x, input_norm, eps)
        if together is not None:
            x_norm = together.enter(x_norm)
        qkv = F.linear(x_norm, qkv_weight, qkv_bias)
        if adapts is not None:
            qkv = adapts[0](x_norm, qkv)
        qk, v = qkv.view(len(x), -1, head).split((num_rotated, shape.num_kv_heads), dim=1)
        if shape.qk_norm:
            q = rms_norm(qk[:, :num_heads], self.q_norm, eps)
            k = rms_norm(qk[:, num_heads:], self.k_norm, eps)
            qk = torch.cat((q, k), dim=1)
        # x·cos + swap_halves(x)·(±sin) is the usual rotation, in three kernels instead of seven.
        qk = torch.addcmul(qk * cos_N1d, qk.roll(head // 2, dims=-1), sin_N1d)
        q, k = qk.split((num_heads, shape.num_kv_heads), dim=1)
        if keep_M is not None:
            q, x = take_rows(q, keep_M), take_rows(x, keep_M)
        attention_output = attend(layer, q, k, v).reshape(len(x), -1)
        x = self._add(x, attention_output, out_weight, out_bias, None if adapts is None else adapts[1])
        x_norm = rms_norm(x, post_norm, eps)
        if together is not None:
            x_norm = together.enter(x_norm)
        gate_and_up = F.linear(x_norm, gate_up)
        if adapts is not None:
            gate_and_up = adapts[2](x_norm, gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        gate_and_up = F.silu(gate) * up
        return self._add(x, gate_and_up, down, None, None if adapts is None else adapts[3])

    def _add(
        self, x: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, adapt: Adapt | None
    ) -> Tensor:
        """`x` with what a matrix makes of its inputs, of which several ranks have some columns each: an
        adapter's change is a part as well, and in the same sum."""
        if self.together is None:
            x = torch.addmm(x, inputs, weight.t())
        else:
            output = F.linear(inputs, weight)
            x = x + self.together.leave(output if adapt is None else adapt(inputs, output))
        # Behind the sum of the ranks: each has all of this bias, and the sum would have it once a rank.
        if bias is not None:
            x = x + bias
        return x if adapt is None or self.together is not None else adapt(inputs, x)


class Decoder(nn.Module):
    """See the module docstring. `shape` is public; parameters are float32 unless moved."""

    blocks: Iterable[Block]
    is_split = False
    """Whether other processes have the rest of each layer."""
    rotation_P_2d: Tensor
    unused_ids: Tensor | None
    num_used_rows: int | None = None
    """Ids that no token has, or the first of them where they are the last rows; see
    `rllm.models.unused_rows`."""
    changes: Mapping[str, Change] = MappingProxyType({})
    """The changes of an adapter, by the Hugging Face name of the weight."""
    by_row: str = ""
    """See `rllm.models.directory.CausalModel`."""
    has_plain_attention = True
    """Whether every layer asks for no more than softmax(q·k)·v, in a window or not."""
    image_grids = None
    """See `rllm.models.directory.CausalModel`: it reads no images."""
    sees_images_whole = False
    recomputes = False
    """Whether a backward pass computes each layer again; see `recompute_layers`."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = _Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = cast("Iterable[Block]", nn.ModuleList(Block(shape) for _ in range(shape.num_layers)))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.head = None if shape.tied else _Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.register_buffer("rotation_P_2d", _rotation_table(shape), persistent=False)
        self.register_buffer("unused_ids", None, persistent=False)

    def hidden(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, keep_M: Tensor | None = None
    ) -> Tensor:
        """[N, D] final hidden states, normed; `positions_N` are positions within each token's own sequence.

        With `keep_M` (ascending places in N) only those M states are returned, and the last layer computes
        queries and MLP for them alone: everything behind its keys and values serves nobody else. `attend`
        then gets M queries there.
        """
        cosines_and_sines = F.embedding(positions_N, self.rotation_P_2d).unsqueeze(1).chunk(2, dim=-1)
        x = F.embedding(tokens_N, self.embed.weight)
        for layer, block in enumerate(self.blocks):
            keep = keep_M if layer == self.shape.num_layers - 1 else None
            # The sampler runs this model, too, and has no backward pass.
            if self.recomputes and torch.is_grad_enabled():
                x = checkpoint(block, x, layer, cosines_and_sines, attend, keep, **ONLY_WHAT_ENTERS)
            else:
                x = block(x, layer, cosines_and_sines, attend, keep)
        return rms_norm(x, self.norm, self.shape.norm_eps)

    def recompute_layers(self) -> None:
        """From now on a backward pass computes each layer again from what entered it (Chen et al. 2016,
        arXiv:1604.06174), so that nothing else has to be kept."""
        self.recomputes = True

    def layers(self) -> list[nn.Module]:
        """In the order in which states go through them."""
        return list(cast("nn.ModuleList", self.blocks))

    def look_up_parameters(self) -> None:
        """Compute with the parameters that stand in the modules now: some were replaced."""
        for block in self.blocks:
            block.__dict__.pop("parts", None)
            for adapt in block.adapts or ():
                adapt.look_up()

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        """[N, V] next-token logits."""
        return with_unused_rows_masked(
            F.linear(hidden_N_D, self.output_weight), self.num_used_rows, self.unused_ids
        )

    @property
    def output_weight(self) -> Tensor:
        """See `rllm.models.directory.CausalModel`."""
        return self.embed.weight if self.head is None else self.head.weight

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    def attention_sizes(self) -> tuple[int, int, int]:
        """(layers, key-value heads, head size)."""
        return self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_dim

    def initialize(self, generator: torch.Generator, scale: float = 0.8) -> None:
        """Normal weights and biases with std = scale / sqrt(hidden size).

        The usual 0.02 is made for wide models: at width 64 it leaves attention uniform, and training stalls.
        """
        std = scale / math.sqrt(self.shape.hidden_size)
        with torch.no_grad():
            for parameter in self.parameters():
                # Norms are vectors, and stay 1.
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, std, generator=generator)
            for module in self.modules():
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.normal_(0.0, std, generator=generator)

    def load_hf(self, weights: dict[str, Tensor]) -> None:
        """Copy Hugging Face weights in.

        Raises ModelDirectoryError on a missing, misshapen or unknown name.
        """
        views = self._views_hf()
        missing = sorted(views.keys() - weights.keys())
        # Files of some models have numbers that follow from the config, or a tied matrix a second time.
        unknown = sorted(
            name
            for name in weights.keys() - views.keys()
            if not (name.endswith("rotary_emb.inv_freq") or (self.shape.tied and name == "lm_head.weight"))
        )
        if missing or unknown:
            raise ModelDirectoryError(
                f"Weights do not fit the config: missing {missing[:3]} ({len(missing)}), unknown "
                f"{unknown[:3]} ({len(unknown)}). The weight files belong to another model than config.json."
            )
        with torch.no_grad():
            for name, target in views.items():
                if target.shape != weights[name].shape:
                    raise ModelDirectoryError(
                        f"`{name}` has shape {list(weights[name].shape)} but config.json means "
                        f"{list(target.shape)}."
                    )
                target.copy_(weights[name])

    def state_dict_hf(self) -> dict[str, Tensor]:
        """Hugging Face name -> a view into these parameters (not a copy), or what an adapter makes of it (a
        copy)."""
        views = self._views_hf()
        return views | {name: apply_change(views[name], change) for name, change in self.changes.items()}

    def _views_hf(self) -> dict[str, Tensor]:
        """Views are detached, not `.data`: then torch counts a write to one as a write to the parameter."""
        shape = self.shape
        q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        views: dict[str, Tensor] = {"model.embed_tokens.weight": self.embed.weight.detach()}
        for index, block in enumerate(self.blocks):
            prefix = f"model.layers.{index}."
            parts = block.qkv.weight.detach().split([q_rows, kv_rows, kv_rows])
            for name, part in zip("qkv", parts, strict=True):
                views[f"{prefix}self_attn.{name}_proj.weight"] = part
            if block.qkv.bias is not None:
                for name, part in zip(
                    "qkv", block.qkv.bias.detach().split([q_rows, kv_rows, kv_rows]), strict=True
                ):
                    views[f"{prefix}self_attn.{name}_proj.bias"] = part
            views[f"{prefix}self_attn.o_proj.weight"] = block.out.weight.detach()
            if block.out.bias is not None:
                views[f"{prefix}self_attn.o_proj.bias"] = block.out.bias.detach()
            if shape.qk_norm:
                views[f"{prefix}self_attn.q_norm.weight"] = block.q_norm.detach()
                views[f"{prefix}self_attn.k_norm.weight"] = block.k_norm.detach()
            gate, up = block.gate_up.weight.detach().chunk(2)
            views[f"{prefix}mlp.gate_proj.weight"] = gate
            views[f"{prefix}mlp.up_proj.weight"] = up
            views[f"{prefix}mlp.down_proj.weight"] = block.down.weight.detach()
            views[f"{prefix}input_layernorm.weight"] = block.input_norm.detach()
            views[f"{prefix}post_attention_layernorm.weight"] = block.post_norm.detach()
        views["model.norm.weight"] = self.norm.detach()
        if self.head is not None:
            views["lm_head.weight"] = self.head.weight.detach()
        return views


@torch.no_grad()
def apply_change(weight: Tensor, change: Change) -> Tensor:
    """The sum, in the type of the weight."""
    delta = change()
    return (weight.to(delta.dtype) + delta).to(weight.dtype)


def take_rows(x: Tensor, distinct: Tensor) -> Tensor:
    """x[distinct] where no row is named twice: then the gradient is copied to its place, which is faster than
    adding."""
    return _TakeRows.apply(x, distinct) if torch.is_grad_enabled() else x.index_select(0, distinct)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, distinct: Tensor) -> Tensor:
        ctx.save_for_backward(distinct)
        ctx.num_rows = len(x)
        return x.index_select(0, distinct)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (distinct,) = grads, ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, distinct, grad), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    torch's own takes nine kernels on a CPU; this takes four and agrees with it to float32 rounding.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return (x * _inverse_rms(x, eps)).mul_(weight)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.dtype), length, length, value=1.0 / x.shape[-1]).rsqrt_()


@cache
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    """A scalar that is made once: making one costs as much as using it."""
    return torch.tensor(value, dtype=dtype)


class _RMSNorm(torch.autograd.Function):
    """With x̂ = x / rms and n the width: dx = (g·w - x̂ · Σ(g·w·x̂) / n) / rms, dw = Σ_rows g·x̂."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,) = grads
        x, weight, inverse = ctx.saved_tensors
        # Made again: kept from the forward pass it would take as much memory as `x`.
        x_norm = x * inverse
        grad_normed = grad * x_norm
        shrink = torch.matmul(grad_normed, weight).mul_(-1.0 / x.shape[-1]).unsqueeze(-1)
        grad_x = torch.addcmul(grad * weight, x_norm, shrink).mul_(inverse)
        grad_weight = grad_normed.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _rotation_table(shape: DecoderShape) -> Tensor:
    """[P, 2d] cosines, then sines with the sign of the half they are multiplied with (Su et al. 2021,
    arXiv:2104.09864)."""
    if torch.get_default_device().type == "meta":  # whose `arange` imports torch's compiler
        return torch.empty(shape.max_positions, 2 * shape.head_dim)
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), shape.rope_theta**-half)
    return torch.cat((angles.cos(), angles.cos(), -angles.sin(), angles.sin()), -1)
