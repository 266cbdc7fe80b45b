"""What a run on several processes refuses, because nobody has shown yet that it does it right."""

from rllm.config.distributed import SHARD
from rllm.config.schema import LOCAL, TrainConfig
from rllm.errors import ConfigError
from rllm.trainer.backends.named import backend_kind


def require_distributed(config: TrainConfig, num_ranks: int, *, is_program: bool) -> None:
    """Raises ConfigError, with the mend, for the first thing that several processes cannot honour."""
    mend = "or leave --nproc out (with torchrun: --nproc-per-node 1)."
    _require_backend(config, num_ranks, mend)
    if config.model.device != "cpu":
        raise ConfigError(
            f"`model.device` is {config.model.device!r}, and a run on {num_ranks} processes computes on the "
            f"CPU alone; set it to cpu, {mend}"
        )
    if config.distill.teacher:
        raise ConfigError(
            f"`distill.teacher` is {config.distill.teacher!r}; a run on {num_ranks} processes has no teacher "
            f"yet: leave it out, {mend}"
        )
    if is_program:
        raise ConfigError(
            f"A program is trained on one process, and there are {num_ranks}: train an agent or a workflow, "
            f"{mend}"
        )


def _require_backend(config: TrainConfig, num_ranks: int, mend: str) -> None:
    kind, distributed = backend_kind(config.backend), config.distributed
    if kind is None:
        return
    if not kind.shards:
        raise ConfigError(
            f"`backend` is {config.backend!r}, which does not share updates among {num_ranks} processes; "
            f"set it to {LOCAL}, {mend}"
        )
    if distributed.strategy != SHARD or distributed.shard_size not in (0, num_ranks):
        raise ConfigError(
            f"`backend` is {config.backend!r}, of which each of {num_ranks} processes holds a part: set "
            f"`distributed.strategy` to {SHARD} and leave `distributed.shard_size` out, {mend}"
        )
