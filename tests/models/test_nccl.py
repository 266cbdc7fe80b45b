"""Calls of NCCL's library, where there is none: what it is given, in which order, and what ends a wait."""

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rllm.errors import InferenceError
from rllm.models import nccl

CPU = torch.device("cpu")


class Library:
    """Takes note of its calls. Work is done once `is_done`, and a lost rank shows as `async_error`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.sent: list[bytes] = []
        self.results: dict[str, int] = {}
        self.async_error = 0
        self.is_done = True

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "ncclBroadcast":
                self.sent.append(ctypes.string_at(arguments[0].value, arguments[2]))
            if name == "ncclCommGetAsyncError":
                arguments[1]._obj.value = self.async_error
            return self.results.get(name, 0)

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    event = SimpleNamespace(record=lambda stream: None, query=lambda: library.is_done)
    monkeypatch.setattr(nccl, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    return library


def test_a_group_is_tried_by_one_number_as_servers_do_before_anything_is_sent(library: Library) -> None:
    group = nccl.NcclGroup(b"n" * 128, 3, CPU)
    chunk = torch.arange(200, dtype=torch.uint8)
    group.broadcast(chunk)
    group.wait()
    assert library.names == ["ncclCommInitRank", "ncclAllReduce", "ncclBroadcast"]
    (_, (_, num_ranks, name, rank)), (_, warm_up), (_, broadcast) = library.calls
    assert (num_ranks, bytes(name), rank) == (3, b"n" * 128, 0)
    assert warm_up[2:5] == (1, 7, 0), "one float32, summed"
    assert broadcast[2:5] == (200, 1, 0), "bytes, from rank 0"
    assert warm_up[-1].value == broadcast[-1].value == 77
    assert library.sent == [chunk.numpy().tobytes()]


def test_a_wait_ends_when_a_rank_is_lost_or_the_group_is_left(library: Library) -> None:
    group = nccl.NcclGroup(b"n" * 128, 2, CPU)
    library.is_done, library.async_error = False, 6
    with pytest.raises(InferenceError, match="code 6"):
        group.wait()
    library.async_error = 0
    group.abort()
    group.abort()
    for work in (group.wait, lambda: group.broadcast(torch.zeros(1, dtype=torch.uint8))):
        with pytest.raises(InferenceError, match="left"):
            work()
    assert library.names.count("ncclCommAbort") <= 1, "its thread may not have come to it yet"


def test_a_call_that_fails_is_an_error_with_its_name(library: Library) -> None:
    library.results["ncclCommInitRank"] = 5
    with pytest.raises(InferenceError, match=r"ncclCommInitRank.* 5"):
        nccl.NcclGroup(b"n" * 128, 2, CPU)
    library.results["ncclGetUniqueId"] = 1
    with pytest.raises(InferenceError, match="ncclGetUniqueId"):
        nccl.unique_id()
