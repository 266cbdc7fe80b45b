"""A model of which every rank holds a part: FSDP2, layer by layer.

    model, whole, which the sampler of this rank reads ──shard_model──► its twin, which learns
        ▲                                               ┌─► gather a layer ─► compute it ─► drop it ─┐
        └──────── gather_into, a layer at a time ◄──── shards ◄── optimizer ◄── Σ of gradients ◄─────┘

With `distributed.offload` shards, gradients and optimizer are on the CPU, and a layer goes to the device of
the model where it is computed.

What is frozen, as the weights beside an adapter are, stays whole and is the sampler's own. Layers are
gathered by all ranks at the same time, so ranks go through their micro-batches in step: one that has no more
repeats a row whose terms weigh nothing.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from rllm.distributed import RankGroup
from rllm.errors import ConfigError
from rllm.models.batching import PackedBatch
from rllm.models.lora import sharing_tensors
from rllm.trainer.backends.sharded_weights import is_shard
from rllm.trainer.backends.torch_optimizer import HALF

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shard_model(model: Any, ranks: RankGroup) -> Any:
    """A twin of `model`, a `CausalModel`, whose trained parameters are shards of this rank; all ranks have to
    be here.

    Shards of weights in 16 bits are their float32 masters; layers are computed in 16 bits all the same.
    Raises ConfigError for a model that computes row by row: ranks gather a layer together, and have other
    rows.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    if model.by_row:
        raise ConfigError(
            f"`distributed.strategy` is 'shard', but rows are computed one by one ({model.by_row}); set it "
            "to replicate."
        )
    twin = sharing_tensors(model)
    trainable_parameters = [each for each in twin.parameters() if each.requires_grad]
    frozen = {each for each in twin.parameters() if not each.requires_grad}
    dtype = trainable_parameters[0].dtype
    masters = dict[nn.Parameter, nn.Parameter]()
    options: dict[str, Any] = {
        "mesh": ranks.mesh(trainable_parameters[0].device.type),
        "ignored_params": frozen,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if dtype in HALF else None,
            reduce_dtype=torch.float32 if dtype in HALF else None,
            cast_forward_inputs=False,
        ),
    }
    if ranks.offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=trainable_parameters[0].device.type != "cpu")
    for layer in twin.layers():
        # What is trained of others is small, as adapters are: one part, gathered with the model itself.
        if frozen.isdisjoint(layer.parameters()):
            # Before sharding: a shard has the precision of the parameter that it is made of.
            _take_masters(layer, masters)
            fully_shard(layer, **options)
    _take_masters(twin, masters)
    fully_shard(twin, **options)
    # FSDP gathers parameters around `forward` alone, and callers call `hidden`.
    register_fsdp_forward_method(twin, "hidden")
    for part in _parts(twin):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)  # token weights are those of the whole update: gradients add up
    twin.unshard()  # an adapter's layers are looked up now, all others when they are gathered first
    twin.look_up_parameters()
    twin.reshard()
    return twin


@torch.no_grad()
def gather_into(whole: Any, twin: Any) -> None:
    """Give `whole` the weights of its sharded `twin`, a layer at a time; all ranks have to be here."""
    targets = dict(whole.named_parameters())
    for part in _parts(twin):
        part.unshard()
        for name, parameter in twin.named_parameters():
            # What is gathered at the moment is plain tensors; the parameters of all other parts are shards.
            if parameter.requires_grad and not is_shard(parameter):
                targets[name].copy_(parameter)
        part.reshard()


def in_step(
    batches: Iterable[PackedBatch], spare: Callable[[], Iterator[PackedBatch]], ranks: RankGroup
) -> Iterator[tuple[PackedBatch, bool]]:
    """(micro-batch, whether it counts): those of this rank, then spare ones, until each rank has had as
    many."""
    # All of them now, because every rank has to know the number before anybody begins the first.
    mine = list(batches)
    most = max(ranks.gather(len(mine)))
    yield from ((batch, True) for batch in mine)
    for _ in range(most - len(mine)):
        yield next(spare()), False


def computing_device(model: Any) -> torch.device:
    """The device that a model computes on, wherever its shards are kept."""
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if is_shard(parameter) else parameter.device


def is_sharded(model: Any) -> "TypeGuard[FSDPModule]":
    """Whoever sharded one has imported `torch.distributed.fsdp`; all others are spared that second."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(model, module.FSDPModule)


def _parts(model: nn.Module) -> "list[FSDPModule]":
    """The modules that are gathered in one go: each layer, and the rest."""
    return [each for each in model.modules() if is_sharded(each)]


def _take_masters(module: nn.Module, masters: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replace trained parameters in 16 bits by float32 ones; those that are tied stay so."""
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            if parameter.dtype in HALF and parameter.requires_grad and not is_shard(parameter):
                if parameter not in masters:
                    masters[parameter] = nn.Parameter(parameter.detach().float())
                setattr(each, name, masters[parameter])
