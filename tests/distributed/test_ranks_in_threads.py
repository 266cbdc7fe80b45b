"""Layers that ranks compute together, where the ranks are threads of this process: none has to be started."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, Qwen2Config, Qwen3Config

from rllm.distributed import ALONE, RankGroup
from rllm.errors import ConfigError
from rllm.models.directory import load_model
from rllm.trainer.backends.torch_plans import split_by_plan

CASES = [
    (Qwen3Config, "ppo"),
    (Qwen2Config, "muon"),
    (Qwen3Config, "lora of some layers by muon"),
    (GPTNeoXConfig, "ppo"),
]


class Meeting:
    """Where as many threads as there are ranks hand each other values."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=300)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class ThreadRanks(RankGroup):
    """One rank of several that compute each layer together."""

    def __init__(self, rank: int, meeting: Meeting, *, tensor_size: int) -> None:
        self.rank, self.size, self.tensor_size = rank, len(meeting.values), tensor_size
        self._meeting = meeting

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        return self.gather(tensor.detach().clone())

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for each in tensors:
                each.copy_(torch.stack(self.gather_tensors(each)).sum(0))

    def in_layer(self) -> RankGroup:
        return ThreadRanks(self.rank, self._meeting, tensor_size=1)

    def with_same_part(self) -> RankGroup:
        return ALONE

    def wait(self) -> None:
        self.gather(None)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_two_threads_with_half_of_every_layer_update_as_one_does(
    recorded: ModuleType,
    require_same: Callable[..., None],
    made: Callable[[type[Any]], Path],
    family: type[Any],
    kind: str,
) -> None:
    model, meeting = made(family), Meeting(2)

    def rank(number: int) -> Any:
        try:
            return recorded.trained(kind, model, ThreadRanks(number, meeting, tensor_size=2), 1)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    alone = {kind: recorded.trained(kind, model, ALONE, 1)}
    require_same(alone, {kind: first})
    require_same({kind: first}, {kind: second})


class _SecondIsNoNumber(ThreadRanks):
    """What rank 1 measures is no number."""

    def gather(self, value: Any) -> list[Any]:
        return super().gather(math.nan if self.rank == 1 and isinstance(value, float) else value)


def test_parts_that_compute_no_number_on_a_single_rank_are_refused_by_all(
    made: Callable[[type[Any]], Path],
) -> None:
    directory, meeting = made(GPTNeoXConfig), Meeting(2)
    models = [load_model(directory).model for _ in range(2)]

    def rank(number: int) -> None:
        try:
            with pytest.raises(ConfigError, match="its states"):
                split_by_plan(models[number], _SecondIsNoNumber(number, meeting, tensor_size=2))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
