"""The weights that an optimizer moves on a rank that holds parts of them: its rows of each.

    shard.grad, a DTensor, is the sum over ranks ──► rows of this rank ──► optimizer ──► rows of the shard

AdamW moves every number by itself, so rows alone are enough for it. The norm is that of all rows of all
ranks. Weights beside the sharded model, such as a value head's, are whole on every rank and their gradients
added up.
"""

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from rllm.distributed import RankGroup
from rllm.trainer.backends.torch_optimizer import MasterWeights

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shard(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is this rank's part of a larger one.

    Whoever made one has imported `torch.distributed.tensor`; all others are spared that second.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class ShardedWeights(MasterWeights):
    """`MasterWeights` of which some are shards."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: RankGroup) -> None:
        super().__init__({name: each for name, each in parameters.items() if not is_shard(each)})
        self._ranks = ranks
        whole = self.by_name
        self._shards = {name: each for name, each in parameters.items() if is_shard(each)}
        # These share their memory with the shards, so a step of the optimizer moves the model itself.
        rows = {name: _rows(each).requires_grad_() for name, each in self._shards.items()}
        self.by_name = {name: rows.get(name, whole.get(name, each)) for name, each in parameters.items()}
        self.spread = SpreadRows({rows[name]: shard for name, shard in self._shards.items()})

    def zero_grad(self) -> None:
        super().zero_grad()
        for shard in self._shards.values():
            shard.grad = None

    def join_gradients(self, ranks: RankGroup) -> None:
        """Those of shards are sums already."""
        for name, shard in self._shards.items():
            if shard.grad is not None:
                self.by_name[name].grad = _rows(shard.grad)
        ranks.sum_in_place(self.gradients(self._whole_names()))

    def clip(self, max_norm: float) -> float:
        with_gradient, whole_names = self.with_gradient(), self._whole_names()
        whole = [each for name, each in self.by_name.items() if name in whole_names]
        of_whole = sum(_square(each) for each in whole)
        of_rows = sum(_square(each) for each in self.by_name.values()) - of_whole
        # All ranks are asked, and with several copies of the model each row is on one rank of each copy.
        num_copies = self._ranks.size // self._ranks.shard_size
        norm = math.sqrt(sum(self._ranks.gather(of_rows)) / num_copies + of_whole)
        nn.utils.clip_grads_with_norm_(with_gradient, max_norm, torch.tensor(norm, dtype=torch.float64))
        return norm

    def checkpoint_form(self, name: str, tensor: Tensor) -> Tensor:
        shard = self._shards.get(name)
        # Also a step count is saved under the name of a weight, and each rank has the whole of it.
        if shard is None or tensor.shape != self.by_name[name].shape:
            return tensor.detach()
        return _beside(shard, tensor)

    def whole_shapes(self) -> dict[str, torch.Size]:
        return super().whole_shapes() | {name: each.shape for name, each in self._shards.items()}

    def own(self, name: str, tensor: Tensor) -> Tensor:
        return local_rows(tensor)

    def empty(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        shard = self._shards.get(name)
        if shard is None or shape != shard.shape:
            return super().empty(name, shape, dtype)
        return self.checkpoint_form(
            name, torch.empty_like(self.by_name[name], dtype=dtype, requires_grad=False)
        )

    def take(self, name: str, whole: Tensor) -> None:
        shard = self._shards.get(name)
        super().take(name, whole if shard is None else rows_of(shard, whole))

    def _whole_names(self) -> set[str]:
        return self.by_name.keys() - self._shards.keys()


class SpreadRows:
    """Matrices of which each rank has some rows; see `torch_muon.Spread`."""

    def __init__(self, shards: "Mapping[Tensor, DTensor]") -> None:
        """By this rank's rows of them."""
        self._shards = shards

    def whole(self, weight: Tensor, rows: Tensor) -> Tensor:
        return _beside(self._shards[weight], rows).full_tensor()

    def rows(self, weight: Tensor, whole: Tensor) -> Tensor:
        return rows_of(self._shards[weight], whole)


def _beside(shard: "DTensor", rows: Tensor) -> "DTensor":
    """A tensor of the shape of `shard`, of which this rank has `rows`."""
    if shard.device.type != shard.device_mesh.device_type:  # it is offloaded, and rows would go to the card
        beside: Any = torch.empty_like(shard.detach(), dtype=rows.dtype)
        beside.to_local().copy_(rows)
        return beside
    from torch.distributed.tensor import DTensor

    # Shape and stride are given because torch would otherwise take all ranks to have as many rows.
    return DTensor.from_local(
        rows.detach(), shard.device_mesh, shard.placements, shape=shard.shape, stride=shard.stride()
    )


def rows_of(shard: "DTensor", whole: Tensor) -> Tensor:
    """The rows of `whole` that `shard` holds."""
    mesh = shard.device_mesh
    # As FSDP2 divides rows: the last ranks may have fewer than the others, or none. The last dimension of the
    # mesh is that of shards; where there are several copies of the model, one of copies stands before it.
    num_rows = -(-len(whole) // mesh.size(mesh.ndim - 1))
    first = num_rows * mesh.get_local_rank(mesh.ndim - 1)
    return whole[first : first + num_rows]


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; another one as it is."""
    return tensor.to_local() if is_shard(tensor) else tensor


def _rows(shard: Tensor) -> Tensor:
    return local_rows(shard.detach())


def _square(weight: Tensor) -> float:
    """Σ g²; 0 of a weight without a gradient."""
    return 0.0 if weight.grad is None else float(weight.grad.double().square().sum())
