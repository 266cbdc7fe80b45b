"""After each publish: does the sampler serve what the trainer has?

One recorded row is scored on both sides. The trainer's forward pass and the sampler's cached one must agree,
and where the trainer's log-probabilities moved, the sampler's must have moved alike. A publish that did
nothing, a stale cache or an adapter that never arrived fails the first check that follows it. The row and
what both sides said of it last are part of a checkpoint, so the first publish after a resume is checked too.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from rllm.errors import CanaryError
from rllm.rendering.images import IMAGES, ImageReader, as_data_url, image_of
from rllm.types.images import ImageFile, image_numbers
from rllm.types.sample import NOT_SAMPLED, TrainingSample

TOLERANCE = 1e-3
"""Nats. In float32 the two passes differ by about 1e-5; other weights differ by far more."""
HALF_TOLERANCE = 0.25
"""Mean gap of a row where one of the two computes in bfloat16. Single unlikely tokens are further apart: of
SmolLM2-135M-Instruct beside itself in float32 the mean is 0.03, and one token of 1,500 was 0.26 apart."""


class CanaryScorer(Protocol):
    """The part of a policy's sampler that a canary uses."""

    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        """Log-probabilities of `ids[start:]` under the sampler's weights."""
        ...


class CanaryTrainer(Protocol):
    """The part of a policy's learner that a canary uses."""

    @property
    def policy_version(self) -> int: ...

    @property
    def is_half(self) -> bool: ...

    def score(self, samples: Sequence[TrainingSample]) -> Sequence[np.ndarray]: ...


class Canary:
    """Remembers what the sampler said about its row, to see it move."""

    def __init__(self, temperature: float | None = None) -> None:
        """`temperature`: what rows are scored at, where the sampler knows no other; else the row's own."""
        self._temperature = temperature
        self._sample: TrainingSample | None = None
        self._sampler_before: np.ndarray | None = None
        self._trainer_before: np.ndarray | None = None
        self._images: list[ImageFile] = []
        """The images of the row."""

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps; empty before the first check."""
        row, sampler, trainer = self._sample, self._sampler_before, self._trainer_before
        if row is None or sampler is None or trainer is None:
            return {}
        images = [as_data_url(image) for image in self._images]
        return ({"images": images} if images else {}) | {
            "token_ids": row.token_ids_T.tolist(),
            "policy_versions": row.policy_versions_T.tolist(),
            "temperature": row.temperature,
            "sampler_logprobs": sampler.tolist(),
            "trainer_logprobs": trainer.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state` that is not empty."""
        self._sample = row_to_score(state["token_ids"], state["policy_versions"], state["temperature"])
        self._sampler_before = np.array(state["sampler_logprobs"])
        self._trainer_before = np.array(state["trainer_logprobs"])
        self._images = [image_of(url) for url in state.get("images", ())]

    async def check(
        self, backend: CanaryTrainer, client: CanaryScorer, samples: Sequence[TrainingSample]
    ) -> dict[str, float]:
        """The gap, and how far the sampler moved, in nats; nothing while no row has a token that was sampled.

        Raises CanaryError when sampler and trainer disagree. The row is the first of `samples` that has such
        a token, where a grammar forced all of others, and stays the same in later calls.
        """
        if self._sample is None:
            sample = next((each for each in samples if each.num_trainable), None)
            if sample is None:
                return {}
            temperature = sample.temperature if self._temperature is None else self._temperature
            self._sample = row_to_score(sample.token_ids_T, sample.policy_versions_T, temperature)
            self._images = [IMAGES.get(number) for number in image_numbers(sample.token_ids_T.tolist())]
        for image in self._images:  # the process forgets images that no other row has shown for long
            IMAGES.add(image)
        row = self._sample
        first = int(np.flatnonzero(row.trainable_T)[0])
        trained_mask = row.trainable_T[first:]
        sampler = np.array(await client.score(row.token_ids_T.tolist(), first, row.temperature))[trained_mask]
        trainer = backend.score([row])[0][first:][trained_mask].astype(np.float64)
        gaps = np.abs(sampler - trainer)
        gap = float(gaps.max())
        compared_gap, limit = (float(gaps.mean()), HALF_TOLERANCE) if backend.is_half else (gap, TOLERANCE)
        # `not <=`, because weights that are no numbers give NaN, which has to fail.
        if not compared_gap <= limit:
            kind = "by a mean of" if backend.is_half else "by up to"
            raise CanaryError(
                f"After publishing policy version {backend.policy_version}, the sampler's log-probabilities "
                f"differ from the trainer's {kind} {compared_gap:.2g} nats (limit {limit:g}): it does not "
                "serve the published weights."
            )
        max_change = 0.0
        if self._sampler_before is not None and self._trainer_before is not None:
            max_change = float(np.abs(sampler - self._sampler_before).max())
            # In bfloat16 a small update may round to nothing in every token of the row.
            least = HALF_TOLERANCE if backend.is_half else 0.0
            if max_change == 0.0 and float(np.abs(trainer - self._trainer_before).max()) > least:
                raise CanaryError(
                    f"Policy version {backend.policy_version} was published, the trainer's log-probabilities "
                    "moved and the sampler's did not: the publish had no effect."
                )
        self._sampler_before, self._trainer_before = sampler, trainer
        return {"canary_gap": gap, "canary_moved": max_change}


def row_to_score(
    token_ids: ArrayLike, policy_versions: ArrayLike | None = None, temperature: float = 1.0
) -> TrainingSample:
    """A row to be scored and never trained on; all of it was sampled, where no versions say otherwise."""
    nothing_T = np.zeros(np.shape(token_ids), dtype=np.float32)
    if policy_versions is None:
        policy_versions = np.zeros(np.shape(token_ids), dtype=np.int64)
    return TrainingSample(
        token_ids_T=np.array(token_ids, dtype=np.int64),
        policy_versions_T=np.array(policy_versions, dtype=np.int64),
        logprobs_T=nothing_T,
        advantages_T=nothing_T,
        group_key=("canary", ""),
        order_key=("canary", 0, 0, 0),
        temperature=temperature,
    )


def row_with_image(reader: ImageReader, ids: Sequence[int]) -> TrainingSample:
    """`ids` to be scored behind a picture, which a sampler has to scale and colour as the trainer does."""
    from PIL import Image  # whoever reads images has it

    y, x, colour = np.ogrid[:56, :80, :3]
    pixels = 127.5 * (1.0 + np.sin(x / 5 + colour) * np.cos(y / 7 - colour))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    picture = ImageFile(file.getvalue(), "image/png")
    IMAGES.add(picture)
    before = list(reader.ids(picture))
    return row_to_score([*before, *ids], [NOT_SAMPLED] * len(before) + [0] * len(ids))
