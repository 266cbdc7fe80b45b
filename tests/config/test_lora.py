"""`[lora]` and the keys of a policy that stand in for it; docs/lora.md."""

import re
import tomllib
from pathlib import Path

import pytest

from rllm.config import config_dict, load_config
from rllm.config.lora import LoraConfig
from rllm.errors import ConfigError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lora.md").read_text()
TWO = ["policies.a.trainable=true", "policies.b.trainable=true"]


def test_every_block_of_the_page_is_a_configuration() -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    alone, in_four_bits, several = (load_config(tomllib.loads(block)) for block in blocks)
    assert alone.lora == LoraConfig(rank=8, targets=["q_proj", "v_proj"])
    assert (in_four_bits.lora.rank, in_four_bits.lora.base_dtype) == (16, "nf4")
    assert {name: several.adapter_of(name).rank for name in several.policies} == {
        "solver": 8,
        "judge": 4,
        "referee": 0,
    }


def test_a_policy_takes_what_it_does_not_say_from_the_section() -> None:
    config = load_config(
        [*TWO, "lora.rank=8", "lora.alpha=16", 'lora.targets=["q_proj"]', "policies.b.lora_rank=2"]
    )
    assert config.adapter_of("a") == LoraConfig(rank=8, alpha=16.0, targets=["q_proj"])
    assert config.adapter_of("b") == LoraConfig(rank=2, alpha=16.0, targets=["q_proj"])
    own = ["policies.b.lora_alpha=4", 'policies.b.lora_targets=["v_proj"]']
    assert load_config(config, own).adapter_of("b") == LoraConfig(rank=2, alpha=4.0, targets=["v_proj"])
    assert load_config(config_dict(config)) == config
    assert load_config().adapter_of("policy").rank == 0


def test_what_no_adapter_can_be_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for assignments, named in [
        (["lora.rank=-1"], r"`lora\.rank`.*-1.*0"),
        (["lora.rank=2.5"], r"`lora\.rank`.*2\.5"),
        (["lora.rank=8", "lora.alpha=0"], r"`lora\.alpha` is 0\.0"),
        (["lora.rank=8", "lora.alpha=nan"], r"`lora\.alpha` is nan"),
        (["lora.rank=8", "lora.dropout=0.1"], r"`lora\.dropout`.*0\.1"),
        (["lora.rank=8", "lora.targets=q_proj"], r"`lora\.targets`.*'q_proj'"),
        (["lora.rank=8", 'lora.targets=["q_proj", "q_proj"]'], r"list each name of a linear layer once"),
        (["lora.rank=8", "lora.targets=[3]"], r"`lora\.targets` is \[3\]"),
        (["lora.alpha=16"], r"`lora\.alpha`.*16\.0.*nothing.*no adapter"),
        (['lora.targets=["q_proj"]'], r"`lora\.targets` is .* no adapter"),
        ([*TWO, "policies.a.lora_rank=-2"], r"`policies\.a\.lora_rank` is -2"),
        ([*TWO, "policies.a.lora_alpha=4"], r"`policies\.a\.lora_alpha`.*4\.0.*no adapter"),
        ([*TWO, "policies.a.trainable=false", "policies.a.lora_rank=4"], "but the policy is frozen"),
        (
            [*TWO, "lora.rank=8", "policies.a.lora_rank=4", "policies.b.lora_rank=0"],
            r"`lora\.rank`.*8",
        ),
    ]:
        with subtests.test(assignments=assignments, named=named), pytest.raises(ConfigError, match=named):
            load_config(assignments)
