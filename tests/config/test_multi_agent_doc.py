"""docs/multi_agent.md: its TOML loads, and says the defaults where it says so."""

import re
import tomllib
from pathlib import Path

from rllm.config import load_config
from rllm.config.policies import TruncationConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "multi_agent.md").read_text()
BLOCKS = [
    tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
]


def test_every_block_is_a_configuration() -> None:
    policies, truncation = (load_config(block) for block in BLOCKS)
    assert policies.policy_of("judge") == "referee"
    assert policies.policy_of("solver") == "solver"
    assert truncation.rollout.truncation == TruncationConfig()
