"""Several processes that train one model: who they are, what they tell each other, how one of them ends."""

from rllm.distributed.group import ALONE, RankGroup
from rllm.distributed.joining import open_ranks, rank_from_environment, world_size

__all__ = ["ALONE", "RankGroup", "open_ranks", "rank_from_environment", "world_size"]
