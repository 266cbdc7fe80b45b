# pyright: reportMissingImports=false
"""An `EpisodeEngine` whose episodes are played by the workers of a Ray cluster.

    tasks ──► Leases ──► idle worker ──► PlayedLease ──► counted, decoded, handed out
                ▲            └─ ends ─┐
                └──── given back ◄────┘    a lease counts when its worker returns it, and then once

Counts are those of leases that came back: what a lost worker had played of its lease is played again.
"""

import asyncio
import bisect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from rllm.engine.attempt_state import LiveRollout
from rllm.engine.attempts import EpisodeCounts, attempts_at
from rllm.engine.settings import task_list
from rllm.integrations.ray.answers import WorkerEnded, answer
from rllm.integrations.ray.leases import Lease, Leases
from rllm.integrations.ray.pool import ClusterWorker, Pool, require_room
from rllm.integrations.ray.worker import LeaseSettings, PlayedLease
from rllm.store.encoding import EpisodeRow, StepRow, decode_episode
from rllm.trainer.cluster import RolloutJob
from rllm.trainer.rollouts import step_of
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId, with_id

LOOK_EVERY_S = 1.0
"""At nodes that joined, workers that began, and turns that were made."""
STOP_S = 10.0
"""For workers to let go of a lease that nobody waits for."""


@dataclass(kw_only=True, slots=True, eq=False)
class Play:
    """A lease that is out."""

    number: int
    """The only one of the run."""
    worker: ClusterWorker
    lease: Lease
    has_begun: bool = False
    """Whether the worker was there to take it."""


Playing = dict["asyncio.Task[PlayedLease]", Play]


