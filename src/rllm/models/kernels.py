"""The kernels that torch takes for a model on this machine, by name, for the record of a run."""

import platform
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from rllm.models.directory import LoadedModel

BY_HAND = "products and softmax"
"""Attention as three kernels of torch, where none does it in one."""
_NUM_TOKENS = 8


def torch_version() -> str:
    return torch.__version__


def is_here(of: LoadedModel) -> bool:
    """Whether this process has the model's weights; else a service computes it."""
    return isinstance(of.model, nn.Module)


def processor_name(device: str) -> str:
    """The name of the GPU, or of the processor as Linux tells it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def attention_kernel(of: LoadedModel) -> str:
    """The kernel of attention over the rows of an update, and over prompts."""
    model = of.model
    if model.by_row:
        return "transformers' own, row by row"
    if not model.has_plain_attention:
        return BY_HAND
    causal, with_mask = (_sdpa_kernel(of, is_masked=is_masked) for is_masked in (False, True))
    return causal if causal == with_mask else f"{causal}, {with_mask} with a mask"


def decoding_kernel(of: LoadedModel) -> str:
    """The kernel of attention where every row reads one token."""
    return attention_kernel(of) if of.model.by_row else BY_HAND


def _sdpa_kernel(of: LoadedModel, *, is_masked: bool) -> str:
    """The choice of `scaled_dot_product_attention`, such as `flash` or `math`."""
    parameter: Tensor = next(of.model.parameters())
    shape = (1, of.num_kv_heads, _NUM_TOKENS, of.head_dim)
    rows = torch.zeros(shape, device=parameter.device, dtype=parameter.dtype, requires_grad=True)
    mask = rows.new_zeros(1, 1, _NUM_TOKENS, _NUM_TOKENS) if is_masked else None
    choice = torch._fused_sdp_choice(rows, rows, rows, mask, 0.0, not is_masked)  # pyright: ignore[reportPrivateImportUsage]
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
