"""Numbers in 8 bits, by the kernels of bitsandbytes (extra `bitsandbytes`), on CPU and CUDA.

moments of AdamW ──► 8 bits, a scale for every 256 of them     (Dettmers et al. 2021, arXiv:2110.02861)
"""

import importlib.util
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rllm.errors import MissingExtraError

MOMENTS_BLOCK = 256
"""The number of moments that share a scale; bitsandbytes' kernels know no other."""


def require_bitsandbytes() -> None:
    """Raises MissingExtraError where it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError("bitsandbytes", "bitsandbytes")


@cache
def _functional() -> Any:
    require_bitsandbytes()
    # It warns of a package with faster kernels for inference, which are not used here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
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
