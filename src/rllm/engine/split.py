"""Engines of several ranks, all of which get every episode.

    tasks ──► named by their place ──► share of this rank ──► engine ──► episodes, the store's bytes ──┐
                                                                                                    gather
    every episode, the same on all ranks: own ones as they are, those of others read from bytes ◄──────┘

    SplitEngine     each rank plays its share, all attempts at a task on one rank, where they share its prompt
    WriterEngine    rank 0 has the only engine, such as the workers of a cluster

What an attempt draws is a function of its task's id, so it plays alike on whichever rank it is.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import fields, replace
from typing import Any

from rllm.distributed import RankGroup
from rllm.engine.attempts import EpisodeCounts, EpisodeEngine, attempts_at
from rllm.engine.settings import task_list
from rllm.store.encoding import EncodedEpisode, EncodedEpisodes
from rllm.types.episode import Episode
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId, with_id

LOOK_EVERY_S = 1.0
"""At what the engine has done, to tell the other ranks that this one works on."""
PlayedEpisode = tuple[Episode, EncodedEpisode]


class SplitEngine:
    """An `EpisodeEngine` that is one on each of `ranks`."""

    def __init__(
        self, engine: EpisodeEngine, ranks: RankGroup, encodings: EncodedEpisodes | None = None
    ) -> None:
        """`encodings` is given the rows of every episode, where this rank stores them."""
        self._engine, self._ranks = engine, ranks
        self._encodings = encodings if ranks.is_writer else None
        self._of_others: list[EpisodeCounts] = []
        """As they were when the last episodes were gathered."""

    @property
    def counts(self) -> EpisodeCounts:
        """Counts of all ranks; those of the others as of the end of the last `run`."""
        # Copied, or the numbers of the others would be added to the engine's own.
        total = replace(self._engine.counts, by_outcome=dict(self._engine.counts.by_outcome))
        for other in self._of_others:
            for each in fields(EpisodeCounts):
                if each.name != "by_outcome":
                    setattr(total, each.name, getattr(total, each.name) + getattr(other, each.name))
            for outcome, count in other.by_outcome.items():
                total.by_outcome[outcome] += count
        return total

    def live(self) -> Sequence[Any]:
        """The attempts that this rank has under way."""
        return self._engine.live()

    async def run(
        self,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
        skip: Collection[EpisodeId] = (),
    ) -> AsyncGenerator[Episode, None]:
        """Every episode of every rank, once all ranks have played theirs."""
        tasks = task_list(tasks)
        # Before they are shared out: a place within one rank's share would name another task on each rank.
        tasks_with_ids = [with_id(task, place) for place, task in enumerate(tasks)]
        attempts_at(tasks_with_ids, group_size)  # refuses two tasks of one id, which may be on two ranks
        pairs: list[PlayedEpisode] = []
        if mine := self._ranks.share(tasks_with_ids):
            run = self._engine.run(mine, group_size=group_size, purpose=purpose, sampling=sampling, skip=skip)
            pairs = await _play_share(run, self._engine, self._ranks, purpose)
        own_rows = [rows for _, rows in pairs]
        # In a thread, because it waits for the slowest rank.
        all_parts = await asyncio.to_thread(self._ranks.gather, (own_rows, self._engine.counts))
        self._of_others = [counts for rank, (_, counts) in enumerate(all_parts) if rank != self._ranks.rank]
        for rank, (part, _) in enumerate(all_parts):
            for episode in _episodes(part, pairs if rank == self._ranks.rank else None, self._encodings):
                yield episode


class WriterEngine:
    """An `EpisodeEngine` of rank 0, whose episodes all ranks get."""

    def __init__(
        self, engine: EpisodeEngine | None, ranks: RankGroup, encodings: EncodedEpisodes | None = None
    ) -> None:
        """`engine` is None on the other ranks; see `SplitEngine` for `encodings`."""
        self._engine, self._ranks = engine, ranks
        self._encodings = encodings if ranks.is_writer else None
        self._counts = EpisodeCounts()
        """The counts of rank 0, as of the end of its last `run`."""

    @property
    def counts(self) -> EpisodeCounts:
        return self._counts if self._engine is None else self._engine.counts

    def live(self) -> Sequence[Any]:
        """The attempts that this rank has under way."""
        return [] if self._engine is None else self._engine.live()

    async def run(
        self,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
        skip: Collection[EpisodeId] = (),
    ) -> AsyncGenerator[Episode, None]:
        """Every episode, once rank 0 has all of them."""
        tasks = task_list(tasks)
        pairs: list[PlayedEpisode] = []
        if self._engine is not None:
            run = self._engine.run(
                tasks, group_size=group_size, purpose=purpose, sampling=sampling, skip=skip
            )
            pairs = await _play_share(run, self._engine, self._ranks, purpose)
        own_rows = [rows for _, rows in pairs]
        (part, self._counts), *_ = await asyncio.to_thread(self._ranks.gather, (own_rows, self.counts))
        for episode in _episodes(part, None if self._engine is None else pairs, self._encodings):
            yield episode


async def _play_share(
    run: AsyncGenerator[Episode, None], engine: EpisodeEngine, ranks: RankGroup, purpose: str
) -> list[PlayedEpisode]:
    """All episodes of `run`; meanwhile the other ranks hear of every turn."""
    async with _beating(engine, ranks, f"the episodes of {purpose}"), aclosing(run) as running:
        return [(each, EncodedEpisode.of(each)) async for each in running]


def _episodes(
    part: Sequence[EncodedEpisode], pairs: Sequence[PlayedEpisode] | None, encodings: EncodedEpisodes | None
) -> Iterator[Episode]:
    """The episodes of a rank's `part`. `pairs` has them where this rank played them: an episode that can be
    stored comes back from its bytes as it was, so those are not read."""
    for number, encoding in enumerate(part):
        episode = encoding.episode() if pairs is None else pairs[number][0]
        if encodings is not None:
            encodings.add(episode, encoding)
        yield episode


@asynccontextmanager
async def _beating(engine: EpisodeEngine, ranks: RankGroup, place: str) -> AsyncIterator[None]:
    ranks.beat(place)

    async def beat() -> None:
        before: Any = None
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            counts = engine.counts
            now = (counts.turns, counts.settled, counts.retries)
            # Only for what moved: the others must find out when this rank stands still.
            if now != before:
                ranks.beat(place)
            before = now

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
