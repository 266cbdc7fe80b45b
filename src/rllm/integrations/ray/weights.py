"""The trained parameters as one block of bytes, which Ray shares with every process of a node without a copy.

parameters ──packed──► [B] uint8 ──ray.put, once──► object store of each node ──unpack──► parameters
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rllm.errors import ClusterError

Bytes = NDArray[np.uint8]


def trained(model: Any) -> dict[str, torch.Tensor]:
    """What a trainer changes; of a model with an adapter, the adapter."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def num_bytes(model: Any) -> int:
    return sum(each.numel() * each.element_size() for each in trained(model).values())


def packed(model: Any) -> Bytes:
    """[B] the trained parameters one after the other, in the order of their names in the model."""
    parts = [each.detach().contiguous().view(-1).view(torch.uint8) for each in trained(model).values()]
    return torch.cat(parts).cpu().numpy()


def unpack(block_B: Bytes, model: Any) -> None:
    """Write what `packed` made into the parameters of a model of the same kind."""
    expected = num_bytes(model)
    if len(block_B) != expected:
        raise ClusterError(
            f"A worker got {len(block_B):,} bytes of weights, and its model has {expected:,}: it was not "
            "made from the same model directory."
        )
    start = 0
    with torch.no_grad():
        for parameter in trained(model).values():
            end = start + parameter.numel() * parameter.element_size()
            # The object store's memory is read-only, and torch has no such tensors.
            part = torch.from_numpy(block_B[start:end].copy()).view(parameter.dtype)
            parameter.copy_(part.view_as(parameter))
            start = end


def weight_state(model: Any) -> int:
    """Changes whenever a parameter does."""
    return sum(each._version for each in trained(model).values())