class RayEngine:
    """A `ClusterEngine`."""

    def __init__(self, pool: Pool, tasks_per_lease: Callable[[int], int]) -> None:
        """`tasks_per_lease`: how many tasks a worker plays together, by the attempts at each."""
        self._pool, self._tasks_per_lease = pool, tasks_per_lease
        self._counts = EpisodeCounts()
        self._waves: list[tuple[int, Leases]] = []
        """Those that are being played, each with its step: what the trainer waits for comes first."""
        self._playing: Playing = {}
        """The leases that are out, of all waves."""
        self._num_plays = 0
        self._since_s = time.perf_counter()
        """When `metrics` was last called."""

    @property
    def counts(self) -> EpisodeCounts:
        """With the turns of leases that are out, so that a watchdog sees them move."""
        turns = sum(each.num_turns for each in self._pool.workers)
        return replace(self._counts, turns=self._counts.turns + turns)

    def live(self) -> list[LiveRollout]:
        """Each rollout is known to its worker alone."""
        return []

    async def run(
        self,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
        skip: Collection[EpisodeId] = (),
    ) -> AsyncGenerator[Episode, None]:
        """Every episode, lease by lease as they come back.

        Raises ClusterError where no worker is left to play them.
        """
        tasks = task_list(tasks)
        tasks_with_ids = [with_id(task, place) for place, task in enumerate(tasks)]
        attempts_at(tasks_with_ids, 1)  # refuses two tasks of one id, which may be in two leases
        leases = Leases(
            tasks_with_ids, group_size=group_size, size=self._tasks_per_lease(group_size), skip=skip
        )
        # Before leases are handed out: a worker is given one only with the last weights.
        await self._pool.refresh_weights()
        num_open = leases.num_episodes
        self._counts.submitted += num_open
        self._counts.in_flight += num_open
        playing: Playing = {}
        wave = step_of(purpose), leases
        bisect.insort(self._waves, wave, key=lambda each: each[0])
        call = LeaseSettings(
            group_size=group_size,
            purpose=purpose,
            sampling=sampling,
            skip=skip,
            policy_versions=self._pool.broadcast.policy_versions,
        )
        try:
            while leases.are_open:
                await self._hand_out(leases, playing, call)
                for lease, result in await self._leases_back(leases, playing):
                    # Counted before they are handed on: what is open when the caller leaves was cancelled.
                    num_open -= lease.num_episodes
                    self._settle(result.counts)
                    for row, steps in result.episodes:
                        yield decode_episode(EpisodeRow(*row), (StepRow(*step) for step in steps))
        finally:
            self._waves.remove(wave)
            self._counts.settle(Outcome.CANCELLED, num_open)
            if playing:
                await self._stop(playing)

    async def score(
        self, ids: list[int], start: int, temperature: float = 1.0, *, policy: str
    ) -> list[float]:
        """By the first worker or model server that is ready and does not end meanwhile."""
        await self._pool.refresh_weights()
        while True:
            await self._pool.settle_starts()
            for worker in self._pool.holders:
                try:
                    return await answer(worker.actor.score.remote(policy, ids, start, temperature))
                except WorkerEnded:
                    self._pool.lose(worker)
            await self._wait({})

    def metrics(self) -> Mapping[str, float | str]:
        now = time.perf_counter()
        spent_s, self._since_s = now - self._since_s, now
        pool, values = self._pool, dict[str, float | str]()
        workers = [each for each in pool.ready if each.lease_s]
        if workers:
            values["cluster.slowest"] = min(workers, key=lambda each: each.num_tokens / each.lease_s).name
        for worker in pool.ready:
            worker.note_time()
            share = min(1.0, worker.busy_s / spent_s)
            values[f"cluster.{worker.name}.tokens_per_s"] = worker.num_tokens / spent_s
            values[f"cluster.{worker.name}.idle_share"] = 1.0 - share
            worker.busy_s, worker.lease_s, worker.num_tokens = 0.0, 0.0, 0
        if pool.job.config.cluster.model_servers:
            values |= {"cluster.servers": len(pool.servers), "cluster.servers_lost": pool.num_servers_lost}
        return values | {
            "cluster.workers": len(pool.ready),
            "cluster.workers_lost": pool.num_lost,
            "cluster.broadcast_s": pool.broadcast.seconds,
            "cluster.broadcast_mb": pool.broadcast.megabytes,
            "cluster.broadcast_mb_per_s": pool.broadcast.mb_per_s,
        }

    async def _hand_out(self, leases: Leases, playing: Playing, call: LeaseSettings) -> None:
        """A lease to each worker that has none; those of earlier steps are handed out first."""
        self._pool.refill()
        await self._pool.settle_starts()
        while (worker := self._pool.next_worker()) is not None:
            first_wave = next((each for _, each in self._waves if each.have_waiting), None)
            if first_wave is not leases or (lease := leases.take()) is None:
                return
            self._num_plays += 1
            play = Play(number=self._num_plays, worker=worker, lease=lease)
            worker.begin_lease()
            task = asyncio.ensure_future(_play(play, call))
            task.add_done_callback(partial(_note_end, worker))
            self._playing[task] = playing[task] = play

    async def _leases_back(self, leases: Leases, playing: Playing) -> list[tuple[Lease, PlayedLease]]:
        """The leases that have come back after at most a moment; those whose workers have ended are given
        back."""
        leases_back: list[tuple[Lease, PlayedLease]] = []
        for task in await self._wait(playing):
            play = playing.pop(task)
            del self._playing[task]
            worker, lease = play.worker, play.lease
            try:
                result = task.result()
            except WorkerEnded as error:
                self._pool.lose(worker)
                end_text = f"{worker.name} on {worker.host} ended ({error})."
                leases.give_back(lease, end_text if play.has_begun else "")
                continue
            leases.finish(lease, len(result.episodes))
            worker.lease_s += result.busy_s
            worker.num_tokens += result.num_tokens
            leases_back.append((lease, result))
        return leases_back

    async def _wait(self, playing: Playing) -> "set[asyncio.Task[PlayedLease]]":
        """Until a lease is back, a worker or server has begun or ended, or LOOK_EVERY_S is over; returns the
        leases' tasks."""
        changes = {each.starting or each.end for each in self._pool.members} - {None}
        # A worker that comes back from another wave is free for this one.
        elsewhere = {each for each in self._playing if each not in playing and not each.done()}
        waiting: set[asyncio.Task[Any]] = {
            *playing,
            *elsewhere,
            *(each for each in changes if each is not None),
        }
        if not waiting:
            await asyncio.sleep(LOOK_EVERY_S)
            return set()
        done, _ = await asyncio.wait(waiting, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        # Nothing has ended for a while: workers are asked for their turns, by which a watchdog sees that the
        # run moves.
        if not done:
            for worker in {each.worker for each in playing.values()}:
                look = asyncio.ensure_future(answer(worker.actor.num_turns.remote()))
                look.add_done_callback(partial(_note_turns, worker))
        return {each for each in done if each in playing}

    def _settle(self, counts: EpisodeCounts) -> None:
        for each in fields(EpisodeCounts):
            if each.name not in ("by_outcome", "submitted", "in_flight"):
                total = getattr(self._counts, each.name) + getattr(counts, each.name)
                setattr(self._counts, each.name, total)
        for outcome, number in counts.by_outcome.items():
            self._counts.settle(outcome, number)

    async def _stop(self, playing: Playing) -> None:
        """Let nobody play on for a caller who has left; a worker that does not stop is replaced."""
        for task, play in playing.items():
            # One that has not begun was never sent to its worker, so it is enough to ask no more.
            if play.has_begun:
                play.worker.actor.stop.remote(play.number)
            else:
                task.cancel()
        _, late = await asyncio.wait(playing, timeout=STOP_S)
        for task, play in playing.items():
            del self._playing[task]
            if task in late:
                self._pool.lose(play.worker)
                task.cancel()
            # Asked for, so that asyncio does not log it as an exception that nobody has retrieved.
            elif not task.cancelled():
                task.exception()


@asynccontextmanager
async def ray_engine(job: RolloutJob) -> AsyncIterator[RayEngine]:
    """Workers on the nodes of the cluster that this process drives, while the block runs."""
    require_room(job)
    pool = Pool(job=job)
    try:
        pool.open()
        yield RayEngine(pool, job.config.cluster.tasks_per_lease)
    finally:
        pool.close()


async def _play(play: Play, call: LeaseSettings) -> PlayedLease:
    actor = play.worker.actor
    await answer(actor.num_turns.remote())  # one that ended while it was idle says nothing of the lease
    play.has_begun = True
    return await answer(actor.play.remote(play.number, play.lease.tasks, call))


def _note_end(worker: ClusterWorker, task: "asyncio.Task[PlayedLease]") -> None:
    """Before anybody who waits for the lease goes on."""
    worker.end_lease()


def _note_turns(worker: ClusterWorker, look: "asyncio.Task[int]") -> None:
    """A worker's answer, unless its leases are back by now or it has ended."""
    if not look.cancelled() and look.exception() is None and worker.num_leases:
        worker.num_turns = look.result()
