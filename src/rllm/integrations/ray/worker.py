"""A process on a node of the cluster that plays episodes: an engine with weights of its own.

    begin(job, model files) ──► model, client, engine
    load(version, bytes)    ──► the client serves these weights
    play(lease)             ──► the episodes as the store's own bytes, and what was counted

It is an actor with an event loop: `vitals` answers while `play` works.
"""

import asyncio
import hashlib
import os
import pickle
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rllm.config
from rllm.config.schema import TrainConfig
from rllm.engine.attempts import EpisodeCounts
from rllm.errors import ConfigError
from rllm.inference.local.client import LocalClient
from rllm.integrations.ray.weights import unpack
from rllm.store.encoding import encode_episode
from rllm.trainer.agents import Player
from rllm.trainer.policies import load_initial_models, make_client
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId

MUST_AGREE = ("rllm", "torch", "transformers", "tokenizers", "numpy", "ray")
"""Packages whose versions decide what is sampled, or how processes understand each other."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerJob:
    """What a worker is told once, when it begins."""

    config: TrainConfig
    player: Player


@dataclass(kw_only=True, slots=True, frozen=True)
class Call:
    """How the tasks of a lease are played."""

    group_size: int
    purpose: str
    sampling: SamplingParams | None
    skip: Collection[EpisodeId]


@dataclass(kw_only=True, slots=True, frozen=True)
class PlayedLease:
    """What a worker returns of a lease."""

    episodes: Sequence[tuple[tuple[Any, ...], Sequence[tuple[Any, ...]]]]
    """Rows of the store: of each episode, and of its steps."""
    counts: EpisodeCounts
    """Of this lease alone."""
    policy_version: int
    busy_s: float
    num_tokens: int
    """Sampled."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Machine:
    """Where a process runs, and with what."""

    host: str
    pid: int
    versions: Mapping[str, str]
    """Of Python, of `MUST_AGREE` (empty where one is not installed), and of our own files."""
    clock_s: float
    """Its time, in seconds since 1970."""


def this_machine() -> Machine:

    return Machine(
        host=socket.gethostname(),
        pid=os.getpid(),
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in MUST_AGREE},
            "rllm source": _source_digest(),
        },
        clock_s=time.time(),
    )


@cache
def _source_digest() -> str:
    """Of the package's files: two checkouts of one version may differ."""
    digest = hashlib.blake2b(digest_size=6)
    root = Path(rllm.config.__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


class RolloutWorker:
    """The actor. One lease at a time is played."""

    def __init__(self) -> None:
        self._client: LocalClient | None = None
        self._engine: Any = None
        self._playing: asyncio.Task[PlayedLease] | None = None
        self._turns_before = 0
        """Those of the leases before."""

    async def machine(self) -> Machine:
        """Where it is."""
        return this_machine()

    async def begin(
        self, pickled_job: bytes, paths: Sequence[str], files: Mapping[str, NDArray[np.uint8]]
    ) -> None:
        """Make the model from its `files`, and the engine.

        `paths`: where the driver finds modules; those of them that are here are looked in as well. Raises
        ConfigError where the agent or the environment is of a module that this node does not have.
        """
        sys.path += [path for path in paths if path not in sys.path]
        try:
            job: WorkerJob = pickle.loads(pickled_job)
        except ImportError as error:
            raise ConfigError(
                f"Node {socket.gethostname()} cannot import what the run plays with ({error}); install it on "
                "each node, or name agent and environment as file.py:NAME, which travels as code."
            ) from error
        with tempfile.TemporaryDirectory(prefix="rllm-worker-") as name:
            directory = Path(name)
            for file, block in files.items():
                (directory / file).write_bytes(block.tobytes())
            model = replace(job.config.model, path=name)
            config = replace(job.config, model=model, threads=job.config.cluster.cpus_per_worker)
            (loaded,) = load_initial_models(config, directory).values()
        self._client = make_client(config, loaded)
        self._engine = job.player.engine(config, self._client)

    async def load(self, policy_version: int, block_B: NDArray[np.uint8]) -> None:
        """Serve these weights from now on."""
        assert self._client is not None, "it has begun"
        unpack(block_B, self._client.loaded.model)
        self._client.publish(policy_version)

    async def play(self, tasks: Sequence[Any], call: Call) -> PlayedLease:
        """Every attempt at `tasks`."""
        self._playing = asyncio.ensure_future(self._play(tasks, call))
        try:
            return await self._playing
        finally:
            self._playing = None

    async def _play(self, tasks: Sequence[Any], call: Call) -> PlayedLease:
        assert self._client is not None, "it has begun"
        # What another lease left in the caches would change the batches, and with them the last bit.
        self._client.publish(self._client.policy_version)
        before, started_s = _copied(self._engine.counts), time.perf_counter()
        self._turns_before = before.turns
        rows: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]] = []
        num_tokens = 0
        run = self._engine.run(
            tasks, group_size=call.group_size, purpose=call.purpose, sampling=call.sampling, skip=call.skip
        )
        async with aclosing(run) as running:
            async for episode in running:
                row, steps = encode_episode(episode)
                num_tokens += row.num_sampled_tokens
                rows.append((tuple(row), [tuple(step) for step in steps]))
        return PlayedLease(
            episodes=rows,
            counts=_difference(self._engine.counts, before),
            policy_version=self._client.policy_version,
            busy_s=time.perf_counter() - started_s,
            num_tokens=num_tokens,
        )

    async def score(self, ids: list[int], start: int, temperature: float) -> list[float]:
        assert self._client is not None, "it has begun"
        return await self._client.score(ids, start, temperature)

    async def num_turns(self) -> int:
        """Made so far, of the lease that is played."""
        return self._engine.counts.turns - self._turns_before

    async def stop(self) -> None:
        """End the lease that is played; nobody waits for it any more."""
        if self._playing is not None:
            self._playing.cancel()


def _copied(counts: EpisodeCounts) -> EpisodeCounts:
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
