"""With `distributed.strategy` = shard each rank holds a part of what is trained, and nothing else changes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from rllm.config.distributed import DistributedConfig
from rllm.config.loader import load_config
from rllm.distributed import ALONE
from rllm.errors import ConfigError
from rllm.trainer import distribution

Ranks = Callable[..., list[dict[str, Any]]]
Require = Callable[..., None]
FEW = ("ppo", "critic", "recomputed in chunks", "lora", "muon", "two policies", "ppo in float32")
Tensors = dict[str, torch.Tensor]
SHARD = json.dumps({"strategy": "shard"})
BACKGROUND = json.dumps({"keep": 9, "background": True})
HYBRID = json.dumps({"strategy": "shard", "shard_size": 2})


def test_two_ranks_with_half_of_the_weights_each_update_as_one_does(
    ranks: Ranks,
    require_all_well: Require,
    require_same: Require,
    alone_for_one_step: Any,
    smallest_model: Path,
    tmp_path: Path,
) -> None:
    require_all_well(ranks("recorded", [smallest_model, tmp_path / "updates", 1, SHARD, ",".join(FEW)], 2))
    few = {kind: alone_for_one_step[kind] for kind in FEW}
    require_same(few, torch.load(tmp_path / "updates", weights_only=False))


def test_two_ranks_whose_shards_are_offloaded_update_as_one_does(
    ranks: Ranks,
    require_all_well: Require,
    require_same: Require,
    alone_for_one_step: Any,
    smallest_model: Path,
    tmp_path: Path,
) -> None:
    """By FSDP2's own policy, which has nothing to copy here; a run refuses it on the CPU."""
    kinds = ("ppo", "critic", "lora", "two policies", "ppo in float32")
    offload = json.dumps({"strategy": "shard", "offload": True})
    require_all_well(
        ranks("recorded", [smallest_model, tmp_path / "updates", 1, offload, ",".join(kinds)], 2)
    )
    alone = {kind: alone_for_one_step[kind] for kind in kinds}
    require_same(alone, torch.load(tmp_path / "updates", weights_only=False))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"distributed": {"offload": True}}, r"distributed\.offload.*distributed\.strategy"),
        (
            {"distributed": {"offload": True, "strategy": "shard"}},
            r"distributed\.offload.*model\.device.*'cpu'",
        ),
        (
            {
                "distributed": {"offload": True, "strategy": "shard"},
                "model": {"device": "cuda"},
                "optimizer": {"name": "muon"},
            },
            r"distributed\.offload.*optimizer\.name",
        ),
    ],
)
def test_offload_is_refused_where_it_saves_nothing_or_is_not_exact(
    settings: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution, "num_cards", lambda: 2)
    with pytest.raises(ConfigError, match=why):
        distribution.require_distributed(load_config(settings), 2, is_program=False)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "shard_size"), [(2, 0), (3, 0), (4, 0), (4, 2)])
def test_any_number_of_ranks_and_copies_update_as_one_rank_does(
    ranks: Ranks,
    require_all_well: Require,
    require_same: Require,
    alone_for_twenty_steps: Any,
    smallest_model: Path,
    tmp_path: Path,
    num_ranks: int,
    shard_size: int,
) -> None:
    spread = json.dumps({"strategy": "shard", "shard_size": shard_size})
    require_all_well(ranks("recorded", [smallest_model, tmp_path / "updates", 20, spread], num_ranks))
    require_same(alone_for_twenty_steps, torch.load(tmp_path / "updates", weights_only=False))


