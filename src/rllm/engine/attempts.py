"""The common part of all engines: attempts wait in a queue, workers play them, each is handed out as it
finishes.

tasks × group_size ──► pending ──► num_workers × work ──► finished ──► Episode
                                     └ submitted = scored + truncated + failed + cancelled + in flight, always

With oversampling more attempts are started than are wanted: the first `group_size` that finish count, and the
rest are cancelled, so that a batch does not wait for its slowest episode.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rllm.engine.garbage_collection import rare_full_collections
from rllm.errors import ConfigError, CountError
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId, Task, task_id_of

AnyTask = TypeVar("AnyTask", bound="Task | Mapping[str, Any]")


class EpisodeEngine(Protocol):
    """Tasks in, episodes out as they finish; a screen may look on."""

    @property
    def counts(self) -> "EpisodeCounts": ...

    def live(self) -> Sequence[object]:
        """The rollouts being played, the oldest first; `str` says who, how old, and what it waits for."""
        ...

    def run(
        self,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
        skip: Collection[EpisodeId] = (),
    ) -> AsyncGenerator[Episode, None]: ...


@dataclass(kw_only=True, slots=True)
class EpisodeCounts:
    """Every episode that was submitted is in exactly one of the other numbers."""

    submitted: int = 0
    in_flight: int = 0
    """Queued or being played."""
    by_outcome: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    turns: int = 0
    """That were made: the model answered, and the environment answered to that."""
    retries: int = 0
    """Tries beyond the first; they are not episodes of their own."""
    call_retries: int = 0
    """Model calls that were asked again."""
    cancelled_tokens: int = 0
    """Sampled by episodes that were begun and that nobody waited for; they are trained on by nobody."""

    def check(self) -> None:
        """Raises CountError when an episode is lost or counted twice."""
        if self.submitted != self.settled + self.in_flight:
            raise CountError(
                f"{self.submitted} episodes were submitted, but {self.settled} are settled "
                f"({self._outcomes()}) and {self.in_flight} in flight."
            )

    def settle(self, outcome: Outcome, number: int = 1) -> None:
        """So many episodes are no longer in flight."""
        self.in_flight -= number
        self.by_outcome[outcome] += number
        self.check()

    @property
    def settled(self) -> int:
        """Episodes that have ended, however."""
        return sum(self.by_outcome.values())

    def _outcomes(self) -> str:
        return ", ".join(f"{outcome} {count}" for outcome, count in self.by_outcome.items())


class Quota:
    """The number of attempts at each task that are still wanted.

    Failures of the infrastructure fill no place: while others of their group run, these take it.
    """

    def __init__(self, group_size: int, stop: Callable[[str], None]) -> None:
        """`stop` is told the id of a task whose group is complete, and ends what still plays it."""
        self._group_size = group_size
        self._stop = stop
        self._num_taken: dict[str, int] = {}

    def is_full(self, task_id: str) -> bool:
        return self._num_taken.get(task_id, 0) >= self._group_size

    def takes(self, episode: Episode) -> bool:
        """Whether a finished episode is one of those that are wanted."""
        task_id = episode.task_id
        if self.is_full(task_id) or episode.outcome is Outcome.CANCELLED:
            return False
        if episode.outcome is not Outcome.INFRASTRUCTURE_FAILURE:
            self._num_taken[task_id] = self._num_taken.get(task_id, 0) + 1
            if self.is_full(task_id):
                self._stop(task_id)
        return True


class Finished(asyncio.Queue["Episode | asyncio.Task[None]"]):
    """Episodes on their way from the workers to whoever reads them, and workers that have ended.

    An episode beyond its group's quota becomes a cancelled one the moment it arrives.
    """

    def __init__(self, quota: Quota | None = None) -> None:
        super().__init__()
        self._quota = quota

    def put_nowait(self, item: "Episode | asyncio.Task[None]") -> None:
        if isinstance(item, Episode) and self._quota is not None and not self._quota.takes(item):
            item.outcome = Outcome.CANCELLED
        super().put_nowait(item)


def attempts_at(
    tasks: Sequence[AnyTask],
    group_size: int,
    oversampling: float = 1.0,
    skip: Collection[EpisodeId] = (),
) -> list[tuple[EpisodeId, AnyTask]]:
    """`group_size` attempts at each task, the last one first: workers take them from the end.

    A task is named by its `task_id`; by its position, if it has none. Of `oversampling` times as many, those
    beyond `group_size` are played after all others. Attempts to `skip` were made before.
    """
    if group_size < 1:
        raise ConfigError(f"`group_size` is {group_size}; it must be at least 1.")
    tasks_by_id = [(task_id_of(task, position), task) for position, task in enumerate(tasks)]
    if len({task_id for task_id, _ in tasks_by_id}) != len(tasks_by_id):
        raise ConfigError(
            "Two tasks have the same `task_id`; attempts at different tasks must not be compared."
        )
    for task_id, _ in tasks_by_id:
        try:
            task_id.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"The `task_id` {task_id!a} holds half of a surrogate pair, which is no text and cannot be "
                "stored; write the whole character."
            ) from error
    # 10 * 1.1 is 11.000000000000002: without the margin, rounding would start one attempt more.
    num_started = math.ceil(group_size * oversampling - 1e-9)
    pending = [
        (EpisodeId(task_id=task_id, attempt=attempt), task)
        for attempts in (range(group_size), range(group_size, num_started))
        for task_id, task in tasks_by_id
        for attempt in attempts
        if not skip or EpisodeId(task_id=task_id, attempt=attempt) not in skip
    ]
    pending.reverse()
    return pending


class ParallelLimit:
    """`limit` workers at a time, whichever of an engine's runs they work for: those that came first go first,
    and one that is there stays until its run has nothing left to begin."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was handed a place in the same moment
                self._hand_on()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            # Waiters that were cancelled are still in the queue, and a place given to one would be lost.
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


