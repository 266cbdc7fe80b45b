"""Ranks on GPUs, where there is none: which card each has, what it speaks through, what is refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from rllm.cli.main import rllm as front_door
from rllm.config.distributed import DistributedConfig
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.distributed import ALONE, joining, open_ranks, torch_ranks
from rllm.distributed.cards import backend_of, card_of_rank
from rllm.distributed.launch import free_port
from rllm.distributed.torch_ranks import TorchRanks
from rllm.errors import ConfigError
from rllm.models import devices
from rllm.trainer import distribution, fitting, memory_plan
from rllm.trainer.backends import sharded_weights
from rllm.trainer.backends.sharding import computing_device
from rllm.trainer.defaults import settle_defaults
from rllm.trainer.memory import num_parameters


@pytest.fixture
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settled(settings: dict[str, Any]) -> TrainConfig:
    config = load_config(settings)
    settle_defaults(config, Path("nowhere"))
    return config


def ranks_on(card: int | None, *, size: int = 4, **more: Any) -> TorchRanks:
    ranks = TorchRanks(0, size, SimpleNamespace(), [], **more)  # type: ignore[arg-type]
    ranks.card = card
    return ranks


@pytest.mark.parametrize("local_rank", range(4))
def test_each_rank_of_a_machine_has_the_card_of_its_number(local_rank: int) -> None:
    card = card_of_rank("cuda", local_rank, 4, 4)
    assert card == local_rank
    assert ranks_on(card).device_of("cuda") == f"cuda:{local_rank}"
    assert card_of_rank("cpu", local_rank, 4, 0) is None, "nobody looks for cards there"
    assert ranks_on(None).device_of("cpu") == ALONE.device_of("cpu") == "cpu"
    assert ALONE.device_of("cuda:1") == "cuda:1", "a process by itself computes where it is told to"


def test_tensors_of_cards_go_over_nccl_and_all_others_over_gloo() -> None:
    assert backend_of(None) == "gloo"
    parts = dict(each.split(":") for each in backend_of(0).split(","))
    assert parts == {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    ("device", "local_rank", "num_local", "num_cards", "why"),
    [
        ("cuda", 0, 2, 0, "2 processes.*no card"),
        ("cuda", 0, 2, 1, "1 cards for 2 processes"),
        ("cuda", 3, 8, 4, "4 cards for 8 processes"),
        ("cuda:1", 0, 2, 2, "'cuda:1'.*each has a card"),
        ("mps", 0, 2, 0, "'mps'"),
        ("cuda", None, 2, 2, "LOCAL_RANK is not set"),
        ("cuda", 2, 2, 2, "LOCAL_RANK is 2"),
    ],
)
def test_what_gives_no_card_to_each_rank_is_refused_with_the_numbers(
    device: str, local_rank: int | None, num_local: int, num_cards: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        card_of_rank(device, local_rank, num_local, num_cards)


@pytest.mark.parametrize("num_seen", [0, 1])
def test_the_command_refuses_more_processes_than_cards_before_it_starts_any(
    monkeypatch: pytest.MonkeyPatch, empty_directory: Path, num_seen: int
) -> None:
    monkeypatch.setattr(distribution, "num_cards", lambda: num_seen)
    words = ["train", "frozenlake", "--nproc", "2", "--set", "model.device=cuda"]
    done = CliRunner().invoke(front_door, words, prog_name="rllm")
    assert done.exit_code == 2
    assert "model.device" in done.output
    assert not (empty_directory / "runs").exists()


def test_a_rank_of_torchrun_asks_for_the_cards_of_its_own_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four ranks on two machines of two cards each."""
    variables = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    cards = list[int | None]()

    @contextmanager
    def join(config: DistributedConfig, *, card: int | None, **sizes: int) -> Iterator[TorchRanks]:
        cards.append(card)
        yield ranks_on(card)

    monkeypatch.setattr(torch_ranks, "joined_ranks", join)
    monkeypatch.setattr(joining, "num_cards", lambda: 2)
    monkeypatch.setattr(distribution, "num_cards", lambda: 2)
    for device in ("cuda", "cpu"):
        with open_ranks(DistributedConfig(), device):
            distribution.require_distributed(load_config({"model": {"device": device}}), 4, is_program=False)
    assert cards == [1, None]
    monkeypatch.setattr(joining, "num_cards", lambda: 1)
    with pytest.raises(ConfigError, match="1 cards for 2"), open_ranks(DistributedConfig(), "cuda"):
        pass


def test_every_thread_that_works_for_a_rank_is_told_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[tuple[str, int]]()
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda card: threads.append((threading.current_thread().name, card))
    )
    learner = threading.Thread(target=ranks_on(3).enter_thread, name="learner")
    learner.start()
    learner.join()
    ranks_on(None).enter_thread()
    ALONE.enter_thread()
    assert threads == [("learner", 3)]


