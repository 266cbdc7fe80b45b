"""What a run on several processes refuses, because nobody has shown yet that it does it right."""

from rllm.config.schema import LOCAL, TrainConfig
from rllm.errors import ConfigError


def require_distributed(config: TrainConfig, num_ranks: int, *, is_program: bool) -> None:
    """Raises ConfigError, with the mend, for the first thing that several processes cannot honour."""
    mend = "or leave --nproc out (with torchrun: --nproc-per-node 1)."
    if config.backend != LOCAL:
        raise ConfigError(
            f"`backend` is {config.backend!r}, and updates are shared among {num_ranks} processes by the "
            f"backend `{LOCAL}` alone; set it to that, {mend}"
        )
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
