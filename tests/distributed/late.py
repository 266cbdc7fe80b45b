"""A rank 0 that has work left when the others are done, where silence is death much sooner than elsewhere.

python late.py SECONDS
"""

import time

from rllm.config.distributed import DistributedConfig
from rllm.distributed import heartbeat, open_ranks

SILENCE_S = 15.0


def main(seconds: str) -> None:
    heartbeat.DEAD_AFTER_S = SILENCE_S
    with open_ranks(DistributedConfig()) as ranks:
        ranks.beat("the last step")
        if ranks.is_writer:
            time.sleep(float(seconds))
