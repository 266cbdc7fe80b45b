"""The guard between a bad gradient and the weights.

    micro-batch ─► loss finite?  ──no──┐
    all of them ─► norm finite? not too far above the running one? ──no──┴─► bad: stop, or skip the update

Either way the message names tokens: those whose terms are no numbers, else those that pull hardest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.distributed import ALONE, RankGroup
from rllm.models.batching import PackedBatch
from rllm.types.sample import TrainingSample

NUM_NAMED = 3
MEMORY = 0.9
"""Share of the running norm that stays at each update: it looks back about ten."""
MIN_UPDATES = 5
"""Norms that the running one needs before anything is compared with it."""


@dataclass(slots=True)
class RunningNorm:
    """Mean of the gradient norms so far, the latest counting most."""

    mean: float = 0.0
    count: int = 0

    def limit(self, factor: float) -> float:
        """The norm that the next gradient may have."""
        has_mean = self.count >= MIN_UPDATES and self.mean > 0.0
        return factor * self.mean if factor > 0.0 and has_mean else math.inf

    def add(self, norm: float, factor: float) -> None:
        """A norm above the limit counts as the limit: a single one moves little, a lasting rise is
        followed."""
        norm = min(norm, self.limit(factor))
        # The plain mean at first: a fixed share would hold on to the 0 it began with for about ten updates.
        keep = min(MEMORY, self.count / (self.count + 1))
        self.mean = keep * self.mean + (1.0 - keep) * norm
        self.count += 1


@dataclass(slots=True)
class Blame:
    """The pull of each token on an update: remembered until the gradient's norm is known."""

    samples: Sequence[TrainingSample]
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64], Tensor]] = field(
        default_factory=list[tuple[NDArray[np.int64], NDArray[np.int64], Tensor]]
    )

    def add(self, batch: PackedBatch, *outputs_M: Tensor | None) -> None:
        """After the backward pass through `outputs_M`, which kept their gradients."""
        pulls = [each.grad.abs() for each in outputs_M if each is not None and each.grad is not None]
        if pulls:
            self.parts.append((batch.row_M, batch.place_M, torch.stack(pulls).amax(dim=0)))

    def hardest(self, ranks: RankGroup = ALONE) -> str:
        """The tokens with the largest gradients on any of `ranks`, those that are no numbers first."""
        # The empty columns are for a rank without rows: it takes part in the gather all the same.
        pulls = torch.cat([torch.zeros(0), *(pulls_M.float().cpu() for _, _, pulls_M in self.parts)]).numpy()
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *(row_M for row_M, _, _ in self.parts)])
        places = np.concatenate([np.zeros(0, dtype=np.int64), *(place_M for _, place_M, _ in self.parts)])
        first = _hardest(pulls)
        of_ranks = ranks.gather((pulls[first], rows[first], places[first]))
        pulls, rows, places = (np.concatenate(each) for each in zip(*of_ranks, strict=True))
        order = _hardest(pulls)
        return named_tokens(self.samples, rows[order], places[order])


def _hardest(pulls: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.argsort(np.where(np.isfinite(pulls), -pulls, -np.inf), kind="stable")[:NUM_NAMED]


def tokens_that_are_no_numbers(batch: PackedBatch, samples: Sequence[TrainingSample], terms_M: Tensor) -> str:
    """The first few trained tokens of a micro-batch with such terms."""
    bad = torch.nonzero(~torch.isfinite(terms_M.detach())).flatten().cpu().numpy()[:NUM_NAMED]
    if not len(bad):
        return "no single token: the weighted sum overflowed"
    return named_tokens(samples, batch.row_M[bad], batch.place_M[bad])


def named_tokens(
    samples: Sequence[TrainingSample], rows: NDArray[np.int64], places: NDArray[np.int64]
) -> str:
    """`token 7 (id 31) of (task, attempt, trajectory, segment); …`."""
    return "; ".join(
        f"token {place} (id {int(samples[row].token_ids_T[place])}) of {samples[row].order_key}"
        for row, place in zip(rows.tolist(), places.tolist(), strict=True)
    )
