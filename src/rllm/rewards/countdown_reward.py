"""The module that published programs import `compute_score` from; its home is `rllm.rewards.countdown`."""

from rllm.rewards.countdown import compute_score

__all__ = ["compute_score"]
