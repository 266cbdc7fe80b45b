"""The five verbs of a training backend. Everything the loop wants of a learner, and nothing it could leak."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rllm.algorithms.losses import Loss
from rllm.types.sample import TrainingSample


class TrainingBackend(Protocol):
    """A policy that can be scored, updated, published, saved and loaded."""

    policy_version: int
    """Optimizer updates so far."""

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """One [T] array per sample: log-probability of each trainable token under the weights as they are,
        0 elsewhere."""
        ...

    def update(self, samples: Sequence[TrainingSample], loss: Loss, learning_rate: float) -> dict[str, float]:
        """One optimizer step on all samples; returns metrics.

        Raises NumericsError, before the weights change, when a loss or gradient is not finite.
        """
        ...

    def publish_weights(self) -> int:
        """Make the sampler serve the weights as they are; returns their policy version."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state into an existing directory."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError when it does not fit."""
        ...
