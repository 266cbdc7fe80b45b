"""`[distributed]`: a run on several processes."""

from dataclasses import dataclass

from rllm.config.limits import at_least, one_of, positive
from rllm.errors import ConfigError

SHARD = "shard"
HERE = "here"
PLACEMENTS = (HERE, "pack", "strict_pack", "spread", "strict_spread")


@dataclass(kw_only=True, slots=True)
class DistributedConfig:
    strategy: str = "replicate"
    """The part that each of several processes holds of the trained weights, their gradients and the
    optimizer's state: `replicate`, all of it; `shard`, a part of each layer (FSDP2)."""
    shard_size: int = 0
    """Processes that share one copy under `shard`; those beyond hold further copies. 0: all processes."""
    offload: bool = False
    """Keep the parts that `shard` makes (weights that learn, their gradients, the optimizer's state) in the
    memory of the CPU, where AdamW moves them; a layer is on its GPU while it is computed."""
    tensor_parallel: int = 1
    """Processes that compute every layer together, each some of its heads and columns; those beyond do so
    with other rows."""
    timeout_s: float = 600.0
    """Seconds that one process may work on one thing, such as a turn of an episode or a micro-batch, without
    a sign of life before all of them end."""
    restarts: int = 0
    """Times that `--nproc` starts all processes again, from the last checkpoint, after one of them was
    killed, hung or failed."""

    placement: str = HERE
    """Where `--nproc` starts the processes: `here`, on this machine; otherwise as actors in a placement group
    of the cluster of `cluster.kind`, each with `threads` cores: `pack`, on as few nodes as it can,
    `strict_pack`, on one, `spread`, on as many as it can, `strict_spread`, on one each."""

    def validate(self) -> None:
        one_of("distributed.placement", self.placement, PLACEMENTS)
        one_of("distributed.strategy", self.strategy, ("replicate", SHARD))
        at_least("distributed.shard_size", self.shard_size, 0)
        if self.shard_size and self.strategy != SHARD:
            raise ConfigError(
                f"`distributed.shard_size` is {self.shard_size} but `distributed.strategy` is "
                f"{self.strategy!r}; set the latter to shard, or leave the former at 0."
            )
        if self.offload and self.strategy != SHARD:
            raise ConfigError(
                f"`distributed.offload` is true and `distributed.strategy` is {self.strategy!r}; what it "
                "keeps on the CPU are the parts of shard: set the latter to that, or the former to false."
            )
        at_least("distributed.tensor_parallel", self.tensor_parallel, 1)
        if self.tensor_parallel > 1 and self.strategy == SHARD:
            raise ConfigError(
                f"`distributed.tensor_parallel` is {self.tensor_parallel} and `distributed.strategy` is "
                f"{SHARD!r}; nobody has joined the two yet: leave one of them out."
            )
        positive("distributed.timeout_s", self.timeout_s)
        at_least("distributed.restarts", self.restarts, 0)

    def require_ranks(self, num_ranks: int) -> None:
        """Raises ConfigError for a number of processes that the keys do not fit."""
        self.ranks_of_a_copy(num_ranks)
        self.ranks_of_a_layer(num_ranks)
        if self.placement != HERE and num_ranks == 1:
            raise ConfigError(
                f"`distributed.placement` is {self.placement!r}, and there is one process, which nobody "
                "places: start several with --nproc, or leave the key out."
            )
        if self.restarts and num_ranks == 1:
            raise ConfigError(
                f"`distributed.restarts` is {self.restarts}, and there is one process, which nobody starts "
                "again: start several with --nproc, or leave the key out."
            )

    def ranks_of_a_layer(self, num_ranks: int) -> int:
        """Those of `num_ranks` processes that compute every layer together.

        Raises ConfigError for a number of processes that is no multiple of `tensor_parallel`.
        """
        if num_ranks % self.tensor_parallel:
            raise ConfigError(
                f"`distributed.tensor_parallel` is {self.tensor_parallel}, and the number of processes "
                f"{num_ranks}; start a multiple of it with --nproc or torchrun, or leave the key out: a run "
                "goes on either way."
            )
        return self.tensor_parallel

    def ranks_of_a_copy(self, num_ranks: int) -> int:
        """Those of `num_ranks` processes that hold one copy of what is trained between them.

        Raises ConfigError for a number of processes that `strategy` and `shard_size` do not fit.
        """
        if self.strategy != SHARD:
            return 1
        if num_ranks == 1:
            raise ConfigError(
                "`distributed.strategy` is 'shard', and there is one process: start several with --nproc or "
                "torchrun, or leave the key out; a run goes on either way."
            )
        size = self.shard_size or num_ranks
        if size < 2 or num_ranks % size:
            raise ConfigError(
                f"`distributed.shard_size` is {size}, and there are {num_ranks} processes; it must be 2 or "
                f"more, and {num_ranks} a multiple of it. 0 shares one copy among all."
            )
        return size
