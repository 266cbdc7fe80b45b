"""The memory of a forward and a backward pass: the code of the pass, run on tensors without contents.

    sizes of a model ──► the decoder, its adapter ─┐ no numbers: nothing is computed, nothing is allocated
    rows of an update ──► the fullest micro-batch ─┴─► forward ─► loss ─► backward ──► the most bytes alive

Every tensor counts from its creation to its end, so all that the code keeps is counted, and no formula has to
follow the code. Only the scratch memory inside of kernels is not seen. It holds for the built-in decoder.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rllm.algorithms.losses import PolicyLoss
from rllm.config.lora import LoraConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.models.batching import PackedBatch, micro_batches
from rllm.models.decoder import Decoder, DecoderShape, rms_norm
from rllm.models.devices import dtype_named
from rllm.models.lora import adapt_blocks
from rllm.models.packing import ALL, PrefixTree, WeightedRow, packed_trees
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.sample import TrainingSample

CPU = torch.device("cpu")


@dataclass(kw_only=True, slots=True, frozen=True)
class PassModel:
    """A model that is trained, and how."""

    shape: DecoderShape
    optimizer: OptimizerConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    number_type: str = "float32"
    is_critic: bool = False
    """Whether it has values in place of logits."""
    with_entropy: bool = False
    keeps_gradients: bool = False
    """Whether gradients of other passes are there also where one pass holds all rows."""
    whole_groups: bool = False
    """Whether rows of a group stay in one micro-batch, as both answers of a pair."""
    activations: float = 1.0
    """The multiple of the built-in decoder's activations that the model keeps."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PassMemory:
    """The fullest pass of an update."""

    most: int
    """Bytes at one time beyond the weights, gradients included."""
    gradients: int
    """Bytes of all gradients."""
    num_kept: int
    """Number of bytes that the forward pass keeps for the backward pass."""
    tokens: int
    """Tokens of the pass, shared beginnings once."""
    trained_tokens: int
    is_only: bool
    """Whether one pass holds all rows: then gradients come while activations go."""

    @property
    def beyond_gradients(self) -> int:
        """Bytes beyond weights and gradients; below 0 where the pass ends before all gradients are there."""
        return self.most - self.gradients


def pass_memory(model: PassModel, rows: Sequence[TrainingSample]) -> PassMemory:
    """The pass of an update on `rows` that needs most: the first one, which makes the gradients, or the
    fullest of those behind it, which meet them."""
    weighted_rows = [
        WeightedRow(index=index, sample=row, weights_T=row.trainable_T.astype(np.float64))
        for index, row in enumerate(rows)
    ]
    passes = packed_trees(weighted_rows, model.optimizer.micro_batch_tokens, whole_groups=model.whole_groups)
    # It keeps a constant for all later calls, which needs its contents.
    rms_norm(torch.ones(1, 1), torch.ones(1), model.shape.norm_eps)
    first, later = passes[0], max(passes[1:], key=_num_tokens, default=[])
    if model.keeps_gradients:
        first, later = [], max(passes, key=_num_tokens)
    memories: list[PassMemory] = []
    if _num_tokens(first) > _num_tokens(later):
        memories.append(_measured_pass(model, first, meets_gradients=False, is_only=len(passes) == 1))
    if later:
        memories.append(_measured_pass(model, later, meets_gradients=True, is_only=len(passes) == 1))
    return max(memories, key=lambda memory: memory.most)


def _measured_pass(
    model: PassModel, trees: Sequence[PrefixTree], *, meets_gradients: bool, is_only: bool
) -> PassMemory:
    without_contents = FakeTensorMode(allow_non_fake_inputs=True)
    with without_contents:
        backend = _backend(model)
    there = [*backend.model.parameters(), *backend.model.buffers(), *backend._weights.by_name.values()]
    with without_contents, LiveBytes(there) as live:
        if meets_gradients:
            for weight in backend._weights.by_name.values():
                weight.grad = torch.empty_like(weight)
        rows_of_pass = [row for tree in trees for row in tree.rows]
        # All of them in one batch: how rows are divided was decided above.
        (batch,) = micro_batches(rows_of_pass, ALL, CPU, whole_groups=model.whole_groups)
        terms_M = _values(backend, batch) if model.is_critic else _losses(backend, batch, model.with_entropy)
        total = (terms_M * batch.weights_M).sum()
        num_kept = live.now - meets_gradients * _gradient_bytes(backend)
        total.backward()
        more = round((model.activations - 1.0) * num_kept)
        return PassMemory(
            most=live.most + more,
            gradients=_gradient_bytes(backend),
            num_kept=num_kept + more,
            tokens=len(batch.tokens_N),
            trained_tokens=len(batch.weights_M),
            is_only=is_only,
        )


def _gradient_bytes(backend: Any) -> int:
    return sum(4 * weight.numel() for weight in backend._weights.by_name.values())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is on and still there; `others` count nothing."""

    def __init__(self, others: Sequence[Tensor]) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in others:
            self._add(tensor.untyped_storage())
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._storages:  # a view, or a change in place
            return
        num_bytes = storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._remove(key)), num_bytes
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def _remove(self, key: int) -> None:
        self.now -= self._storages.pop(key)[1]


def _backend(model: PassModel) -> Any:
    """A learner on a model without contents."""
    decoder = Decoder(model.shape)
    _convert(decoder, dtype_named(model.number_type))
    if model.lora.rank:
        adapt_blocks(decoder, model.lora)
    # The optimizer does no step, so the plainest one will do.
    optimizer = replace(model.optimizer, name="adamw", muon_dtype="auto")
    return TorchBackend(decoder, publish=_publish, config=optimizer)


def _convert(decoder: Decoder, dtype: torch.dtype) -> None:
    """Give it numbers of another type; `Module.to` does not take tensors without contents."""
    for module in decoder.modules():
        for name, each in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(each.detach().to(dtype)))
        for name, each in module.named_buffers(recurse=False):
            setattr(module, name, each.to(dtype))


def _publish(*_: object) -> None:
    pass


def _losses(backend: Any, batch: PackedBatch, with_entropy: bool) -> Tensor:
    """[M] of a policy."""
    loss = PolicyLoss(entropy_coef=float(with_entropy))
    return loss.terms(backend._inputs(batch, loss))


def _values(backend: Any, batch: PackedBatch) -> Tensor:
    """[M] of a critic."""
    states_U_D = batch.states(backend.model).float()
    return batch.of_tokens(states_U_D @ states_U_D.new_empty(states_U_D.shape[1]))


def _num_tokens(trees: Sequence[PrefixTree]) -> int:
    return sum(tree.num_tokens for tree in trees)
