"""The processes of one run, called ranks, and what they do together.

    RankGroup     one process: nothing to do
    TorchRanks    several, which speak over gloo, on cards over NCCL as well     rllm.distributed.torch_ranks

Every rank runs the same code on the same values. What only one of them may do, such as writing files, rank 0
does; `RankGroup.is_writer` says who that is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")


class RankGroup:
    """The ranks of a run; this one is a process by itself, so that nothing here costs anything."""

    rank = 0
    size = 1
    num_local = 1
    """Ranks on this machine: they share its cores."""
    shard_size = 1
    """Ranks that hold one copy of what is trained between them; 1 where each has the whole."""

    offloads = False
    """Whether shards, their gradients and the optimizer's state are kept on the CPU."""

    tensor_size = 1
    """Ranks that compute each layer together, on the same rows."""
    card: int | None = None
    """The GPU of this rank among those of its machine, where ranks are on GPUs."""
    process_group: Any = None
    """The torch one that they speak through; None: the default."""

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run directory."""
        return self.rank == 0

    @property
    def has_whole(self) -> bool:
        """Whether each rank has all of what is trained."""
        return self.shard_size == self.tensor_size == 1

    def device_of(self, device: str) -> str:
        """The device of this rank, of the one that `model.device` names for all of them."""
        return device if self.card is None else f"cuda:{self.card}"

    def enter_thread(self) -> None:
        """Let the thread that calls this, and begins to work on the rank's device, know which one that is."""

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """This rank's part of what all ranks have."""
        return items[self.rank :: self.size] if self.size > 1 else items

    def gather(self, value: Item) -> list[Item]:
        """The `value` of every rank, in the order of ranks, on every rank."""
        return [value]

    def sum_in_place(self, tensors: Sequence[Any]) -> None:
        """Replace each tensor by its sum over the ranks, the same bits on all of them."""

    def gather_tensors(self, tensor: Any) -> list[Any]:
        """The `tensor` of every rank, all of one shape, in the order of ranks."""
        return [tensor]

    def in_layer(self) -> "RankGroup":
        """Those that compute a layer together with this one."""
        return self

    def with_same_part(self) -> "RankGroup":
        """Those that compute the same part of each layer as this one, on other rows."""
        return self

    def mesh(self, device_type: str) -> Any:
        """The torch `DeviceMesh` of ranks: `shards` of a copy, behind `copies` where there are several. One
        rank has none."""
        raise NotImplementedError

    def for_another_thread(self) -> "RankGroup":
        """The same ranks over connections of their own, for one more thread of each; all ranks have to be
        here."""
        return self

    @contextmanager
    def inside_torch(self) -> Iterator[None]:
        """While torch itself lets ranks speak to each other, as a sharded model does in every layer."""
        yield

    def wait(self) -> None:
        """Return once every rank has come here."""

    def beat(self, place: str = "") -> None:
        """Tell the other ranks that this one works on, and at what, where that has changed."""

    @contextmanager
    def writer_first(self) -> Iterator[None]:
        """Let rank 0 through the block before the others enter it."""
        if not self.is_writer:
            self.wait()
        yield
        if self.is_writer:
            self.wait()


ALONE = RankGroup()
"""One process."""
