"""New weights over NCCL: what a server is asked, what it is sent, and what holds when either side fails."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open

from rllm.errors import ConfigError, InferenceError
from rllm.inference import weight_link
from rllm.inference.fleet import Fleet
from rllm.inference.vllm import VLLMClient
from rllm.models import nccl as nccl_library
from rllm.models.builtin import create_model
from rllm.models.directory import LoadedModel, load_model, save_model
from rllm.models.weight_sending import chunks_of
from rllm.types.messages import SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from policy_server import PolicyServer
from tensor_receiver import MemoryNccl, MemorySender

SHORT = SamplingParams(max_tokens=4)
ROW = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, as servers have them: with output layers of their own."""
    directory = tmp_path_factory.mktemp("models")
    for seed in range(2):
        create_model(directory / f"tied-{seed}", "tiny", seed)
        save_model(load_model(directory / f"tied-{seed}"), directory / str(seed), with_output_layer=True)
    return directory


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_link, "REFUSED_WITHIN_S", 0.2)


@pytest.fixture
def nccl() -> MemoryNccl:
    return MemoryNccl()


@pytest.fixture
def servers(models: Path, nccl: MemoryNccl) -> Iterator[list[PolicyServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(PolicyServer(models / "0", nccl=nccl)) for _ in range(2)]


@asynccontextmanager
async def _fleet(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl, *, model: LoadedModel | None = None
) -> AsyncIterator[Fleet]:
    fleet = Fleet(
        [VLLMClient(each.url, models / "0", processed_logprobs=True) for each in servers],
        weights=MemorySender(model or load_model(models / "tied-1"), nccl),
        max_context=512,
        patience_s=20.0,
    )
    try:
        yield fleet
    finally:
        await fleet.close()


async def _scores(models: Path, name: str, nccl: MemoryNccl) -> list[float]:
    """Log-probabilities of ROW by a server that was started with a model and never given another."""
    with PolicyServer(models / name, nccl=nccl) as server:
        client = VLLMClient(server.url, models / "0")
        try:
            return await client.score(ROW, 1)
        finally:
            await client.close()


def _management(server: PolicyServer) -> list[str]:
    asked = [path for path in server.paths if path not in ("/v1/models", "/version", "/v1/completions")]
    server.paths.clear()
    return asked


JOIN = ["/get_world_size", "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
PUSH = [
    "/pause?mode=wait",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/resume",
]


async def test_a_server_is_joined_once_and_paused_given_all_tensors_and_let_go_on(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl, tmp_path: Path
) -> None:
    server = servers[0]
    async with _fleet([server], models, nccl) as fleet:
        with pytest.raises(InferenceError, match="published"):
            await fleet.generate_ids(ROW, SHORT)
        fleet.publish(3)
        answer = await fleet.generate_ids(ROW, SHORT)
        assert set(answer.policy_versions) == {3}
        assert server.versions == ["3"]
        assert _management(server) == JOIN + PUSH
        assert await fleet.score(ROW, 1) == await _scores(models, "1", nccl), "to the bit, as float32 goes"
        fleet.publish(4)
        await fleet.generate_ids(ROW, SHORT)
        assert _management(server) == PUSH
    assert _management(server) == ["/shutdown_weight_transfer_engine"]
    assert len(nccl.groups) == 1
    (told, _) = server.receiver.updates
    with safe_open(models / "1" / "model.safetensors", "pt") as file:
        in_file = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert dict(zip(told["names"], told["shapes"], strict=True)) == in_file
    assert set(told["dtype_names"]) == {"float32"}


async def test_weights_in_16_bits_are_sent_as_such(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl
) -> None:
    model = load_model(models / "tied-1", dtype=torch.bfloat16)
    async with _fleet(servers[:1], models, nccl, model=model) as fleet:
        fleet.publish(1)
        scores = await fleet.score(ROW, 1)
    assert set(servers[0].receiver.updates[0]["dtype_names"]) == {"bfloat16"}
    exact = await _scores(models, "1", nccl)
    assert scores != exact
    assert max(abs(a - b) for a, b in zip(scores, exact, strict=True)) < 0.05, "but for rounding the same"


@pytest.mark.parametrize("side", ["trainer", "server"])
async def test_an_update_that_breaks_off_is_never_answered_by(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl, side: str
) -> None:
    def fail(number: int) -> None:
        if number == 1:
            assert server.receiver.has_loaded.wait(30)
            raise RuntimeError("CUDA error")

    server = servers[0]
    client = VLLMClient(server.url, models / "0", processed_logprobs=True)
    sender = MemorySender(load_model(models / "tied-1"), nccl)

    @asynccontextmanager
    async def hold_weights() -> AsyncIterator[int]:
        yield 1

    before = await client.score(ROW, 1)
    if side == "trainer":
        nccl.before_chunk = fail
    else:
        server.receiver.fails_behind = 1
    with pytest.raises((RuntimeError, InferenceError), match="CUDA"):
        await client.receive_weights(sender, hold_weights)
    assert _management(server)[-1] == "/resume"
    with pytest.raises(InferenceError, match="publish again"):
        await client.generate_ids(ROW, SHORT)
    with pytest.raises(InferenceError, match="publish again"):
        await client.score(ROW, 1)
    other = VLLMClient(server.url, models / "0")
    half = await other.score(ROW, 1)
    nccl.before_chunk = lambda number: None
    assert half not in (before, await _scores(models, "1", nccl)), "it is half new indeed"
    await client.receive_weights(sender, hold_weights)
    assert _management(server)[: len(JOIN)] == ["/v1/completions", *JOIN][1:]
    assert await client.score(ROW, 1) == await _scores(models, "1", nccl)
    assert len(nccl.groups) == 2, "one that broke is not gone on with"
    for each in (client, other):
        await each.close()


async def test_an_update_that_somebody_else_began_and_left_is_ended_first(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl
) -> None:
    servers[0].receiver.respond("/start_weight_update", {})
    async with _fleet(servers[:1], models, nccl) as fleet:
        fleet.publish(1)
        assert await fleet.score(ROW, 1) == await _scores(models, "1", nccl)


async def test_a_replica_that_ends_while_it_is_given_weights_costs_no_call(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl
) -> None:
    def die(number: int) -> None:
        if number == 1:
            nccl.before_chunk = lambda number: None
            servers[0].stop()

    async with _fleet(servers, models, nccl) as fleet:
        nccl.before_chunk = die
        fleet.publish(1)
        answers = await asyncio.gather(*(fleet.generate_ids([*ROW, each], SHORT) for each in range(5, 9)))
        assert all(set(each.policy_versions) == {1} for each in answers)
        assert servers[0].versions == []
        servers[0].start()
        while fleet.num_in_service < 2:
            await asyncio.sleep(0.01)
        assert await fleet.score(ROW, 1) == await _scores(models, "1", nccl), "of both"
        assert servers[0].versions == ["1"]


async def test_weights_stand_still_while_they_are_sent(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl
) -> None:
    model = load_model(models / "tied-1")
    other = load_model(models / "tied-0")
    sending, go_on = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        sending.set()
        assert go_on.wait(30)

    def write() -> None:
        with torch.no_grad():
            for mine, theirs in zip(model.model.parameters(), other.model.parameters(), strict=True):
                mine.copy_(theirs)

    async with _fleet(servers[:1], models, nccl, model=model) as fleet:
        nccl.before_chunk = hold
        fleet.publish(1)
        scored = asyncio.create_task(fleet.score(ROW, 1))
        await asyncio.to_thread(sending.wait, 30)
        with pytest.raises(RuntimeError, match="thread"):
            fleet.publish(2, write)  # the loop would wait for itself
        published = asyncio.create_task(asyncio.to_thread(fleet.publish, 2, write))
        await asyncio.sleep(0.05)
        assert not published.done()
        go_on.set()
        assert await scored == await _scores(models, "1", nccl)
        await published
        assert await fleet.score(ROW, 1) == await _scores(models, "0", nccl)
        assert servers[0].versions == ["1", "2"]


async def test_a_push_that_nobody_waits_for_any_more_leaves_its_group(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl
) -> None:
    sending, go_on = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        sending.set()
        assert go_on.wait(30)

    async with _fleet(servers[:1], models, nccl) as fleet:
        nccl.before_chunk = hold
        fleet.publish(1)
        call = asyncio.create_task(fleet.generate_ids(ROW, SHORT))
        await asyncio.to_thread(sending.wait, 30)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [each.is_broken for each in nccl.groups.values()] == [True]
        go_on.set()
        nccl.before_chunk = lambda number: None
        assert set((await fleet.generate_ids(ROW, SHORT)).policy_versions) == {1}
        assert await fleet.score(ROW, 1) == await _scores(models, "1", nccl)


@pytest.mark.parametrize("lack", ["routes", "backend", "nccl"])
async def test_a_server_that_takes_no_tensors_is_refused_before_nccl_waits_for_it(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl, lack: str
) -> None:
    server = servers[0]
    if lack == "routes":
        server.edit = lambda path, reply: None if path in JOIN else reply
    server.receiver.is_configured = lack != "backend"
    server.receiver.joins_alone = lack == "nccl"
    client = VLLMClient(server.url, models / "0")
    sender = MemorySender(load_model(models / "tied-1"), nccl)
    mend = "VLLM_DISABLE_PYNCCL" if lack == "nccl" else "--weight-transfer-config"
    with pytest.raises(ConfigError if lack == "routes" else InferenceError, match=mend):
        await client.receive_weights(sender, _never)
    assert not nccl.groups
    assert "/pause?mode=wait" not in server.paths
    await client.generate_ids(ROW, SHORT)
    await client.close()


def _never() -> Any:
    raise AssertionError("nothing is to be sent")


async def test_sglang_takes_none(models: Path, nccl: MemoryNccl) -> None:
    sender = MemorySender(load_model(models / "tied-1"), nccl)
    with PolicyServer(models / "0", engine="sglang") as server:
        client = VLLMClient(server.url, models / "0")
        with pytest.raises(ConfigError, match="SGLang"):
            await client.receive_weights(sender, _never)
        await client.close()


async def test_a_server_that_never_joins_is_given_up(
    servers: list[PolicyServer], models: Path, nccl: MemoryNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_link, "JOINED_WITHIN_S", 0.2)
    sender = MemorySender(load_model(models / "tied-1"), nccl)
    client = VLLMClient(servers[0].url, models / "0")
    held = threading.Event()
    with patch.object(sender, "join", lambda name, num_ranks: held.wait(30)):
        with pytest.raises(InferenceError, match="NCCL group within"):
            await client.receive_weights(sender, _never)
        held.set()
    for group in nccl.groups.values():
        group.abort()
    await client.close()


@pytest.mark.parametrize("limit", [0, 1, 40, 100, 10_000])
def test_chunks_are_all_bytes_in_order_and_end_behind_the_tensor_that_fills_them(limit: int) -> None:
    weights = {
        "a": torch.arange(6.0).view(2, 3).t(),  # not contiguous
        "b": torch.arange(5, dtype=torch.bfloat16),
        "c": torch.tensor(7.0),
        "d": torch.arange(30.0),
    }
    chunks = list(chunks_of(weights, limit))
    by_hand = b"".join(
        each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in weights.values()
    )
    assert b"".join(each.numpy().tobytes() for each in chunks) == by_hand
    ends, size = [], 0
    for each in weights.values():
        size += each.nbytes
        if size > limit:
            ends.append(size)
            size = 0
    assert [each.numel() for each in chunks] == ends + [size] * (size > 0)


def test_a_machine_without_nccl_is_refused_by_the_key() -> None:
    with (
        patch.object(nccl_library, "LIBRARY", "libnccl-is-not-here.so"),
        pytest.raises(ConfigError, match=r"inference\.weight_transfer.*libnccl-is-not-here"),
    ):
        nccl_library.require_nccl()
