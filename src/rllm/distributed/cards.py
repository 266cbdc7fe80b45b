"""The card, a GPU, that each rank of a machine computes on, and what ranks speak through there.

    `model.device` cuda, LOCAL_RANK 1 ──► cuda:1, for the trainer and the sampler of the rank
    tensors on cards go over NCCL; tensors and objects of the CPU over gloo, as in a run without cards

Nobody has run it on cards yet.
"""

from rllm.errors import ConfigError

GLOO, GLOO_AND_NCCL = "gloo", "cpu:gloo,cuda:nccl"


def backend_of(card: int | None) -> str:
    """The backend of torch.distributed for ranks on the CPU, or on cards."""
    return GLOO if card is None else GLOO_AND_NCCL


def is_on_cards(device: str) -> bool:
    """Whether `model.device` names a GPU."""
    return device.startswith("cuda")


def require_cards(device: str, num_local: int, num_cards: int) -> None:
    """Raises ConfigError where a machine with `num_cards` cannot give one to each of `num_local` ranks."""
    mend = "or leave --nproc out (with torchrun: --nproc-per-node 1)."
    if device == "cpu":
        return
    if device != "cuda":
        raise ConfigError(
            f"`model.device` is {device!r}, and of several processes each has a card of its own: set it to "
            f"cuda, which is one card for each, or to cpu, {mend}"
        )
    if num_cards == 0:
        raise ConfigError(
            f"`model.device` is 'cuda', for {num_local} processes on this machine, and torch sees no card "
            f"here: set it to cpu, {mend}"
        )
    if num_local > num_cards:
        raise ConfigError(
            f"`model.device` is 'cuda', and this machine has {num_cards} cards for {num_local} processes, of "
            f"which each needs one of its own: start {num_cards} here, {mend}"
        )


def card_of_rank(device: str, local_rank: int | None, num_local: int, num_cards: int) -> int | None:
    """The number of this rank's card; None on the CPU. Raises ConfigError as `require_cards` does."""
    require_cards(device, num_local, num_cards)
    if not is_on_cards(device):
        return None
    if local_rank is None or not 0 <= local_rank < num_local:
        rank_text = "not set" if local_rank is None else local_rank
        raise ConfigError(
            f"LOCAL_RANK is {rank_text} and LOCAL_WORLD_SIZE {num_local}; the one says which card of its "
            "machine a process has, of as many as the other: start the run with `rllm train NAME --nproc N` "
            "or torchrun, which set both."
        )
    return local_rank
