"""With `distributed.tensor_parallel` ranks compute every layer together, and nothing else changes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    ApertusConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from rllm.config.loader import load_config
from rllm.distributed import ALONE
from rllm.errors import ConfigError
from rllm.models.directory import load_model
from rllm.trainer.distribution import require_distributed

Ranks = Callable[..., list[dict[str, Any]]]
Require = Callable[..., None]
TOGETHER = json.dumps({"tensor_parallel": 2})
SHARD = json.dumps({"strategy": "shard"})
FEW = ("ppo", "critic", "muon", "lora", "lora of some layers by muon")


def test_two_ranks_with_half_of_every_layer_update_as_one_does(
    ranks: Ranks,
    recorded: ModuleType,
    require_all_well: Require,
    require_same: Require,
    made: Callable[[type[Any]], Path],
    tmp_path: Path,
) -> None:
    model = made(Qwen3Config)
    alone = {kind: recorded.trained(kind, model, ALONE, 1) for kind in FEW}
    require_all_well(ranks("recorded", [model, tmp_path / "updates", 1, TOGETHER, ",".join(FEW)], 2))
    require_same(alone, torch.load(tmp_path / "updates", weights_only=False))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_ranks"), [(Qwen3Config, 2), (Qwen2Config, 4)])
def test_any_number_of_layers_shared_by_two_update_as_one_does_for_twenty_steps(
    ranks: Ranks,
    recorded: ModuleType,
    require_all_well: Require,
    require_same: Require,
    made: Callable[[type[Any]], Path],
    tmp_path: Path,
    family: type[Any],
    num_ranks: int,
) -> None:
    model, kinds = made(family), [*recorded.KINDS, recorded.SOME_ADAPTERS, recorded.IN_FLOAT32]
    alone = {kind: recorded.trained(kind, model, ALONE, 20) for kind in kinds}
    words = [model, tmp_path / "updates", 20, TOGETHER, ",".join(kinds)]
    require_all_well(ranks("recorded", words, num_ranks))
    require_same(alone, torch.load(tmp_path / "updates", weights_only=False))


def test_layers_of_transformers_are_split_by_the_plan_that_it_has_of_them(
    ranks: Ranks,
    recorded: ModuleType,
    require_all_well: Require,
    require_same: Require,
    made: Callable[[type[Any]], Path],
    tmp_path: Path,
) -> None:
    """Of GPT-NeoX one matrix has queries, keys and values, and biases come behind a sum."""
    model, kinds = made(GPTNeoXConfig), ("ppo", "muon")
    alone = {kind: recorded.trained(kind, model, ALONE, 1) for kind in kinds}
    require_all_well(ranks("recorded", [model, tmp_path / "updates", 1, TOGETHER, ",".join(kinds)], 2))
    require_same(alone, torch.load(tmp_path / "updates", weights_only=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_ranks"), [(GPTNeoXConfig, 2), (Starcoder2Config, 4), (Gemma3TextConfig, 2)]
)
def test_layers_of_transformers_on_two_ranks_update_as_one_does_for_twenty_steps(
    ranks: Ranks,
    recorded: ModuleType,
    require_all_well: Require,
    require_same: Require,
    made: Callable[[type[Any]], Path],
    tmp_path: Path,
    family: type[Any],
    num_ranks: int,
) -> None:
    """Gemma 3 has norms of heads, whose gradients are summed, and computes norms in float32 whatever its
    weights are."""
    in_float32 = family is Gemma3TextConfig
    kinds = (recorded.IN_FLOAT32,) if in_float32 else ("ppo", "critic", "muon", "recomputed in chunks")
    model = made(family)
    alone = {kind: recorded.trained(kind, model, ALONE, 20) for kind in kinds}
    words = [model, tmp_path / "updates", 20, TOGETHER, ",".join(kinds)]
    require_all_well(ranks("recorded", words, num_ranks))
    require_same(alone, torch.load(tmp_path / "updates", weights_only=False))


def test_a_plan_that_leaves_out_a_weight_of_some_columns_is_found_before_any_update(
    ranks: Ranks, made: Callable[[type[Any]], Path], tmp_path: Path
) -> None:
    """Apertus has an activation with two weights of its own, of which its plan says nothing."""
    ended = ranks("recorded", [made(ApertusConfig), tmp_path / "updates", 1, TOGETHER, "ppo"], 2)
    assert {each["code"] for each in ended} == {2}
    assert "act_fn.alpha_p is off by 1" in ended[0]["errors"]


@pytest.mark.parametrize(
    ("family", "assignments", "why"),
    [
        (Phi3Config, [], r"phi3.*colwise_gather_output"),
        (GPTNeoXConfig, ["lora.rank=2"], "an adapter of .* is not split among processes"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused_before_any_work(
    made: Callable[[type[Any]], Path], family: type[Any], assignments: list[str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        _require(["distributed.tensor_parallel=2", f"model.path={made(family)}", *assignments], 2)


def test_an_adapter_of_layers_together_is_saved_as_that_of_one_process(
    ranks: Ranks,
    require_all_well: Require,
    moved: ModuleType,
    made: Callable[[type[Any]], Path],
    tmp_path: Path,
) -> None:
    """Checkpoint, adapter and merged model: the same files with the same tensors in them."""
    model, alone, run = made(Qwen3Config), tmp_path / "alone", tmp_path / "run"
    moved.main(model, alone, "lora", 2)
    require_all_well(ranks("moved", [model, run, "lora", 2, TOGETHER], 2))
    mine, theirs = moved.kept(alone, 2), moved.kept(run, 2)
    exported = "adapter/adapter_model.safetensors"
    mine, theirs = mine | load_file(alone / exported), theirs | load_file(run / exported)
    assert {name: (each.shape, each.dtype) for name, each in mine.items()} == {
        name: (each.shape, each.dtype) for name, each in theirs.items()
    }
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-10
    config = "adapter/adapter_config.json"
    assert (run / config).read_text() == (alone / config).read_text()
    merged, theirs_merged = (load_model(each / "model").model.state_dict_hf() for each in (alone, run))
    torch.testing.assert_close(merged, theirs_merged)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["critic", "muon", "lora"])
def test_a_run_moves_between_layers_together_shards_and_one_process(
    ranks: Ranks,
    require_all_well: Require,
    moved: ModuleType,
    made: Callable[[type[Any]], Path],
    tmp_path: Path,
    kind: str,
) -> None:
    model = made(Qwen2Config)
    moved.main(model, tmp_path / "alone", kind, 5)
    run, background = tmp_path / "moved", json.dumps({"keep": 9, "background": True})
    ways = [(2, TOGETHER), (1, "{}"), (4, TOGETHER), (2, SHARD), (2, TOGETHER)]
    for step, (num_ranks, spread) in enumerate(ways, 1):
        require_all_well(ranks("moved", [model, run, kind, step, spread, background], num_ranks))
    mine, theirs = moved.kept(tmp_path / "alone", 5), moved.kept(run, 5)
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-10


def test_what_cannot_be_split_is_refused(subtests: pytest.Subtests) -> None:
    for assignments, num_ranks, why in [
        ([], 3, r"`distributed.tensor_parallel`.*2.*3"),
        ([], 1, "and the number of processes 1; start"),
        (["distributed.strategy=shard"], 2, r"`distributed.strategy`.*'shard'"),
        (["distributed.tensor_parallel=3"], 3, r"4 heads.*divisor"),
        (["distributed.tensor_parallel=0"], 2, "must be at least 1"),
    ]:
        with (
            subtests.test(assignments=assignments, num_ranks=num_ranks, why=why),
            pytest.raises(ConfigError, match=why),
        ):
            _require(["distributed.tensor_parallel=2", *assignments], num_ranks)


def _require(assignments: list[str], num_ranks: int) -> None:
    config = load_config(assignments)
    config.distributed.require_ranks(num_ranks)
    require_distributed(config, num_ranks, is_program=False)
