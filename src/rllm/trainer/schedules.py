"""The quantities that change from step to step, as functions of the step: a resumed run needs no state of
theirs."""

import math

from rllm.config.optimizer import OptimizerConfig
from rllm.config.schema import TrainConfig


def learning_rate(config: TrainConfig, step: int, peak: float = 0.0) -> float:
    """The rate of a reinforcement-learning step; `peak` 0 is `optimizer.learning_rate`."""
    return learning_rate_at(config.optimizer, step, config.steps, peak)


def learning_rate_at(optimizer: OptimizerConfig, step: int, total: int, peak: float = 0.0) -> float:
    """Linear warm-up towards `peak`; behind it `optimizer.schedule`, which falls from the first of `total`
    steps to the last."""
    peak = peak or optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / (optimizer.warmup_steps + 1)
    if optimizer.schedule == "constant":
        return peak
    fall = linear if optimizer.schedule == "linear" else cosine
    return fall(peak, step, total, optimizer.final_lr_fraction)


def temperature(config: TrainConfig, step: int) -> float:
    """The sampling temperature of a reinforcement-learning step."""
    first = config.rollout.temperature
    return linear(first, step, config.steps, (config.rollout.final_temperature or first) / first)


def linear(peak: float, step: int, total: int, final_fraction: float) -> float:
    """From `peak` at the first of `total` steps to `final_fraction` of it at the last."""
    return peak * (1.0 - (1.0 - final_fraction) * step / max(1, total - 1))


def cosine(peak: float, step: int, total: int, final_fraction: float) -> float:
    """The same along half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, one cycle)."""
    decay = 0.5 * (1.0 - math.cos(math.pi * step / max(1, total - 1)))
    return peak * (1.0 - (1.0 - final_fraction) * decay)
