"""What an answered request held goes away with it, without the garbage collector: a server runs it seldom."""

import gc
from collections.abc import Callable, Iterator

import pytest

from rllm.inference.client import TokenPiece
from rllm.inference.local.client import LocalClient
from rllm.inference.local.requests import Request
from rllm.models.directory import LoadedModel
from rllm.types.messages import SamplingParams

Serve = Callable[..., LocalClient]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _num_alive() -> int:
    return sum(type(each) is Request for each in gc.get_objects())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answered_request_is_gone(tiny: LoadedModel, serve: Serve, streamed: bool) -> None:
    client = serve(tiny)
    before = _num_alive()
    pieces: list[TokenPiece] = []
    for seed in range(6):
        sampling = SamplingParams(max_tokens=5, seed=seed, stop=("never said",))
        await client.generate_ids([5, 6, 7], sampling, on_piece=pieces.append if streamed else None)
    assert _num_alive() - before <= 1  # the engine's thread may still look at the last one