def test_meshes_and_smaller_groups_are_of_cards_where_the_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes, backends = list[Any](), list[str]()

    class Mesh(dict[str, Any]):
        def get_all_groups(self) -> list[Any]:
            return []

    def make_mesh(device_type: str, shape: tuple[int, ...], *, mesh_dim_names: Any) -> Mesh:
        meshes.append((device_type, shape))
        return Mesh(shards=Mesh())

    def make_group(members: list[int] | None = None, *, backend: str, timeout: Any) -> str:
        backends.append(backend)
        return backend

    monkeypatch.setattr(torch_ranks, "init_device_mesh", make_mesh)
    monkeypatch.setattr(torch_ranks.dist, "new_group", make_group)
    ranks = ranks_on(1, shard_size=2)
    ranks.mesh("cuda")
    assert meshes == [("cuda", (2, 2))]
    for card in (1, None):
        some = ranks_on(card, tensor_size=2).in_layer()
        assert (some.card, some.process_group) == (card, backend_of(card))
    assert backends == [backend_of(1)] * 4 + ["gloo"] * 4
    assert ranks_on(1).for_another_thread().process_group == "gloo", "it writes what is on the CPU"


def test_the_plan_counts_a_card_for_each_process_and_one_memory_for_all_on_a_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "free_accelerator_bytes", lambda device: 10**9)
    monkeypatch.setattr(fitting, "free_bytes", lambda device: 10**9)  # so that both have as many slots
    plans = {
        device: memory_plan.memory_plan(
            settled({"model": {"device": device, "dtype": "float32"}}), num_ranks=2, num_local_ranks=2
        )
        for device in ("cpu", "cuda")
    }
    on_cpu, on_card = plans["cpu"], plans["cuda"]
    assert on_cpu is not None
    assert on_card is not None
    assert on_cpu.parts == on_card.parts
    assert (on_cpu.num_local_ranks, on_card.num_local_ranks) == (2, 1)
    assert on_card.free == 10**9


@pytest.mark.parametrize("number_type", ["float32", "bfloat16"])
def test_the_plan_counts_what_is_offloaded_on_the_cpu_and_not_on_the_card(
    monkeypatch: pytest.MonkeyPatch, number_type: str
) -> None:
    monkeypatch.setattr(devices, "free_accelerator_bytes", lambda device: 10**9)
    plans = []
    for offload in (False, True):
        settings = {
            "model": {"device": "cuda", "dtype": number_type},
            "distributed": {"strategy": "shard", "offload": offload},
        }
        plan = memory_plan.memory_plan(settled(settings), num_ranks=4, num_local_ranks=2)
        assert plan is not None
        plans.append(plan)
    without, offloaded = plans
    shape = memory_plan.shape_of(load_config({}).model.path)
    assert shape is not None
    num_bytes = 16 * num_parameters(shape) / 4  # float32 weights or masters, gradients, two moments
    assert offloaded.on_cpu == pytest.approx(2 * num_bytes, rel=0.001), "of both processes of the machine"
    assert without.on_cpu == 0
    saved = without.parts.total - offloaded.parts.total
    assert saved == pytest.approx(num_bytes, rel=0.001)
    assert (offloaded.parts.gradients, offloaded.parts.optimizer) == (0, 0)
    assert offloaded.peak < without.peak
    assert "distributed.offload" in replace(offloaded, on_cpu=1 << 60).problem()


def test_what_stands_beside_an_offloaded_shard_is_where_the_shard_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the mesh's device, to which torch moves what is made a part of a mesh: `meta` stands for a CPU
    beside cards."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    meet = torch_ranks._rendezvous.__wrapped__
    monkeypatch.setattr(torch_ranks, "_rendezvous", meet)  # else this process meets nobody elsewhere again
    sizes = {"num_local": 1, "shard_size": 1, "tensor_size": 1}
    with torch_ranks.joined_ranks(DistributedConfig(), **sizes) as ranks:
        mesh = ranks.mesh("cpu")
        for device in ("meta", "cpu"):
            shard = DTensor.from_local(torch.ones(3, 2, device=device), mesh, [Shard(0)])
            moment = torch.full((3, 2), 2.0, dtype=torch.float64)
            beside = sharded_weights._beside(shard, moment)
            assert (beside.device.type, beside.dtype, beside.shape) == (device, moment.dtype, shard.shape)
            assert beside.placements == shard.placements
            assert device == "meta" or torch.equal(beside.full_tensor(), moment)
            assert computing_device(nn.ParameterList([nn.Parameter(shard)])).type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a card is refused")
def test_one_process_on_a_card_that_is_not_there_is_refused_as_before(empty_directory: Path) -> None:
    words = ["train", "frozenlake", "--set", "model.device=cuda", "--dry-run"]
    done = CliRunner().invoke(front_door, words, prog_name="rllm")
    assert done.exit_code == 2
    assert "model.device" in done.output
