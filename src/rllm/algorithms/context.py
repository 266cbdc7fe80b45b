"""The facts of the run that an algorithm may read, beside the rewards or tokens that it computes with."""

from dataclasses import dataclass, field

from rllm.config.algorithm import AlgorithmConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class AlgorithmContext:
    """Where in a run an estimator or a loss is applied."""

    config: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The section `[algorithm]`."""
    step: int = 0
    """Step of reinforcement learning, from 0."""
    total_steps: int = 1
    """The number of steps of the run."""
    seed: int = 0
    """The seed of the run: whoever draws, draws from `draw_seed(seed, step, …)`."""

    @property
    def clip_low(self) -> float | None:
        """`algorithm.clip_low`; None where it is left to the loss."""
        return self.config.clip_low if self.config.clip_low >= 0.0 else None

    @property
    def clip_high(self) -> float | None:
        """`algorithm.clip_high`; None where it is left to the loss."""
        return self.config.clip_high if self.config.clip_high >= 0.0 else None