@pytest.fixture(scope="module")
def of_transformers(smallest_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that transformers' own code computes."""
    directory = tmp_path_factory.mktemp("models") / "neox"
    torch.manual_seed(5)
    config = GPTNeoXConfig(
        vocab_size=400, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smallest_model / name, directory / name)
    return directory


@pytest.mark.slow
def test_layers_of_transformers_are_sharded_alike(
    ranks: Ranks,
    recorded: ModuleType,
    require_all_well: Require,
    require_same: Require,
    of_transformers: Path,
    tmp_path: Path,
) -> None:
    kinds = ("ppo", "recomputed in chunks", "lora", "muon")
    alone = {kind: recorded.trained(kind, of_transformers, ALONE, 3) for kind in kinds}
    require_all_well(ranks("recorded", [of_transformers, tmp_path / "updates", 3, SHARD, ",".join(kinds)], 2))
    require_same(alone, torch.load(tmp_path / "updates", weights_only=False))


@pytest.mark.slow
def test_weights_in_bfloat16_have_float32_masters_in_shards(
    ranks: Ranks, recorded: ModuleType, require_all_well: Require, smallest_model: Path, tmp_path: Path
) -> None:
    kind = recorded.IN_BFLOAT16
    parameters, metrics = recorded.trained(kind, smallest_model, ALONE, 3)
    require_all_well(ranks("recorded", [smallest_model, tmp_path / "updates", 3, SHARD, kind], 2))
    theirs, their_metrics = torch.load(tmp_path / "updates", weights_only=False)[kind]
    assert {each.dtype for each in theirs.values()} == {torch.float32}
    assert max(float((parameters[name] - theirs[name]).abs().max()) for name in parameters) < 5e-3
    for mine, other in zip(metrics, their_metrics, strict=True):
        assert other["grad_norm"] == pytest.approx(mine["grad_norm"], rel=0.02)


def furthest(mine: Tensors, theirs: Tensors) -> float:
    """The largest difference between two checkpoints that hold the same tensors."""
    assert {name: each.shape for name, each in mine.items()} == {
        name: each.shape for name, each in theirs.items()
    }
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def test_a_sharded_run_goes_on_with_the_same_bits_and_on_one_process_with_the_same_numbers(
    ranks: Ranks, require_all_well: Require, moved: ModuleType, smallest_model: Path, tmp_path: Path
) -> None:
    whole, stopped, alone, elsewhere = (
        tmp_path / name for name in ("whole", "stopped", "alone", "elsewhere")
    )
    require_all_well(ranks("moved", [smallest_model, whole, "muon", 2, SHARD], 2))
    require_all_well(ranks("moved", [smallest_model, stopped, "muon", 1, SHARD, BACKGROUND], 2))
    shutil.copytree(stopped, elsewhere)
    require_all_well(ranks("moved", [smallest_model, stopped, "muon", 2, SHARD, BACKGROUND], 2))
    assert furthest(moved.kept(whole, 2), moved.kept(stopped, 2)) == 0.0
    moved.main(smallest_model, alone, "muon", 2)
    moved.main(smallest_model, elsewhere, "muon", 2)
    assert furthest(moved.kept(alone, 2), moved.kept(elsewhere, 2)) < 1e-10
    assert len(list(whole.rglob("*.distcp"))) == 4, "each rank has written its part"
    assert not list((whole / "checkpoints").rglob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["critic", "lora", "muon"])
def test_a_run_moves_between_numbers_of_ranks_and_strategies(
    ranks: Ranks,
    require_all_well: Require,
    moved: ModuleType,
    smallest_model: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    moved.main(smallest_model, tmp_path / "alone", kind, 6)
    run = tmp_path / "moved"
    ways = [(2, SHARD), (1, "{}"), (3, SHARD), (2, "{}"), (4, HYBRID), (2, SHARD)]
    for step, (num_ranks, spread) in enumerate(ways, 1):
        require_all_well(ranks("moved", [smallest_model, run, kind, step, spread], num_ranks))
    assert furthest(moved.kept(tmp_path / "alone", 6), moved.kept(run, 6)) < 1e-10


@pytest.mark.parametrize(
    ("shard_size", "num_ranks", "why"),
    [
        (0, 1, "there is one process: start several with --nproc"),
        (3, 4, r"`distributed.shard_size`.*3.*4 processes"),
        (1, 2, "it must be 2 or more"),
    ],
)
def test_ranks_that_cannot_share_a_copy_are_refused(shard_size: int, num_ranks: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DistributedConfig(strategy="shard", shard_size=shard_size).ranks_of_a_copy(num_ranks)
