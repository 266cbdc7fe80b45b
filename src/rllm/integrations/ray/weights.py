"""The trained parameters of all policies as one block of bytes, which Ray shares with every process of a node
without a copy.

parameters ──pack──► [B] uint8 ──ray.put, once──► object store of each node ──split, unpack──► parameters
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rllm.errors import ClusterError

Bytes = NDArray[np.uint8]


def trainable_parameters(models: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters that a trainer changes in the models of policies that learn; of one with an adapter, the
    adapter."""
    return [each for model in models.values() for each in model.parameters() if each.requires_grad]


def num_bytes(models: Mapping[str, Any]) -> int:
    return sum(each.numel() * each.element_size() for each in trainable_parameters(models))


def pack(models: Mapping[str, Any]) -> Bytes:
    """[B] the trained parameters one after the other, in the order of policies and of their models."""
    parts = [each.detach().contiguous().view(-1).view(torch.uint8) for each in trainable_parameters(models)]
    return torch.cat(parts).cpu().numpy()


def split(block_B: Bytes, models: Mapping[str, Any]) -> dict[str, Bytes]:
    """policy -> its part of what `pack` made of models of the same kind."""
    expected = num_bytes(models)
    if len(block_B) != expected:
        raise ClusterError(
            f"A worker got {len(block_B):,} bytes of weights, and its models have {expected:,}: they were "
            "not made from the same model directories."
        )
    parts, start = dict[str, Bytes](), 0
    for name, model in models.items():
        end = start + num_bytes({name: model})
        parts[name], start = block_B[start:end], end
    return parts


def unpack(part_B: Bytes, model: Any) -> None:
    """Write a model's part into its parameters."""
    start = 0
    with torch.no_grad():
        for parameter in trainable_parameters({"": model}):
            end = start + parameter.numel() * parameter.element_size()
            # The object store's memory is read-only, and torch has no such tensors.
            values = torch.from_numpy(part_B[start:end].copy()).view(parameter.dtype)
            parameter.copy_(values.view_as(parameter))
            start = end


def weight_state(models: Mapping[str, Any]) -> int:
    """Changes whenever a parameter does."""
    # torch counts each write to a tensor, so the sum grows with any of them and no bytes are compared.
    return sum(each._version for each in trainable_parameters(models))
