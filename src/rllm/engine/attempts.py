"""What every engine does: attempts wait in a queue, workers play them, each is handed out as it finishes.

tasks × group_size ──► pending ──► num_workers × work ──► finished ──► Episode
                                     └ submitted = scored + truncated + failed + cancelled + in flight, always
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rllm.errors import ConfigError, CountError
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId, Task, task_id_of

AnyTask = TypeVar("AnyTask", bound="Task | Mapping[str, Any]")
Finished = asyncio.Queue[Episode]


class EpisodeEngine(Protocol):
    """Tasks in, episodes out as they finish."""

    def run(
        self,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
    ) -> AsyncGenerator[Episode, None]: ...


@dataclass(kw_only=True, slots=True)
class EpisodeCounts:
    """Every episode that was submitted is in exactly one of the other numbers."""

    submitted: int = 0
    in_flight: int = 0
    """Queued or being played."""
    by_outcome: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    retries: int = 0
    """Tries beyond the first; they are not episodes of their own."""

    def check(self) -> None:
        """Raises CountError when an episode is lost or counted twice."""
        settled = sum(self.by_outcome.values())
        if self.submitted != settled + self.in_flight:
            raise CountError(
                f"{self.submitted} episodes were submitted, but {settled} are settled ({self._outcomes()}) "
                f"and {self.in_flight} in flight."
            )

    def _outcomes(self) -> str:
        return ", ".join(f"{outcome} {count}" for outcome, count in self.by_outcome.items())


def attempts_at(tasks: Sequence[AnyTask], group_size: int) -> list[tuple[EpisodeId, AnyTask]]:
    """`group_size` attempts at each task, the last one first: workers take them from the end.

    A task is named by its `task_id`; by its position, if it has none.
    """
    pending = [
        (EpisodeId(task_id=task_id_of(task, position), attempt=attempt), task)
        for position, task in enumerate(tasks)
        for attempt in range(group_size)
    ]
    if len({identity for identity, _ in pending}) != len(pending):
        raise ConfigError(
            "Two tasks have the same `task_id`; attempts at different tasks must not be compared."
        )
    pending.reverse()
    return pending


async def played(
    pending: Sequence[Any],
    work: Callable[[Finished], Coroutine[Any, Any, None]],
    num_workers: int,
    counts: EpisodeCounts,
) -> AsyncGenerator[Episode, None]:
    """Episodes in the order in which they finish; `work` takes from `pending` until it is empty.

    Leaving the iteration early cancels the workers and counts what they had not finished.
    """
    finished = Finished()
    unsettled = len(pending)
    counts.submitted += unsettled
    counts.in_flight += unsettled
    workers = [asyncio.create_task(work(finished)) for _ in range(min(num_workers, unsettled))]
    try:
        while unsettled:
            episode = await _next_of(finished, workers)
            unsettled -= 1
            counts.in_flight -= 1
            assert episode.outcome is not None, "a played episode has an outcome"
            counts.by_outcome[episode.outcome] += 1
            counts.check()
            yield episode
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        counts.in_flight -= unsettled
        counts.by_outcome[Outcome.CANCELLED] += unsettled
        counts.check()


async def _next_of(finished: Finished, workers: "Sequence[asyncio.Task[None]]") -> Episode:
    """The next finished episode. Raises what a worker raised: a broken contract ends the run."""
    if not finished.empty():
        return finished.get_nowait()
    getter = asyncio.ensure_future(finished.get())
    try:
        running = {worker for worker in workers if not worker.done()}
        for worker in workers:
            if worker.done():
                worker.result()
        while not getter.done():
            if not running and finished.empty():
                raise CountError(
                    "Every worker of the engine has ended, but not every episode was handed over: "
                    "one was lost."
                )
            done, _ = await asyncio.wait({getter, *running}, return_when=asyncio.FIRST_COMPLETED)
            for worker in done & running:
                running.discard(worker)
                worker.result()
        return getter.result()
    finally:
        getter.cancel()
