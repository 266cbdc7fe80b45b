"""Which backends of others share a run among several processes; needs none of their libraries."""

import pytest

from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.trainer.distribution import require_distributed


def test_verl_does_where_each_process_holds_a_part() -> None:
    config = load_config(["backend=verl", "distributed.strategy=shard"])
    require_distributed(config, 2, is_program=False)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (("backend=verl",), "set `distributed.strategy` to shard"),
        (
            ("backend=verl", "distributed.strategy=shard", "distributed.shard_size=2"),
            "`distributed.shard_size` out",
        ),
        (("backend=tinker",), "does not share updates among 4 processes"),
    ],
)
def test_what_is_not_shared_is_refused(assignments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        require_distributed(load_config(assignments), 4, is_program=False)
    assert message in str(refusal.value)
