"""A process on a node of the cluster that plays episodes: an engine, on weights of its own or model servers.

    begin(job, model files) ──► models and their clients, or clients of servers; engine
    load(versions, bytes)   ──► the models have these weights
    play(lease)             ──► the episodes as the store's own bytes, and what was counted

It is an actor with an event loop: `num_turns` answers while `play` works. Where further steps are played
while one is learned from, it plays leases of several steps at a time, each by an engine of its own on the
same models: the slowest episode of one keeps nobody from the next.
"""

import asyncio
import pickle
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllm.config.schema import TrainConfig
from rllm.engine.attempts import EpisodeCounts
from rllm.errors import ConfigError
from rllm.integrations.ray.job import Machine, WorkerJob, this_machine
from rllm.integrations.ray.models import Files, HeldModels, write_files
from rllm.integrations.ray.remote import RemoteClient, Servers
from rllm.integrations.ray.scratch import scratch_directory
from rllm.integrations.ray.user_files import import_user_files
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.store.encoding import encode_episode
from rllm.trainer.cluster import EpisodePlayer
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId


@dataclass(kw_only=True, slots=True, frozen=True)
class LeaseSettings:
    """The settings for the tasks of a lease."""

    group_size: int
    purpose: str
    sampling: SamplingParams | None
    skip: Collection[EpisodeId]
    policy_versions: Mapping[str, int]
    """The versions of the weights that it begins with, at least."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PlayedLease:
    """The result of a lease."""

    episodes: Sequence[tuple[tuple[Any, ...], Sequence[tuple[Any, ...]]]]
    """Rows of the store: of each episode, and of its steps."""
    counts: EpisodeCounts
    """The counts of this lease alone."""
    busy_s: float
    num_tokens: int
    """Sampled."""


def num_leases_at_once(config: TrainConfig) -> int:
    """The number of leases that a worker plays at a time: one of each step that may be sampled."""
    return config.schedule.steps_ahead + 1


class RolloutWorker:
    """The actor."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._models: HeldModels | None = None
        self._servers: Servers | None = None
        """Where other actors have the models."""
        self._idle_engines: list[Any] = []
        self._reproducible = False
        """Whether a lease is played as if it were the first."""
        self._open = AsyncExitStack()
        self._playing: dict[int, asyncio.Task[PlayedLease]] = {}
        """By the number of the lease."""
        self._turns: dict[int, Callable[[], int]] = {}
        """The number of turns of each of these so far."""

    def __repr__(self) -> str:
        return self._name  # which Ray puts before its lines

    async def machine(self) -> Machine:
        """Where it is."""
        return this_machine()

    async def begin(self, pickled_job: bytes, paths: Sequence[str], files: Files) -> None:
        """Make the models from their `files`, or clients of those that model servers have, and the engine.

        `paths`: where the driver finds modules; those of them that are here are looked in as well. Raises
        ConfigError where what plays is of a module that this node does not have.
        """
        # Before anything is unpickled: the player is of modules that the driver found on these paths.
        sys.path += [path for path in paths if path not in sys.path]
        try:
            job: WorkerJob = pickle.loads(pickled_job)
            import_user_files(job.user_files)
            player: EpisodePlayer = pickle.loads(job.pickled_player)
        except ImportError as error:
            raise ConfigError(
                f"Node {socket.gethostname()} cannot import what the run plays with ({error}); install it on "
                "each node, or name what plays as file.py:NAME, which travels as code."
            ) from error
        directory = scratch_directory()
        if job.config.cluster.model_servers:
            write_files(files, directory)
            clients = self._remote_clients(job, directory)
        else:
            self._models = HeldModels(job, files, directory)
            clients = self._models.clients
        num_engines = num_leases_at_once(job.config)
        # Where several leases are played at once, dropping caches for one would drop those of the others.
        self._reproducible = num_engines == 1
        for number in range(num_engines):
            home = directory / f"engine-{number}"
            home.mkdir()
            opening = player.open_engine(job.config, clients, home)
            self._idle_engines.append(await self._open.enter_async_context(opening))

    def _remote_clients(self, job: WorkerJob, directory: Path) -> dict[str, RemoteClient]:
        """By policy, of models that are elsewhere: `directory` has their tokenizers."""
        config = job.config
        follow = config.schedule.steps_ahead > 0
        self._servers = Servers(timeout_s=config.cluster.timeout_s, follow=follow)
        trusts = config.model.trust_remote_code
        return {
            name: RemoteClient(
                policy=name,
                renderer=ChatRenderer(HuggingFaceTokenizer(directory / place, trust_remote_code=trusts)),
                max_context=config.inference.max_context,
                servers=self._servers,
            )
            for name, place in job.places.items()
        }

    async def use_servers(self, actors: Mapping[str, Any]) -> None:
        """Ask these model servers from now on, by name."""
        assert self._servers is not None, "it has no models of its own"
        self._servers.set(actors)

    async def load(self, policy_versions: Mapping[str, int], block_B: NDArray[np.uint8]) -> None:
        """Serve these weights from now on, also what is being played."""
        assert self._models is not None, "it has models of its own"
        await asyncio.to_thread(self._models.load, policy_versions, block_B)

    async def play(self, number: int, tasks: Sequence[Any], call: LeaseSettings) -> PlayedLease:
        """Every attempt at `tasks`, as lease `number` of the run."""
        # There is one: the pool gives a worker no more leases at a time than it has engines.
        engine = self._idle_engines.pop()
        before = engine.counts.turns
        self._turns[number] = lambda: engine.counts.turns - before
        self._playing[number] = asyncio.ensure_future(self._play(engine, tasks, call))
        try:
            return await self._playing[number]
        finally:
            del self._playing[number], self._turns[number]
            self._idle_engines.append(engine)

    async def _play(self, engine: Any, tasks: Sequence[Any], call: LeaseSettings) -> PlayedLease:
        if self._models is not None and self._reproducible:
            self._models.drop_caches()
        if self._servers is not None:
            self._servers.policy_versions = call.policy_versions
        before, started_s = _copy_of(engine.counts), time.perf_counter()
        rows: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]] = []
        num_tokens = 0
        run = engine.run(
            tasks, group_size=call.group_size, purpose=call.purpose, sampling=call.sampling, skip=call.skip
        )
        async with aclosing(run) as running:
            async for episode in running:
                row, steps = encode_episode(episode)
                num_tokens += row.num_sampled_tokens
                rows.append((tuple(row), [tuple(step) for step in steps]))
        return PlayedLease(
            episodes=rows,
            counts=_difference(engine.counts, before),
            busy_s=time.perf_counter() - started_s,
            num_tokens=num_tokens,
        )

    async def score(self, policy: str, ids: list[int], start: int, temperature: float) -> list[float]:
        assert self._models is not None, "it has models of its own"
        return await self._models.clients[policy].score(ids, start, temperature)

    async def num_turns(self) -> int:
        """Made so far, of the leases that are played."""
        return sum(turns() for turns in self._turns.values())

    async def stop(self, number: int) -> None:
        """End a lease that is played; nobody waits for it any more."""
        if number in self._playing:
            self._playing[number].cancel()


def _copy_of(counts: EpisodeCounts) -> EpisodeCounts:
    return replace(counts, by_outcome=dict(counts.by_outcome))


def _difference(after: EpisodeCounts, before: EpisodeCounts) -> EpisodeCounts:
    numbers = {
        each.name: getattr(after, each.name) - getattr(before, each.name)
        for each in fields(EpisodeCounts)
        if each.name != "by_outcome"
    }
    by_outcome = {
        outcome: number - before.by_outcome[outcome] for outcome, number in after.by_outcome.items()
    }
    return EpisodeCounts(**numbers, by_outcome=by_outcome)
