"""What the expert of the warm start cannot be told is refused before a run begins."""

from pathlib import Path

import pytest

from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.errors import ConfigError


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "sigth=2",
            "`warm_start.expert_args.sigth`",
        ),
        ('sight="far"', "`sight` is 'far'"),
        ('strolls="often"', "`strolls` is 'often'"),
    ],
)
def test_what_the_expert_cannot_be_told_is_refused(tmp_path: Path, assignment: str, message: str) -> None:
    config = training_config("frozenlake", assignments=(f"warm_start.expert_args.{assignment}",))
    with pytest.raises(ConfigError, match=message):
        build_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
