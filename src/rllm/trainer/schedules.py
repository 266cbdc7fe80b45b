"""What changes from step to step, as functions of the step: a resumed run needs no state of theirs."""

from rllm.config.schema import TrainConfig


def learning_rate(config: TrainConfig, step: int, peak: float = 0.0) -> float:
    """The rate of a reinforcement-learning step: linear warm-up to `peak` (0: `optimizer.learning_rate`),
    then linear decay to `final_lr_fraction` of it."""
    optimizer = config.optimizer
    peak = peak or optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / (optimizer.warmup_steps + 1)
    return linear(peak, step, config.steps, optimizer.final_lr_fraction)


def temperature(config: TrainConfig, step: int) -> float:
    """The sampling temperature of a reinforcement-learning step."""
    first = config.rollout.temperature
    return linear(first, step, config.steps, (config.rollout.final_temperature or first) / first)


def linear(peak: float, step: int, total: int, final_fraction: float) -> float:
    """From `peak` at the first of `total` steps to `final_fraction` of it at the last."""
    return peak * (1.0 - (1.0 - final_fraction) * step / max(1, total - 1))
