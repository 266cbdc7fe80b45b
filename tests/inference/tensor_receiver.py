"""A GPU worker of vLLM that takes weights over NCCL, without a GPU, and its NCCL: a queue in memory.

    MemorySender(model, nccl) ──► fleet …                 the trainer's side, with the group alone replaced
    TensorReceiver(nccl, load) ──► /init_weight_transfer_engine, /start_weight_update, …   the server's side

As vLLM does, it cuts the stream of bytes by the names, dtypes and shapes that it was told, and loads what has
come before it waits for more: an update that breaks off leaves the weights half new.
"""

import base64
import itertools
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rllm.errors import InferenceError
from rllm.models.directory import LoadedModel
from rllm.models.weight_sending import WeightSender

WAIT_S = 30.0
"""Longer than any test may take: a real one waits for ever."""
PATHS = {
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
}


class MemoryGroup:
    """Two ranks, of which the first sends."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = threading.Barrier(num_ranks)
        self.chunks = queue.Queue[Tensor | None]()
        self.is_broken = False
        self.before_chunk: Callable[[int], None] = lambda number: None
        self.num_chunks = 0
        self.taken = threading.Semaphore(0)

    def broadcast(self, chunk: Tensor) -> None:
        self.before_chunk(self.num_chunks)
        assert chunk.dtype == torch.uint8
        assert chunk.dim() == 1
        self.num_chunks += 1
        self.chunks.put(chunk.clone())

    def wait(self) -> None:
        for _ in range(self.num_chunks):
            while not self.taken.acquire(timeout=0.01):
                if self.is_broken:
                    raise InferenceError("The group was left.")
        self.num_chunks = 0

    def take(self) -> Tensor:
        chunk = self.chunks.get(timeout=WAIT_S)
        self.taken.release()
        if chunk is None:
            raise RuntimeError("NCCL: a remote process is gone.")
        return chunk

    def abort(self) -> None:
        self.is_broken = True
        self.ranks.abort()
        self.chunks.put(None)


class MemoryNccl:
    """All groups, by their unique ids."""

    def __init__(self) -> None:
        self.groups: dict[bytes, MemoryGroup] = {}
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self.before_chunk: Callable[[int], None] = lambda number: None
        """Called with the number of a chunk in its update, before it is sent."""

    def unique_id(self) -> bytes:
        return (b"group %d" % next(self._numbers)).ljust(128, b"\0")

    def join(self, name: bytes, num_ranks: int) -> MemoryGroup:
        with self._lock:
            group = self.groups.setdefault(name, MemoryGroup(num_ranks))
        group.before_chunk = self.before_chunk
        group.ranks.wait(WAIT_S)
        return group


class MemorySender(WeightSender):
    """The trainer's, with the group replaced."""

    chunk_bytes = 20_000

    def __init__(self, model: LoadedModel, nccl: MemoryNccl) -> None:
        super().__init__(model)
        self._nccl = nccl

    def unique_id(self) -> bytes:
        return self._nccl.unique_id()

    def join(self, name: bytes, num_ranks: int) -> MemoryGroup:
        return self._nccl.join(name, num_ranks)


class TensorReceiver:
    """The worker; its methods block, as those of vLLM do. What vLLM answers with 500 is a RuntimeError."""

    def __init__(self, nccl: MemoryNccl, load: Callable[[dict[str, Tensor]], None]) -> None:
        self._nccl, self._load = nccl, load
        self._group: MemoryGroup | None = None
        self._is_active = False
        self._chunk_bytes = 0
        self.is_configured = True
        self.joins_alone = False
        """Whether NCCL is off, as VLLM_DISABLE_PYNCCL has it."""
        self.fails_behind: int | None = None
        """Chunks of an update behind which it fails."""
        self.has_loaded = threading.Event()
        """Set once it has loaded a chunk."""
        self.updates: list[dict[str, Any]] = []
        """The names, dtypes and shapes that it was told."""

    def begin_anew(self) -> None:
        self._group, self._is_active = None, False

    def respond(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        match path:
            case "/init_weight_transfer_engine":
                self._require_configured()
                self._join(**body["init_info"])
            case "/shutdown_weight_transfer_engine":
                if self._is_active:
                    raise RuntimeError("Cannot release a trainer connection during a weight update")
                self._group = None
            case "/start_weight_update":
                self._require_configured()
                if self._is_active:
                    raise RuntimeError("start_weight_update called while a weight update is already active.")
                self._is_active = True
            case "/update_weights":
                if not self._is_active:
                    raise RuntimeError("start_weight_update must be called before update_weights.")
                try:
                    self._receive(**body["update_info"])
                except BaseException:
                    self._is_active = False
                    raise
            case "/finish_weight_update":
                if not self._is_active:
                    raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
                self._is_active = False
            case _:
                raise AssertionError(path)
        return {"message": "done"}

    def _require_configured(self) -> None:
        if not self.is_configured:
            raise RuntimeError("Weight transfer not configured. Please set weight_transfer_config.")

    def _join(
        self,
        *,
        nccl_unique_id_b64: str,
        rank_offset: int,
        world_size: int,
        packed: bool,
        packed_buffer_size_bytes: int,
    ) -> None:
        assert (rank_offset, world_size, packed) == (1, 2, True)
        name = base64.b64decode(nccl_unique_id_b64, validate=True)
        assert len(name) == 128
        self._chunk_bytes = packed_buffer_size_bytes
        if not self.joins_alone:
            self._group = self._nccl.join(name, world_size)

    def _receive(self, *, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        if self._group is None:
            raise RuntimeError("NCCL weight transfer not initialized.")
        self.updates.append({"names": names, "dtype_names": dtype_names, "shapes": shapes})
        waiting: list[tuple[str, torch.dtype, list[int], int]] = []
        num_chunks = 0
        for place, (name, dtype_name, shape) in enumerate(zip(names, dtype_names, shapes, strict=True)):
            dtype = getattr(torch, dtype_name)
            waiting.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
            is_full = sum(each[3] for each in waiting) > self._chunk_bytes
            if is_full or place == len(names) - 1:
                if num_chunks == self.fails_behind:
                    self.fails_behind = None
                    raise RuntimeError("CUDA out of memory")
                chunk = self._group.take()
                num_chunks += 1
                assert chunk.numel() == sum(each[3] for each in waiting)
                parts = chunk.split([each[3] for each in waiting])
                self._load(
                    {
                        name: part.clone().view(dtype).view(shape)
                        for (name, dtype, shape, _), part in zip(waiting, parts, strict=True)
                    }
                )
                waiting = []
                self.has_loaded.set()
