"""The interface of a learner, without anything that it could leak: the five verbs of a training backend,
those of a critic, and the keys of the configuration that a backend honours."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rllm.distributed import RankGroup
from rllm.errors import ConfigError
from rllm.types.sample import TrainingSample

if TYPE_CHECKING:
    from rllm.algorithms.losses import Loss


class TrainingBackend(Protocol):
    """A policy that can be scored, updated, published, saved and loaded."""

    policy_version: int
    """Optimizer updates so far."""

    @property
    def supports(self) -> frozenset[str]:
        """Keys of the configuration that it honours, as `section.key`; see `refuse_unsupported`."""
        ...

    @property
    def is_half(self) -> bool:
        """Whether it computes in 16 bits, so that log-probabilities of two passes may differ by a few
        hundredths of a nat."""
        ...

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """One [T] array per sample: log-probability of each trainable token under the weights as they are,
        0 elsewhere."""
        ...

    def update(
        self, samples: Sequence[TrainingSample], loss: "Loss", learning_rate: float
    ) -> dict[str, float]:
        """One optimizer step on all samples; returns metrics.

        Raises NumericsError, before the weights change, when a loss or gradient is not finite, or is too far
        above those before it; where such updates are to be skipped, `skipped_updates` is 1 instead.
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

    def reset_optimizer(self) -> None:
        """Forget the moments: the next phase optimises another objective."""
        ...


class Critic(Protocol):
    """Expectations of what will be paid, and how they are learned: a model of its own, or the policy's
    backend where they share a trunk."""

    def values(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """One [T] array per sample: the expectation before each trainable token, 0 elsewhere."""
        ...

    def update(
        self, samples: Sequence[TrainingSample], loss: "Loss", learning_rate: float
    ) -> dict[str, float]: ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


class Saveable(Protocol):
    """The source of a checkpoint: a learner, or a copy of its tensors."""

    def save(self, directory: Path) -> None: ...


@runtime_checkable
class Copyable(Protocol):
    """A learner whose tensors can be copied, so that a thread writes them while it goes on."""

    def snapshot(self, ranks: RankGroup) -> Saveable:
        """Its tensors as they are; ranks that hold parts of them speak through `ranks` as they save."""
        ...


class SeparateCritic(Critic, Protocol):
    """One with a trunk of its own."""

    def begin_with(self, model: Any) -> None:
        """Take over the weights of a model of the same kind, as far as it has them."""
        ...


def refuse_unsupported(section: str, values: Any, supports: frozenset[str], backend: str) -> None:
    """Raises ConfigError for the first key of `values`, a section's dataclass, that is not as it is by
    default and that `backend` would ignore."""
    defaults = type(values)()
    for each in fields(values):
        key, value = f"{section}.{each.name}", getattr(values, each.name)
        if key == "model.dtype" and values.number_type == defaults.number_type:
            continue  # said in other words
        if key not in supports and value != getattr(defaults, each.name):
            raise ConfigError(
                f"`{key}` is {value!r}, which the {backend} backend does not honour; leave it at "
                f"{getattr(defaults, each.name)!r}."
            )
