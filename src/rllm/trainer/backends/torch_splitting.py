"""A model whose layers several ranks compute together: tensor parallelism, for the built-in decoder.

    states, on all of them ─► qkv, gate and up: some heads and columns ─► out, down ─► Σ over ranks: states

Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053, section 3): one sum a layer behind attention and one
behind the MLP, forward; the same two backward, where states enter the columns. Norms, embeddings and the
output layer are on all of them, computed alike, and are the sampler's own. What is split is a twin's, and
publishing puts it together in the sampler's model.

The change B·A that an adapter adds to a matrix is split as that is: rows of B, or columns of A. The other
factor is on all ranks, and so are the norms of heads: a backward pass gives each rank the gradient that comes
through its own part, and these are added up once, behind the last micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rllm.distributed import RankGroup
from rllm.models.decoder import Block, Decoder, DecoderShape
from rllm.models.lora import STORED, is_of_adapter, sharing_tensors
from rllm.trainer.backends.torch_optimizer import MasterWeights

SPLIT_BY_COLUMNS = (*STORED[1], *STORED[3])
"""Layers whose outputs are sums over ranks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Part:
    """Which rows or columns of a weight each of several ranks has."""

    dim: int
    places: list[Tensor]
    """By rank, in the order in which it has them."""

    def own(self, whole: Tensor, rank: int) -> Tensor:
        return whole.index_select(self.dim, self.places[rank].to(whole.device))

    def whole(self, own: Tensor, ranks: RankGroup) -> Tensor:
        """The whole tensor of everybody's part; all of `ranks` have to be here."""
        shape = list(own.shape)
        shape[self.dim] *= ranks.size
        whole = own.new_empty(shape)
        parts = ranks.gather_tensors(own.detach().contiguous())
        for places, part in zip(self.places, parts, strict=True):
            whole.index_copy_(self.dim, places.to(whole.device), part)
        return whole


@dataclass(kw_only=True, slots=True, frozen=True)
class SplitModel:
    """A model that computes this rank's part of every layer."""

    twin: Any
    """A `CausalModel`."""
    parts: dict[str, Part]
    """By the name of each trained parameter that is split."""
    partial_gradients: frozenset[str] = frozenset()
    """Trained parameters that all ranks have, of which each gets the gradient that comes through its part."""


def split_model(model: Decoder, ranks: RankGroup) -> SplitModel:
    """A twin of `model`, of whose layers this rank computes its part. Raises ConfigError for one that cannot
    be split among so many."""
    twin, of_layer = sharing_tensors(model), parts_of_layer(model.shape, ranks.size)
    together, parts, partial_gradients = SumOverRanks(ranks), dict[str, Part](), set[str]()
    for name, parameter in list(twin.named_parameters()):
        if is_of_adapter(name):
            part = part_of_adapter(name, parameter, ranks.size)
            is_partial = part is None
        else:
            leaf = name.rpartition(".")[2]
            # Names begin with `blocks.N`, and the parts are the same in each layer. Norms of heads are whole,
            # but each rank applies them to its own heads.
            part, is_partial = of_layer.get(".".join(name.split(".")[2:])), leaf in ("q_norm", "k_norm")
        if part is not None:
            _replace(twin, name, part, ranks.rank)
        if part is not None and parameter.requires_grad:
            parts[name] = part
        elif is_partial and parameter.requires_grad:
            partial_gradients.add(name)
    for layer in twin.blocks:
        block: Block = layer
        block.shape, block.together = model.shape.part(ranks.size), together
        if block.adapts is not None:
            qkv, _, gate_up, _ = block.adapts
            qkv.divide(ranks.size)
            gate_up.divide(ranks.size)
    twin.look_up_parameters()
    twin.is_split = True
    return SplitModel(twin=twin, parts=parts, partial_gradients=frozenset(partial_gradients))


def _replace(model: nn.Module, name: str, part: Part, rank: int) -> None:
    """Give `model` a parameter of its own, which is a part of the one that it had."""
    path, _, leaf = name.rpartition(".")
    whole = model.get_parameter(name)
    own = nn.Parameter(part.own(whole.detach(), rank), requires_grad=whole.requires_grad)
    setattr(model.get_submodule(path), leaf, own)


def part_of_adapter(name: str, factor: Tensor, num_ranks: int) -> Part | None:
    """Rows of B where each rank has some rows of the matrix beside it, columns of A where it has some of its
    columns; None for the other factor, which all ranks have."""
    layer, _, factor_name = name.partition(".lora_")
    dim = 1 if layer.endswith(SPLIT_BY_COLUMNS) else 0
    if not factor_name.startswith("BA"[dim]):
        return None
    return Part(dim=dim, places=list(torch.arange(factor.shape[dim]).chunk(num_ranks)))


