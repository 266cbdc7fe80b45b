"""After each publish: does the sampler serve what the trainer has?

One recorded row is scored on both sides. The trainer's forward pass and the sampler's cached one must agree,
and where the trainer's log-probabilities moved, the sampler's must have moved alike. A publish that did
nothing, a stale cache or an adapter that never arrived fails the first check that follows it.
"""

import numpy as np

from rllm.errors import CanaryError
from rllm.inference.local.client import LocalClient
from rllm.trainer.backends.base import TrainingBackend
from rllm.types.sample import TrainingSample

TOLERANCE = 1e-3
"""Nats. In float32 the two passes differ by about 1e-5; other weights differ by far more."""
HALF_TOLERANCE = 0.25
"""The same for weights in bfloat16, whose passes differ by up to 0.06 on small models."""


class Canary:
    """Remembers what the sampler said about its row, to see it move."""

    def __init__(self) -> None:
        self._sample: TrainingSample | None = None
        self._sampler_before: np.ndarray | None = None
        self._trainer_before: np.ndarray | None = None

    async def check(
        self, backend: TrainingBackend, client: LocalClient, sample: TrainingSample
    ) -> dict[str, float]:
        """The gap, and how far the sampler moved, in nats.

        Raises CanaryError when sampler and trainer disagree. The row is `sample` on the first call and stays
        the same after it.
        """
        row = self._sample = self._sample or sample
        first = int(np.flatnonzero(row.trainable_T)[0])
        trained = row.trainable_T[first:]
        sampler = np.array(await client.score(row.token_ids_T.tolist(), first, row.temperature))[trained]
        trainer = backend.score([row])[0][first:][trained].astype(np.float64)
        gap = float(np.abs(sampler - trainer).max())
        limit = HALF_TOLERANCE if backend.is_half else TOLERANCE
        if not gap <= limit:
            raise CanaryError(
                f"After publishing policy version {backend.policy_version}, the sampler's log-probabilities "
                f"differ from the trainer's by up to {gap:.2g} nats (limit {limit:g}): it does not serve "
                "the published weights."
            )
        moved = 0.0
        if self._sampler_before is not None and self._trainer_before is not None:
            moved = float(np.abs(sampler - self._sampler_before).max())
            if moved == 0.0 and float(np.abs(trainer - self._trainer_before).max()) > 0.0:
                raise CanaryError(
                    f"Policy version {backend.policy_version} was published, the trainer's log-probabilities "
                    "moved and the sampler's did not: the publish had no effect."
                )
        self._sampler_before, self._trainer_before = sampler, trainer
        return {"canary_gap": gap, "canary_moved": moved}