async def _in_a_place(
    places: ParallelLimit, work: Callable[[Finished], Coroutine[Any, Any, None]], results: Finished
) -> None:
    async with places:
        await work(results)


async def play_all(
    pending: Sequence[Any],
    work: Callable[[Finished], Coroutine[Any, Any, None]],
    places: "ParallelLimit",
    counts: EpisodeCounts,
    quota: Quota | None = None,
) -> AsyncGenerator[Episode, None]:
    """Episodes in the order in which they finish; `work` takes from `pending` until it is empty, in as many
    of the `places` as there are.

    Cancelled ones, and those beyond their group's `quota`, are counted and not handed out. Leaving the
    iteration early cancels the workers and counts what they had not finished.
    """
    results = Finished(quota)
    num_unsettled = len(pending)
    counts.submitted += num_unsettled
    counts.in_flight += num_unsettled
    with rare_full_collections():
        num_workers = min(places.limit, num_unsettled)
        workers = [asyncio.create_task(_in_a_place(places, work, results)) for _ in range(num_workers)]
        # A worker's end stands in the same queue, behind its episodes: with all workers ended and the queue
        # empty, an episode that is still missing will never come.
        num_running = len(workers)
        for worker in workers:
            worker.add_done_callback(results.put_nowait)
        try:
            while num_unsettled:
                result = await results.get()
                if isinstance(result, asyncio.Task):
                    result.result()  # a broken contract ends the run
                    num_running -= 1
                    if not num_running and results.empty():
                        raise CountError(
                            "Every worker of the engine has ended, but not every episode was handed over: "
                            "one was lost."
                        )
                    continue
                num_unsettled -= 1
                assert result.outcome is not None, "a played episode has an outcome"
                if result.outcome is Outcome.CANCELLED:
                    counts.cancelled_tokens += sum(
                        len(step.response_ids) for each in result.trajectories for step in each.steps
                    )
                    counts.settle(Outcome.CANCELLED)
                    continue
                # Settled before it is handed out: whoever takes it may leave, and the rest is then counted as
                # cancelled.
                counts.settle(result.outcome)
                yield result
        finally:
            # The workers close sessions and environments as they end, so they are awaited before the counts
            # are settled. Episodes that wait in the queue are unsettled too: nobody has seen them.
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            counts.settle(Outcome.CANCELLED, num_unsettled)
