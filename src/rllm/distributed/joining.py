"""The way a process learns which rank of which run it is.

RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT ──► open_ranks ──► RankGroup      of one process: nothing to do
(set by --nproc of `rllm train`, or torchrun)          └──► TorchRanks      of several
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rllm.config.distributed import HERE, DistributedConfig
from rllm.distributed.cards import card_of_rank, is_on_cards
from rllm.distributed.group import ALONE, RankGroup
from rllm.distributed.heartbeat import end_process
from rllm.distributed.launch import STARTED_BY, launched_words
from rllm.errors import ConfigError

SET_BY_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun and `rllm train --nproc N` set in each rank's environment."""
LOOK_EVERY_S = 1.0
"""At whether the process that started this one is there."""


def world_size() -> int:
    """Ranks of the run that this process is of, 1 outside of any."""
    return _number("WORLD_SIZE", 1)


def rank_from_environment() -> int:
    """Which of them this process is; 0 outside of any run, whatever RANK says there."""
    return _number("RANK", 0) if world_size() > 1 else 0


def num_local_ranks(default: int) -> int:
    """Ranks on this machine; `default` where no launcher has said how many."""
    return _number("LOCAL_WORLD_SIZE", default)


def num_cards() -> int:
    """GPUs that torch sees on this machine."""
    from rllm.distributed import torch_ranks

    return torch_ranks.num_cards()


@contextmanager
def open_ranks(config: DistributedConfig, device: str = "cpu") -> Iterator[RankGroup]:
    """The group that this process belongs to, as its environment says; `device` is what `model.device` names
    for all of them.

    An error in the block reaches the other ranks with its cause. Raises ConfigError for an environment that
    is set by halves, for a number of ranks that cannot share what `config` wants them to, and for a machine
    that has not a card for each.
    """
    config.require_ranks(world_size())
    if config.restarts and not launched_words():
        raise ConfigError(
            f"`distributed.restarts` is {config.restarts}, and torchrun has started this process: leave "
            "it out, and give --max-restarts to torchrun, which alone can start it again."
        )
    if config.placement != HERE and not launched_words():
        raise ConfigError(
            f"`distributed.placement` is {config.placement!r}, and torchrun has started this process where "
            "it is: leave the key out, or start the run with `rllm train NAME --nproc N`, which places it."
        )
    shard_size = config.ranks_of_a_copy(world_size())
    tensor_size = config.ranks_of_a_layer(world_size())
    if world_size() == 1:
        with _ending_with_its_starter() if launched_words() else nullcontext():
            yield ALONE
        return
    if missing := [name for name in SET_BY_LAUNCHER if not os.environ.get(name)]:
        raise ConfigError(
            f"WORLD_SIZE is {world_size()}, but {', '.join(missing)} is not set; start the run with "
            "`rllm train NAME --nproc N` or torchrun, which set all of them, or unset WORLD_SIZE."
        )
    from rllm.distributed.torch_ranks import joined_ranks

    num_local = num_local_ranks(1)
    local_rank = _number("LOCAL_RANK", 0) if os.environ.get("LOCAL_RANK") else None
    card = card_of_rank(device, local_rank, num_local, num_cards() if is_on_cards(device) else 0)
    with (
        _ending_with_its_starter(),
        joined_ranks(
            config, num_local=num_local, shard_size=shard_size, tensor_size=tensor_size, card=card
        ) as ranks,
    ):
        yield ranks


@contextmanager
def _ending_with_its_starter() -> Iterator[None]:
    """End this process once the one that started it is gone, also while it waits for the other ranks to
    appear."""
    # The number that the starter gave: it may have ended by now, and then the parent is another process.
    starter, left = _number(STARTED_BY, os.getppid()), threading.Event()

    def look() -> None:
        while os.getppid() == starter:
            if left.wait(LOOK_EVERY_S):
                return
        end_process("The process that started this one is gone, so it ends as well.")

    threading.Thread(target=look, name="rllm-starter", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "") or str(default)
    if not text.isdecimal():
        raise ConfigError(f"The environment variable {name} is {text!r}; it must be a whole number.")
    return int(text)