def parts_of_layer(shape: DecoderShape, num_ranks: int) -> dict[str, Part]:
    """Queries with the keys and values that they look at, and both factors of a gate, stay together."""
    part, head = shape.part(num_ranks), shape.head_dim
    queries, keys, inner = part.num_heads * head, part.num_kv_heads * head, part.intermediate_size
    qkv, out, gate_up, down = (list[Tensor]() for _ in range(4))
    for rank in range(num_ranks):
        out.append(torch.arange(queries) + rank * queries)
        own_keys = torch.arange(keys) + rank * keys
        first_key, first_value = shape.num_heads * head, (shape.num_heads + shape.num_kv_heads) * head
        qkv.append(torch.cat((out[-1], first_key + own_keys, first_value + own_keys)))
        down.append(torch.arange(inner) + rank * inner)
        gate_up.append(torch.cat((down[-1], shape.intermediate_size + down[-1])))
    return {
        "qkv.weight": Part(dim=0, places=qkv),
        "qkv.bias": Part(dim=0, places=qkv),
        "out.weight": Part(dim=1, places=out),
        "gate_up.weight": Part(dim=0, places=gate_up),
        "down.weight": Part(dim=1, places=down),
    }


class SplitWeights(MasterWeights):
    """`MasterWeights` of which some are parts."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], split: SplitModel, ranks: RankGroup) -> None:
        super().__init__(parameters)
        self._parts, self._partial_gradients = split.parts, split.partial_gradients
        self._in_layer, self._with_same_part = ranks.in_layer(), ranks.with_same_part()
        self.spread = _SpreadParts(
            {self.by_name[name]: part for name, part in self._parts.items()}, self._in_layer
        )

    def join_gradients(self, ranks: RankGroup) -> None:
        """Ranks of one layer have the same rows, so that what all of them have is a sum already, where it is
        not the gradient of a part alone."""
        super().join_gradients(self._with_same_part)
        # Ranks of a layer have the same rows, so they come to the same names without asking each other.
        partial = {name for name in self._partial_gradients if self.by_name[name].grad is not None}
        self._in_layer.sum_in_place(self.gradients(partial))

    def clip(self, max_norm: float) -> float:
        with_gradient = self.with_gradient()
        of_parts = sum(_square(each) for name, each in self.by_name.items() if name in self._parts)
        of_whole = sum(_square(each) for name, each in self.by_name.items() if name not in self._parts)
        # What is whole has the same gradient on all ranks of a layer, so it is added once.
        norm = (sum(self._in_layer.gather(of_parts)) + of_whole) ** 0.5
        # By this norm: torch would take that of the parts that are here.
        nn.utils.clip_grads_with_norm_(with_gradient, max_norm, torch.tensor(norm, dtype=torch.float64))
        return norm

    def whole_shapes(self) -> dict[str, torch.Size]:
        shapes = super().whole_shapes()
        for name, part in self._parts.items():
            shape = list(shapes[name])
            shape[part.dim] *= self._in_layer.size
            shapes[name] = torch.Size(shape)
        return shapes

    def checkpoint_form(self, name: str, tensor: Tensor) -> Tensor:
        """Whole; all ranks of a layer have to be here."""
        # Also a step count is saved under the name of a weight, and it has no parts.
        if name not in self._parts or tensor.shape != self.by_name[name].shape:
            return super().checkpoint_form(name, tensor)
        return self._parts[name].whole(tensor, self._in_layer)

    def own(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._parts or tensor.dim() != self.by_name[name].dim():
            return tensor
        return self._parts[name].own(tensor, self._in_layer.rank)

    def take(self, name: str, whole: Tensor) -> None:
        super().take(name, self.own(name, whole))

    @torch.no_grad()
    def gather_into(self, whole: nn.Module, split: nn.Module) -> None:
        """Give `whole` the parts that the ranks have of its twin, a matrix at a time; what is not split they
        share."""
        targets, parameters = dict(whole.named_parameters()), dict(split.named_parameters())
        for name, part in self._parts.items():
            targets[name].copy_(part.whole(parameters[name], self._in_layer))


class _SpreadParts:
    """Matrices of which each rank has a part, or all; see `torch_muon.Spread`."""

    def __init__(self, parts: Mapping[Tensor, Part], ranks: RankGroup) -> None:
        """By what this rank has of them."""
        self._parts, self._ranks = parts, ranks

    def whole(self, weight: Tensor, rows: Tensor) -> Tensor:
        return self._parts[weight].whole(rows, self._ranks) if weight in self._parts else rows

    def rows(self, weight: Tensor, whole: Tensor) -> Tensor:
        return self._parts[weight].own(whole, self._ranks.rank) if weight in self._parts else whole


class SumOverRanks:
    """See `Together`."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def enter(self, x: Tensor, /) -> Tensor:
        return _Enter.apply(x, self._ranks)

    def leave(self, x: Tensor, /) -> Tensor:
        return _Leave.apply(x, self._ranks)

    def total(self, x: Tensor, /) -> Tensor:
        """The sum of what all of them have, outside of any graph."""
        total = x.clone()
        self._ranks.sum_in_place([total])
        return total


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may give the same tensor to other functions, so nobody may write into it.
        total = grads[0].clone()
        ctx.ranks.sum_in_place([total])
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: RankGroup) -> Tensor:
        total = x.clone()
        ranks.sum_in_place([total])
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Behind the sum all ranks compute the same, so each has the whole gradient already.
        return grads[0], None


def _square(weight: Tensor) -> float:
    """Σ g²; 0 of a weight without a gradient."""
    return 0.0 if weight.grad is None else float(weight.grad.double().square().sum())
