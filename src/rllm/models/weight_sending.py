"""The weights of a model as a stream of bytes for model servers, in the form of vLLM's packed broadcasts.

    named tensors ──in order──► chunks of bytes ──broadcast──► a server, which cuts them by dtypes and shapes

Both sides cut the stream at the same places: behind the tensor with which a chunk becomes larger than
`CHUNK_BYTES`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from rllm.models.directory import LoadedModel, weights_with_output_layer
from rllm.models.nccl import NcclGroup, unique_id

CHUNK_BYTES = 1 << 28


class ByteGroup(Protocol):
    """The processes of which this one sends."""

    def broadcast(self, chunk: Tensor) -> None: ...

    def wait(self) -> None: ...

    def abort(self) -> None: ...


class WeightSender:
    """Sends the weights of `model`, as they are then; see `rllm.inference.weight_link`."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._device = next(model.model.parameters()).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def unique_id(self) -> bytes:
        return unique_id()

    def join(self, name: bytes, num_ranks: int) -> ByteGroup:
        return NcclGroup(name, num_ranks, self._device)

    def describe(self) -> dict[str, Any]:
        """Names, dtypes and shapes of what `send` sends, in its order."""
        weights = weights_with_output_layer(self._model)
        return {
            "names": list(weights),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
            "shapes": [list(each.shape) for each in weights.values()],
        }

    @torch.no_grad()
    def send(self, group: ByteGroup) -> None:
        """Return when all of it has been sent. The weights must not change meanwhile."""
        with self._beside_the_learner():
            for chunk in chunks_of(weights_with_output_layer(self._model), self.chunk_bytes):
                group.broadcast(chunk)
            group.wait()

    def _beside_the_learner(self) -> Any:
        """A stream of its own, which waits for what is computed of the weights: else the learner's next
        kernels would wait for a server."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        return torch.cuda.stream(self._stream)


def chunks_of(weights: Mapping[str, Tensor], limit: int) -> Iterator[Tensor]:
    """Bytes of the tensors, one behind the other; a chunk ends with the tensor by which it has more than
    `limit`."""
    parts, num_bytes = list[Tensor](), 0
    for part in _as_bytes(weights.values()):
        parts.append(part)
        num_bytes += part.numel()
        if num_bytes > limit:
            yield torch.cat(parts)
            parts, num_bytes = [], 0
    if parts:
        yield torch.cat(parts)


def _as_bytes(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for each in tensors:
        yield each.detach().contiguous().view(-1).view(torch.uint8)
