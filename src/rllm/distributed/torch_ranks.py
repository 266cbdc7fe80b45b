"""Ranks that speak through torch.distributed, over gloo, and over NCCL where their tensors are on cards.

    gather, sum_in_place, wait ──► one process group                 a peer that ends breaks its connections
    beat ──► Heartbeat ──► a store that all ranks read and write     says who ended, where, and of what

Collectives are called by one thread at a time, in the same order on every rank: the training loop is
sequential, wherever it hands its work to a thread.
"""

import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rllm.config.distributed import DistributedConfig
from rllm.distributed.cards import GLOO, backend_of
from rllm.distributed.group import ALONE, RankGroup
from rllm.distributed.heartbeat import Heartbeat
from rllm.errors import RankError

Item = TypeVar("Item")

NEVER = datetime.timedelta(days=30)
"""Heartbeats end a run that hangs: a collective may wait as long as another rank needs."""
START_S = 300.0
"""For all ranks to appear."""
MESH_DIMENSIONS = ("copies", "shards")
BROKEN = "gloo/transport"
"""In what gloo raises, a RuntimeError like any, where a connection broke."""
BUCKET_ELEMENTS = 1 << 22
"""Tensors are summed together up to so many elements: one message for many small ones."""


class TorchRanks(RankGroup):
    """The ranks of a process group."""

    def __init__(
        self,
        rank: int,
        size: int,
        heartbeat: Heartbeat,
        groups_in_step: list[Any],
        *,
        num_local: int = 1,
        shard_size: int = 1,
        tensor_size: int = 1,
    ) -> None:
        self.rank, self.size, self.num_local = rank, size, num_local
        self.shard_size, self.tensor_size = shard_size, tensor_size
        self._heartbeat, self._groups_in_step = heartbeat, groups_in_step
        self._meshes: dict[str, DeviceMesh] = {}
        self._neighbours: tuple[RankGroup, RankGroup] | None = None

    def enter_thread(self) -> None:
        if self.card is not None:  # FSDP2 makes its streams on the device of the thread
            torch.cuda.set_device(self.card)

    def gather(self, value: Item) -> list[Item]:
        def collect() -> list[Item]:
            values: list[Item] = [value] * self.size
            dist.all_gather_object(values, value, group=self.process_group)
            return values

        return self._together(collect)

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        def add() -> None:
            for bucket in _buckets(tensors):
                # A large tensor has a bucket of its own and is summed where it lies, without a copy.
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    dist.all_reduce(bucket[0], group=self.process_group)
                    continue
                flat = torch.cat([each.reshape(-1) for each in bucket])
                dist.all_reduce(flat, group=self.process_group)
                parts = flat.split([each.numel() for each in bucket])
                for each, total in zip(bucket, parts, strict=True):
                    each.copy_(total.view_as(each))

        with torch.no_grad():
            self._together(add)

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        def collect() -> list[Tensor]:
            tensors = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(tensors, tensor, group=self.process_group)
            return tensors

        return self._together(collect)

    def in_layer(self) -> RankGroup:
        return ALONE if self.tensor_size == 1 else self._split()[0]

    def with_same_part(self) -> RankGroup:
        return self if self.tensor_size == 1 else self._split()[1]

    def _split(self) -> tuple[RankGroup, RankGroup]:
        """All ranks have to be here the first time."""
        if self._neighbours is None:
            # Ranks of one layer have numbers in a row: who counts each layer once takes every
            # `tensor_size`-th rank.
            numbers = torch.arange(self.size).view(-1, self.tensor_size)
            self._neighbours = (
                _SomeRanks.of(self, numbers.tolist()),
                _SomeRanks.of(self, numbers.t().tolist()),
            )
        return self._neighbours

    def mesh(self, device_type: str) -> DeviceMesh:
        if device_type not in self._meshes:
            copies = self.size // self.shard_size
            mesh = init_device_mesh(device_type, (copies, self.shard_size), mesh_dim_names=MESH_DIMENSIONS)
            self._meshes[device_type] = mesh if copies > 1 else mesh["shards"]
            # FSDP2 gathers and reduces over these, and the heartbeat counts what each rank has begun in them.
            self._groups_in_step.extend(self._meshes[device_type].get_all_groups())
        return self._meshes[device_type]

    def for_another_thread(self) -> RankGroup:
        return _OtherThread(self)

    @contextmanager
    def inside_torch(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # What goes wrong in the model itself is a RuntimeError as well, and keeps its own words.
            if not isinstance(error, dist.DistError) and BROKEN not in str(error):
                raise
            raise RankError(self._heartbeat.explanation()) from error

    def wait(self) -> None:
        self._together(lambda: dist.barrier(group=self.process_group))

    def beat(self, place: str = "") -> None:
        self._heartbeat.beat(place)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._heartbeat.waiting():
            yield

    def _together(self, collective: Callable[[], Item]) -> Item:
        """Raises RankError, naming the rank that ended, where another one did."""
        with self._waiting():
            try:
                return collective()
            except RuntimeError as error:
                raise RankError(self._heartbeat.explanation()) from error


class _SomeRanks(TorchRanks):
    """A subset of all ranks, which this one exchanges values with."""

    @classmethod
    def of(cls, ranks: TorchRanks, groups: Sequence[Sequence[int]]) -> "_SomeRanks":
        """The one of `groups` that this rank is in; every rank is in one."""
        backend = backend_of(ranks.card)
        # All ranks make all groups, in one order: torch wants also those there that a group leaves out.
        made = [
            (dist.new_group(list(members), backend=backend, timeout=NEVER), members) for members in groups
        ]
        group, members = next(each for each in made if ranks.rank in each[1])
        mine = cls(members.index(ranks.rank), len(members), ranks._heartbeat, ranks._groups_in_step)
        mine.process_group, mine.card = group, ranks.card
        return mine


class _OtherThread(TorchRanks):
    """The same ranks, for a thread beside the one whose progress the heartbeat tells of."""

    def __init__(self, ranks: TorchRanks) -> None:
        super().__init__(
            ranks.rank,
            ranks.size,
            ranks._heartbeat,
            ranks._groups_in_step,
            num_local=ranks.num_local,
            shard_size=ranks.shard_size,
        )
        self.card = ranks.card
        self.process_group = dist.new_group(backend=GLOO, timeout=NEVER)  # it writes from copies on the CPU

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        # The thread waits beside the work of the rank, which the heartbeat goes on to watch.
        yield


def num_cards() -> int:
    """GPUs that torch sees on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _num_collectives(groups: Sequence[Any]) -> int:
    """Those that this rank has begun in all of them."""
    return sum(each._get_sequence_number_for_group() for each in groups)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype together; the order is the same on all ranks."""
    for _, same in itertools.groupby(tensors, key=lambda each: (each.dtype, each.device)):
        bucket: list[Tensor] = []
        for each in same:
            if bucket and sum(other.numel() for other in bucket) + each.numel() > BUCKET_ELEMENTS:
                yield bucket
                bucket = []
            bucket.append(each)
        if bucket:
            yield bucket


_numbers = itertools.count()
"""The numbers of the groups of this process: a program may train several times, and each has keys of its
own."""


@cache
def _rendezvous() -> tuple[Any, int, int]:
    """The store of all ranks, this rank, and how many there are. Rank 0 may hold the store, which therefore
    lives as long as the process: another at the same address would meet ranks that still use the first."""
    return next(rendezvous("env://", timeout=datetime.timedelta(seconds=START_S)))


def _meet(number: int) -> tuple[Store, Store, int, int]:
    """Stores of collectives and of beats, this rank, and how many there are, once all ranks have come."""
    try:
        store, rank, size = _rendezvous()
        beats = PrefixStore(f"rllm-beats-{number}", store.clone())
        beats.set(f"here/{rank}", "")
        beats.wait([f"here/{each}" for each in range(size)], datetime.timedelta(seconds=START_S))
    except (dist.DistError, ValueError) as error:
        raise RankError(
            f"Not all ranks came within {START_S:.0f} s ({str(error).splitlines()[0]:.200}); start as many "
            "as WORLD_SIZE says, with one MASTER_ADDR and MASTER_PORT that all of them can reach."
        ) from error
    return PrefixStore(f"rllm-ranks-{number}", store), beats, rank, size


@contextmanager
def joined_ranks(
    config: DistributedConfig,
    *,
    num_local: int,
    shard_size: int,
    tensor_size: int,
    card: int | None = None,
) -> Iterator[TorchRanks]:
    """The group of all ranks that the environment names, while the block runs; see `RankGroup`. `card`: the
    GPU of this one.

    After `config.timeout_s` of a rank's work without a sign of life all of them end.
    """
    ours, beats, rank, size = _meet(next(_numbers))
    if card is not None:
        torch.cuda.set_device(card)
    dist.init_process_group(backend_of(card), store=ours, rank=rank, world_size=size, timeout=NEVER)
    groups_in_step: list[Any] = [dist.group.WORLD]  # and those of a mesh: all ranks are in step there
    with Heartbeat(
        beats, rank, size, config.timeout_s, lambda: _num_collectives(groups_in_step)
    ) as heartbeat:
        dist.barrier()  # every rank has its first beat in the store
        heartbeat.watch()
        ranks = TorchRanks(
            rank,
            size,
            heartbeat,
            groups_in_step,
            num_local=num_local,
            shard_size=shard_size,
            tensor_size=tensor_size,
        )
        ranks.card, ranks.offloads = card, config.offload
        try:
            yield ranks
        except BaseException as error:
            heartbeat.report_end(error)
            raise
        else:
            with heartbeat.waiting():  # rank 0 may have a summary to write: those that wait for it are alive
                dist.barrier()
            heartbeat.stop()
            dist.barrier()  # rank 0 holds the store: it is the last to let go
        finally:
            heartbeat.stop()
            dist.destroy_process_group()
