"""Numbers in 8 and in 4 bits, by the kernels of bitsandbytes (extra `bitsandbytes`), on CPU and CUDA.

    moments of AdamW ──► 8 bits, a scale for every 256 of them     (Dettmers et al. 2021, arXiv:2110.02861)
    frozen weights   ──► 4 bits, "NormalFloat", a scale for every 64, the scales themselves in 8 bits
                         (QLoRA: Dettmers et al. 2023, arXiv:2305.14314)

A weight in 4 bits is a tensor that says it has the type that it is computed with: whoever multiplies with it,
in either direction, gets the matrix that it stands for, made for that multiplication and dropped after it.
Sampler and trainer so compute with the same numbers, and a backward pass keeps the 4 bits alone.
"""

import importlib.util
import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rllm.errors import MissingExtraError

MOMENTS_BLOCK = 256
"""The number of moments that share a scale; bitsandbytes' kernels know no other."""
WEIGHTS_BLOCK = 64
"""The number of weights that share a scale, as in the paper."""
SCALES_BLOCK = 256
"""The number of scales of weights that share a scale themselves; bitsandbytes' own."""


def require_bitsandbytes() -> None:
    """Raises MissingExtraError where it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError("bitsandbytes", "bitsandbytes")


def quiet_bitsandbytes() -> None:
    """It warns, when it is imported, of a package with faster kernels for inference, which are not used
    here."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@cache
def _functional() -> Any:
    require_bitsandbytes()
    quiet_bitsandbytes()
    import bitsandbytes.functional

    return bitsandbytes.functional


@cache
def _codes(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values that 8 bits stand for: of moments with a sign, and of those without."""
    create = _functional().create_dynamic_map
    return create(signed=True).to(device), create(signed=False).to(device)


def moments_in_8_bits(weight: Tensor) -> dict[str, Tensor]:
    """The moments that AdamW begins with."""
    num_blocks = -(-weight.numel() // MOMENTS_BLOCK)
    state = {"step": torch.zeros((), dtype=torch.float32)}
    for name, code in zip(("exp_avg", "exp_avg_sq"), _codes(weight.device), strict=True):
        # A byte of 0 is the lowest value of the code, which is not always the number 0.
        zero = int((code == 0.0).nonzero()[0])
        state[name] = torch.full_like(weight, zero, dtype=torch.uint8)
        state[f"{name}_scale"] = torch.zeros(num_blocks, dtype=torch.float32, device=weight.device)
    return state


def adamw_step(
    weight: Tensor,
    state: dict[str, Tensor],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Move `weight` by its gradient, and its moments, which `moments_in_8_bits` gave, with it."""
    assert weight.grad is not None, "a weight without a gradient does not move"
    state["step"] += 1
    first_code, second_code = _codes(weight.device)
    _functional().optimizer_update_8bit_blockwise(
        "adam",
        weight.grad.contiguous(),
        weight,
        state["exp_avg"],
        state["exp_avg_sq"],
        beta1=betas[0],
        beta2=betas[1],
        # These two are of another optimizer, AdEMAMix, which the same call serves.
        beta3=0.0,
        alpha=0.0,
        eps=eps,
        step=int(state["step"]),
        lr=learning_rate,
        qmap1=first_code,
        qmap2=second_code,
        absmax1=state["exp_avg_scale"],
        absmax2=state["exp_avg_sq_scale"],
        weight_decay=weight_decay,
    )


class NF4Weight(Tensor):
    """A frozen matrix in 4 bits that computes as one of `dtype`; nothing can be written to it.

    Every operation gets the matrix that it stands for, but those that compute nothing: its transpose, and
    itself without a gradient.
    """

    codes: Tensor
    """[size / 2] of the weights, two a byte, row by row."""
    state: Any
    """Scales and codes, as bitsandbytes has them."""
    is_transposed: bool

    @staticmethod
    def __new__(cls, codes: Tensor, state: Any, is_transposed: bool = False) -> "NF4Weight":
        shape = torch.Size(state.shape)
        stride = (shape[1], 1)
        # A tensor without storage: torch sees its shape and type, and the numbers are in `codes`.
        weight = Tensor._make_wrapper_subclass(
            cls,
            torch.Size(reversed(shape)) if is_transposed else shape,
            strides=tuple(reversed(stride)) if is_transposed else stride,
            dtype=state.dtype,
            device=codes.device,
        )
        weight.codes, weight.state, weight.is_transposed = codes, state, is_transposed
        return weight

    @classmethod
    def of(cls, weight: Tensor) -> "NF4Weight":
        """The nearest to `weight`, a matrix in float32 or a type of 16 bits."""
        codes, state = _functional().quantize_4bit(
            weight.detach().contiguous(),
            blocksize=WEIGHTS_BLOCK,
            quant_type="nf4",
            compress_statistics=True,
        )
        return cls(codes, state)

    def dense(self) -> Tensor:
        """The matrix that it stands for, as a tensor of its own."""
        matrix = _functional().dequantize_4bit(self.codes, self.state)
        return matrix.t() if self.is_transposed else matrix

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        state = self.state
        scales = (state.absmax, state.state2.absmax)
        return self.codes.numel() + sum(each.numel() * each.element_size() for each in scales)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"NF4Weight({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = torch.ops.aten
        if func in (operation.detach.default, operation.alias.default, operation.t.default):
            weight = args[0]
            # A view shares the count of writes of what it is of, which a tensor of inference mode has not.
            with torch.inference_mode(mode=False):
                return cls(weight.codes, weight.state, weight.is_transposed ^ (func is operation.t.default))
        targets = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(isinstance(each, cls) for each in targets):
            raise RuntimeError(f"{func} writes to a weight in 4 bits, which is frozen.")

        def dense(value: Any) -> Any:
            return value.dense() if isinstance(value, cls) else value

        return func(*tree_map(dense, args), **tree_map(dense, kwargs))


@torch.no_grad()
def freeze_in_4_bits(layers: Iterable[nn.Linear]) -> None:
    """Give each layer the weight in 4 bits that is nearest to its own, one after the other."""
    for layer in layers:
        layer.weight = nn.Parameter(NF4Weight.of(layer.weight), requires_grad=False)


def nf4_bytes(num_weights: int) -> int:
    """The memory that a matrix of so many weights takes in 4 bits: two a byte, a byte for the scale of each
    block, and four for the scale of each block of scales."""
    num_scales = -(-num_weights // WEIGHTS_BLOCK)
    return -(-num_weights // 2) + num_scales + 4 * -(-num_scales // SCALES_BLOCK)
