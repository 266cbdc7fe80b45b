"""Refusals of a run on several processes: features that nobody has shown to be right there yet."""

from rllm.config.distributed import SHARD
from rllm.config.schema import FROZEN, LOCAL, TrainConfig
from rllm.distributed.cards import is_on_cards, require_cards
from rllm.distributed.joining import num_cards, num_local_ranks
from rllm.errors import ConfigError
from rllm.trainer.backends.named import backend_kind


def require_distributed(config: TrainConfig, num_ranks: int, *, is_program: bool) -> None:
    """Raises ConfigError, with the mend, for the first thing that several processes cannot honour."""
    mend = "or leave --nproc out (with torchrun: --nproc-per-node 1)."
    _require_backend(config, num_ranks, mend)
    require_cards(
        config.model.device, num_local_ranks(num_ranks), num_cards() if config.model.device != "cpu" else 0
    )
    if config.distill.teacher:
        raise ConfigError(
            f"`distill.teacher` is {config.distill.teacher!r}; a run on {num_ranks} processes has no teacher "
            f"yet: leave it out, {mend}"
        )
    if config.schedule.steps_ahead:
        raise ConfigError(
            f"`schedule.max_staleness` is {config.schedule.max_staleness}, and a run on {num_ranks} "
            f"processes samples and learns in turn so far; set `schedule.kind` to sync, {mend}"
        )
    if config.inference.engine != "local":
        raise ConfigError(
            f"`inference.engine` is {config.inference.engine!r}, and a run on {num_ranks} processes samples "
            f"with the engine of each; set it to local, {mend}"
        )
    _require_parts(config)
    if is_program:
        _require_signs_of_life(config)


def _require_signs_of_life(config: TrainConfig) -> None:
    """A program is heard of when the model has answered it, when it ends or is judged, and not between."""
    silent_s = config.rollout.episode_timeout_s + config.rollout.step_timeout_s
    if config.distributed.timeout_s <= silent_s:
        raise ConfigError(
            f"`distributed.timeout_s` is {config.distributed.timeout_s:g}, and a process whose programs may "
            f"run for `rollout.episode_timeout_s` and be judged for `rollout.step_timeout_s` may be silent "
            f"for that long: set it to more than {silent_s:g}, or these to less."
        )


def _require_parts(config: TrainConfig) -> None:
    """Whether processes can compute the layers of every model together, and move a part of each matrix."""
    num_parts = config.distributed.tensor_parallel
    looks_at = {
        "adafactor": "whole rows and columns of a matrix",
        "adamw8bit": "blocks of 256 entries of a matrix",
    }
    optimizer = config.optimizer.name
    if optimizer in looks_at and (num_parts > 1 or config.distributed.strategy == SHARD):
        raise ConfigError(
            f"`optimizer.name` is '{optimizer}', which looks at {looks_at[optimizer]}, and each process "
            "would have a part: set it to adamw or muon, or `distributed.strategy` to replicate and "
            "`distributed.tensor_parallel` to 1."
        )
    if config.distributed.offload:
        _require_offload(config)
    if config.distributed.strategy == SHARD and config.model.vision != FROZEN:
        # Ranks gather a layer together, and each would go through the tower as often as it has images.
        raise ConfigError(
            f"`model.vision` is {config.model.vision!r}, and with `distributed.strategy` = shard processes "
            f"gather layers in step, whatever images each has: set it to {FROZEN}, or that to replicate."
        )
    if num_parts == 1:
        return
    if config.lora.base_dtype != "auto":
        raise ConfigError(
            f'`lora.base_dtype` is "{config.lora.base_dtype}", which has blocks of weights across the parts '
            f"that {num_parts} processes would have (`distributed.tensor_parallel`); set it to auto, or that "
            "to 1."
        )
    from rllm.models.directory import reads_images
    from rllm.trainer.memory_plan import initial_config, shape_of

    for name, policy in config.named_policies.items():
        if reads_images(initial_config(policy.path)):
            raise ConfigError(
                f"`distributed.tensor_parallel` is {num_parts}, and {policy.path} reads images, which is not "
                "split among processes; leave it out, or set `distributed.strategy` to shard instead."
            )
        if (shape := shape_of(policy.path)) is not None:
            shape.part(num_parts)
        elif config.adapter_of(name).rank:
            raise ConfigError(
                f"`distributed.tensor_parallel` is {num_parts}, and an adapter of {policy.path}, which "
                "transformers computes, is not split among processes; leave it out, or set "
                "`distributed.strategy` to shard instead, which spreads every model."
            )
        else:
            from rllm.trainer.backends.torch_plans import require_plan

            require_plan(policy.path, num_parts)


def _require_offload(config: TrainConfig) -> None:
    """Raises ConfigError where there is nothing to move to the CPU, or what moves weights would not be exact
    there."""
    if not is_on_cards(config.model.device):
        raise ConfigError(
            f"`distributed.offload` is true and `model.device` is {config.model.device!r}: shards are in the "
            "memory of the CPU already, so it would save nothing. Set the latter to cuda, or leave the key "
            "out."
        )
    if config.optimizer.name != "adamw":
        raise ConfigError(
            f"`distributed.offload` is true and `optimizer.name` is {config.optimizer.name!r}, which looks "
            "at whole matrices, and each process would have rows of them on the CPU: set it to adamw, or "
            "leave the key out."
        )


def _require_backend(config: TrainConfig, num_ranks: int, mend: str) -> None:
    kind, distributed = backend_kind(config.backend), config.distributed
    if kind is None:
        return
    if config.model.device != "cpu":
        raise ConfigError(
            f"`model.device` is {config.model.device!r}, and {num_ranks} processes of `backend` "
            f"{config.backend!r} compute on the CPU; set it to cpu, {mend}"
        )
    if not kind.shards:
        raise ConfigError(
            f"`backend` is {config.backend!r}, which does not share updates among {num_ranks} processes; "
            f"set it to {LOCAL}, {mend}"
        )
    if distributed.tensor_parallel > 1:
        raise ConfigError(
            f"`distributed.tensor_parallel` is {distributed.tensor_parallel}, and `backend` is "
            f"{config.backend!r}; set it to {LOCAL}, or leave the key out."
        )
    if distributed.strategy != SHARD or distributed.shard_size not in (0, num_ranks):
        raise ConfigError(
            f"`backend` is {config.backend!r}, of which each of {num_ranks} processes holds a part: set "
            f"`distributed.strategy` to {SHARD} and leave `distributed.shard_size` out, {mend}"
        )
