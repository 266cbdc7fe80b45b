"""Numbers of each sampled token that a step computed, for those who look at them.

    updates ──► TokenTrace, by row ──┐
    rows, their final advantages ────┴──► by episode: [3, N] advantage, importance ratio, entropy ──► store

N are the sampled tokens of an episode, trajectory after trajectory. A number that nobody computed is NaN:
rows whose advantage is 0 have no forward pass in an update, and a service tells of no token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rllm.store.episodes import TOKEN_COLUMNS
from rllm.types.episode import Episode
from rllm.types.sample import TrainingSample

OrderKey = tuple[str, int, int, int]
"""(task_id, attempt, trajectory, segment) of a row."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenNumbers:
    """Numbers of the M trained tokens of a micro-batch."""

    row_M: NDArray[np.int64]
    """Which of the update's samples each belongs to."""
    place_M: NDArray[np.int64]
    """Where it stands in it."""
    ratio_M: NDArray[np.float32]
    """π(token) in the update over π(token) before the step's first one."""
    entropy_M: NDArray[np.float32]
    """In nats, where the token was sampled."""


@dataclass(kw_only=True, slots=True)
class TokenTrace:
    """Ratios and entropies of the updates of one step, by row."""

    rows: dict[OrderKey, NDArray[np.float32]] = field(default_factory=dict[OrderKey, NDArray[np.float32]])
    """[2, T] each."""

    def add(self, samples: Sequence[TrainingSample], parts: Sequence[TokenNumbers]) -> None:
        for part in parts:
            order = np.argsort(part.row_M, kind="stable")
            ends = np.flatnonzero(np.diff(part.row_M[order])) + 1
            for among_M in np.split(order, ends) if len(order) else ():
                sample = samples[int(part.row_M[among_M[0]])]
                if sample.order_key not in self.rows:
                    self.rows[sample.order_key] = np.full((2, sample.num_tokens), np.nan, dtype=np.float32)
                both_T, places = self.rows[sample.order_key], part.place_M[among_M]
                both_T[0, places], both_T[1, places] = part.ratio_M[among_M], part.entropy_M[among_M]


@runtime_checkable
class Traceable(Protocol):
    """A backend that can say what it computed of each token."""

    trace: TokenTrace | None
    """Where updates write it; None where nobody looks."""


def numbers_of_episodes(
    episodes: Sequence[Episode], samples: Sequence[TrainingSample], trace: TokenTrace
) -> Iterator[tuple[str, int, NDArray[np.float32]]]:
    """(task_id, attempt, [3, N]) of each episode that something was trained on; see TOKEN_COLUMNS."""
    samples_of: dict[tuple[str, int], list[TrainingSample]] = {}
    for sample in samples:
        samples_of.setdefault(sample.order_key[:2], []).append(sample)
    for episode in episodes:
        if mine := samples_of.get((episode.task_id, episode.rollout_idx)):
            yield episode.task_id, episode.rollout_idx, _numbers(_begins(episode), mine, trace.rows)


def _begins(episode: Episode) -> list[list[int]]:
    """By trajectory and step: which of the episode's sampled tokens is its first; the last entry is all."""
    begins: list[list[int]] = []
    total = 0
    for trajectory in episode.trajectories:
        begins.append([])
        for step in trajectory.steps:
            begins[-1].append(total)
            total += len(step.response_ids)
    return [*begins, [total]]


def _numbers(
    begins: Sequence[Sequence[int]],
    samples: Sequence[TrainingSample],
    rows: Mapping[OrderKey, NDArray[np.float32]],
) -> NDArray[np.float32]:
    numbers_3_N = np.full((len(TOKEN_COLUMNS), begins[-1][0]), np.nan, dtype=np.float32)
    for sample in samples:
        both_T: Any = rows.get(sample.order_key)
        is_trained_T = sample.trainable_T
        advantages_T = np.where(is_trained_T, sample.advantages_T, np.nan)
        for turn, start, length in sample.turns:
            first = begins[sample.order_key[2]][turn]
            here, there = slice(start, start + length), slice(first, first + length)
            numbers_3_N[0, there] = advantages_T[here]
            if both_T is not None:
                numbers_3_N[1:, there] = both_T[:, here]
    return numbers_3_N
