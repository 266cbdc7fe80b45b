# pyright: reportMissingImports=false
"""The rollout workers of a run: as many as it may have, each on a node that has room.

        starting ──begins, gets the weights──► idle ⇄ busy
            ▲                                   │
            └──────── another one ◄─────────────┴─ it ends: its node was lost, somebody killed it

Ray places a worker when a node has room for it, so one that waits begins when a node joins.
"""

import asyncio
import logging
import pickle
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray import cloudpickle
from ray.exceptions import ObjectStoreFullError, OutOfDiskError
from ray.util.placement_group import placement_group_table

from rllm.errors import ClusterError, ConfigError
from rllm.integrations.ray.answers import WorkerEnded, answer, first_line, full_store
from rllm.integrations.ray.job import Machine, WorkerJob, require_same_versions, this_machine
from rllm.integrations.ray.models import ModelServer
from rllm.integrations.ray.session import MEGABYTE
from rllm.integrations.ray.user_files import user_files
from rllm.integrations.ray.weights import num_bytes, pack, weight_state
from rllm.integrations.ray.worker import RolloutWorker, num_leases_at_once
from rllm.trainer.cluster import RolloutJob

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 5
"""Workers that may end before they are ready, one after the other."""


@dataclass(kw_only=True, slots=True, eq=False)
class ClusterWorker:
    """An actor that has begun, or is about to."""

    name: str
    actor: Any
    starting: "asyncio.Task[Machine] | None"
    """None once it is ready."""
    is_server: bool = False
    """Whether it serves models to the others, instead of playing."""
    end: "asyncio.Task[Any] | None" = None
    """A future of a server that is ready: done when it has ended."""
    knows: frozenset[str] = frozenset()
    """The servers that it asks."""
    host: str = ""
    serves: int = 0
    """The number of the broadcast whose weights it serves."""
    num_leases: int = 0
    """The number of leases that it plays."""
    busy_s: float = 0.0
    """In which it played any, up to `noted_s`."""
    noted_s: float = 0.0
    lease_s: float = 0.0
    """The time that leases took which it has returned: of those that it plays together, their sum."""
    num_tokens: int = 0
    """Sampled in these."""
    num_turns: int = 0
    """The number of turns of the leases that it plays."""

    def begin_lease(self) -> None:
        self.note_time()
        self.num_leases += 1

    def end_lease(self) -> None:
        self.note_time()
        self.num_leases -= 1
        if not self.num_leases:
            self.num_turns = 0

    def note_time(self) -> None:
        """Bring `busy_s` up to now."""
        now_s = time.perf_counter()
        if self.num_leases:
            self.busy_s += now_s - self.noted_s
        self.noted_s = now_s


@dataclass(kw_only=True, slots=True)
class Broadcast:
    """The last weights that went out."""

    number: int = 0
    state: int = -1
    """`weight_state` of the trainer then."""
    policy_versions: Mapping[str, int] = field(default_factory=dict[str, int])
    ref: Any = None
    seconds: float = 0.0
    """From the trainer's memory into that of all workers that were ready."""
    megabytes: float = 0.0
    """The size of one copy."""
    num_workers: int = 0

    @property
    def mb_per_s(self) -> float:
        return self.megabytes * self.num_workers / self.seconds if self.seconds else 0.0


@dataclass(kw_only=True, slots=True)
class Pool:
    """Holds the workers of a run and gives them their weights."""

    job: RolloutJob
    members: list[ClusterWorker] = field(default_factory=list[ClusterWorker])
    """Rollout workers, and the model servers where the run has some."""
    broadcast: Broadcast = field(default_factory=Broadcast)
    num_lost: int = 0
    """Rollout workers that have ended before the run did."""
    num_servers_lost: int = 0
    _num_made: int = 0
    _num_failed_starts: int = 0
    _job_ref: Any = None
    _files_ref: Any = None
    _tokenizers_ref: Any = None
    """`_files_ref` without the weights."""
    _ready_s: float = 0.0
    """When a worker was last ready."""
    _giving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights go out: steps that are sampled together find new ones at one time."""

    def open(self) -> None:
        """Ask for the first workers."""
        directories = _model_directories(self.job)
        self._job_ref = self._put(_pickled_job(self.job, directories))
        files = {f"{place}/{path.name}": _bytes_of(path) for path, place in _model_files(directories)}
        self._files_ref = self._put(files)
        if self.job.config.cluster.model_servers:
            self._tokenizers_ref = self._put(
                {name: each for name, each in files.items() if not name.endswith(".safetensors")}
            )
        self._ready_s = time.monotonic()
        self.refill()

    def close(self) -> None:
        """End all of them."""
        for worker in list(self.members):
            self._end(worker)

    @property
    def workers(self) -> list[ClusterWorker]:
        """Those that play."""
        return [each for each in self.members if not each.is_server]

    @property
    def ready(self) -> list[ClusterWorker]:
        """Workers that have begun."""
        return [each for each in self.workers if each.starting is None]

    @property
    def servers(self) -> list[ClusterWorker]:
        """Model servers that answer."""
        return [each for each in self.members if each.is_server and each.starting is None]

    @property
    def holders(self) -> list[ClusterWorker]:
        """The workers that are ready and have the models."""
        return self.servers if self.job.config.cluster.model_servers else self.ready

    @property
    def can_play(self) -> bool:
        return bool(self.ready and self.holders)

    def next_worker(self) -> ClusterWorker | None:
        """The worker with the fewest leases of those that can play another, with the last weights."""
        if not self.can_play:
            return None
        config, latest = self.job.config, self.broadcast.number
        most = num_leases_at_once(config)
        open_workers = [
            each
            for each in self.ready
            if each.num_leases < most and (config.cluster.model_servers or each.serves == latest)
        ]
        return min(open_workers, key=lambda each: each.num_leases, default=None)

    def refill(self) -> None:
        """As many workers as the run wants, or as the nodes that are there now have room for."""
        cluster = self.job.config.cluster
        # Ray counts these cores as those of the node, and no worker would ever be placed on them.
        held_cpus = _cpus_of_groups()
        places = sum(
            int(node["Resources"].get("CPU", 0) - held_cpus[node["NodeID"]]) // cluster.cpus_per_worker
            for node in ray.nodes()
            if node["Alive"]
        )
        while len(self.members) - len(self.workers) < cluster.model_servers:
            self._add(is_server=True)
        while len(self.workers) < (cluster.workers or max(1, places - cluster.model_servers)):
            self._add(is_server=False)

    def _add(self, *, is_server: bool) -> None:
        name = f"{'server' if is_server else 'worker'}-{self._num_made}"
        self._num_made += 1
        options: dict[str, Any] = {
            "num_cpus": self.job.config.cluster.cpus_per_worker,
            "max_restarts": 0,  # a restarted actor has no model: the pool makes another one
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
        }
        actor = ray.remote(ModelServer if is_server else RolloutWorker).options(**options).remote(name)
        worker = ClusterWorker(name=name, actor=actor, starting=None, is_server=is_server)
        self.members.append(worker)
        worker.starting = _quiet(self._begin(worker))

    async def _begin(self, worker: ClusterWorker) -> Machine:
        machine = await answer(worker.actor.machine.remote())
        # Before the job goes out, which is unpickled there and has to mean the same.
        require_same_versions(this_machine(), machine)
        if worker.is_server:
            await answer(worker.actor.begin.remote(self._job_ref, self._files_ref))
        else:
            files = self._tokenizers_ref or self._files_ref
            await answer(worker.actor.begin.remote(self._job_ref, sys.path, files))
        return machine

    async def settle_starts(self) -> None:
        """Take in the workers and servers that have begun, and drop those that could not or have ended.

        Raises what a worker raised while it began, and ClusterError where none has been ready for too long.
        """
        for server in [each for each in self.servers if each.end is not None and each.end.done()]:
            self.lose(server)
        for worker in [each for each in self.members if each.starting is not None and each.starting.done()]:
            assert worker.starting is not None, "it was looked at"
            try:
                worker.host = worker.starting.result().host
                worker.starting = None
                if worker.is_server:
                    worker.end = _quiet(answer(worker.actor.live.remote()))
            except WorkerEnded as error:  # its node is gone, or somebody killed it
                self._num_failed_starts += 1
                self.lose(worker)
                if self._num_failed_starts >= MAX_FAILED_STARTS:
                    raise ClusterError(
                        f"{self._num_failed_starts} rollout workers have ended before they were ready, the "
                        f"last: {first_line(error)}. Is there memory for the model on the nodes?"
                    ) from error
        # Before workers are told of servers: one that has no weights yet must not be asked.
        await self.give_weights()
        if self.job.config.cluster.model_servers:
            await self._tell_servers()
        if self.can_play:
            self._ready_s, self._num_failed_starts = time.monotonic(), 0
        elif (waited_s := time.monotonic() - self._ready_s) > self.job.config.cluster.timeout_s:
            raise ClusterError(self._shortage(waited_s))

    async def _tell_servers(self) -> None:
        """Every worker that can play knows the servers that are up."""
        actors = {each.name: each.actor for each in self.servers}
        for worker in [each for each in self.ready if each.knows != actors.keys()]:
            try:
                await answer(worker.actor.use_servers.remote(actors))
                worker.knows = frozenset(actors)
            except WorkerEnded:
                if not worker.num_leases:  # else its lease says so
                    self.lose(worker)

    def _shortage(self, waited_s: float) -> str:
        cluster = self.job.config.cluster
        nodes = ", ".join(
            f"{node['NodeManagerAddress']} {node['Resources'].get('CPU', 0):g} CPUs"
            for node in ray.nodes()
            if node["Alive"]
        )
        return (
            f"No rollout worker{' with a model server' if cluster.model_servers else ''} has been ready for "
            f"{waited_s:.0f} s (`cluster.timeout_s`): each asks for "
            f"{cluster.cpus_per_worker} CPUs (`cluster.cpus_per_worker`), and the nodes have in all: "
            f"{nodes or 'none is alive'}. Add a node, end what else uses them, or ask for less; the same "
            "command goes on."
        )

    def lose(self, worker: ClusterWorker) -> None:
        """It has ended; another one takes its place."""
        if worker not in self.members:
            return  # it was missed by two steps that are sampled together
        if worker.is_server:
            self.num_servers_lost += 1
        else:
            self.num_lost += 1
        where = f" on {worker.host}" if worker.host else ""
        work = "calls go to the others" if worker.is_server else "what it played is played again by another"
        log.warning("%s%s has ended; %s.", worker.name, where, work)
        self._end(worker)
        self.refill()

    def _end(self, worker: ClusterWorker) -> None:
        if worker in self.members:
            self.members.remove(worker)
        for task in (worker.starting, worker.end):
            if task is not None:
                task.cancel()
        ray.kill(worker.actor, no_restart=True)

    async def refresh_weights(self) -> None:
        """Give all workers the weights, which go into the store where they have changed since the last
        time."""
        async with self._giving:
            started_s = time.perf_counter()
            broadcast = await asyncio.to_thread(self._newer_weights)
            # A worker that has begun since the last broadcast still needs its weights.
            if broadcast is None:
                await self._load(self.holders)
                return
            self.broadcast = broadcast
            holders = self.holders
            await self._load(holders)
            broadcast.seconds = time.perf_counter() - started_s
            broadcast.num_workers = sum(each.serves == broadcast.number for each in holders)

    def _newer_weights(self) -> Broadcast | None:
        """The weights as they were last published, in the object store; None where these went out already."""
        models, latest = self.job.learning_models(), self.broadcast
        # Copied inside the block, so that the bytes are those of these versions.
        with self.job.between_publishes():
            state, versions = weight_state(models), self.job.policy_versions()
            if (state, versions) == (latest.state, latest.policy_versions):
                return None
            block_B = pack(models)
        latest.ref = None  # the store may drop the weights before; without room even so, a later call tries
        return Broadcast(
            number=latest.number + 1,
            state=state,
            policy_versions=versions,
            ref=self._put(block_B),
            megabytes=len(block_B) / MEGABYTE,
        )

    async def give_weights(self) -> None:
        """The last weights, to those that have others; further ones may begin meanwhile."""
        while any(each.serves != self.broadcast.number for each in self.holders):
            await self.refresh_weights()

    async def _load(self, workers: list[ClusterWorker]) -> None:
        broadcast = self.broadcast
        late = [each for each in workers if each.serves != broadcast.number]
        loads = [
            _quiet(answer(each.actor.load.remote(broadcast.policy_versions, broadcast.ref))) for each in late
        ]
        for worker, load in zip(late, loads, strict=True):
            try:
                await load
                worker.serves = broadcast.number
            except WorkerEnded:
                self.lose(worker)

    def _put(self, value: Any) -> Any:
        try:
            return ray.put(value)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise ClusterError(full_store(error)) from error


def require_room(job: RolloutJob) -> None:
    """Raises ConfigError where a node's object store cannot hold what a run puts there at one time: the
    initial models and two versions of the weights."""
    files = sum(path.stat().st_size for path, _ in _model_files(_model_directories(job)))
    min_size = files + 2 * num_bytes(job.learning_models())
    for node in ray.nodes():
        size = node["Resources"].get("object_store_memory", 0.0)
        if node["Alive"] and min_size > size:
            mend = "start it with a larger --object-store-memory"
            if not job.config.cluster.address:
                mend = f"set `cluster.object_store_mb` above {min_size / MEGABYTE:.0f}"
            raise ConfigError(
                f"The object store of node {node['NodeManagerAddress']} has {size / MEGABYTE:,.0f} MB, and "
                f"the initial models with two versions of the weights take {min_size / MEGABYTE:,.0f} MB; "
                f"{mend}."
            )


def _cpus_of_groups() -> Counter[str]:
    """Cores of each node that placement groups hold, such as that of placed ranks."""
    num_cpus = Counter[str]()
    for group in placement_group_table().values():
        for bundle, node in group["bundles_to_node_id"].items():
            if group["state"] == "CREATED":
                num_cpus[node] += group["bundles"][bundle].get("CPU", 0.0)
    return num_cpus


def _quiet(coroutine: Awaitable[Any]) -> "asyncio.Task[Any]":
    """A task whose failure somebody asks for later, or nobody."""
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task  # pyright: ignore[reportReturnType]


def _pickled_job(job: RolloutJob, directories: Mapping[Path, str]) -> bytes:
    """Raises ConfigError for what cannot travel to another process."""
    try:
        pickled_player = cloudpickle.dumps(job.player)
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise ConfigError(
            f"What the run plays with cannot travel to its rollout workers ({first_line(error)}): name it as "
            "file.py:NAME, which each worker imports, or make what cannot be copied, such as a connection or "
            "a lock, inside the function that uses it."
        ) from error
    return pickle.dumps(
        WorkerJob(
            config=job.config,
            pickled_player=pickled_player,
            user_files=user_files(),
            places={name: directories[each.directory] for name, each in job.models.items()},
        )
    )


def _model_directories(job: RolloutJob) -> dict[Path, str]:
    """Each directory that a model of the run was made from -> its name at the workers."""
    return {
        path: str(place)
        for place, path in enumerate(dict.fromkeys(each.directory for each in job.models.values()))
    }


def _model_files(directories: Mapping[Path, str]) -> list[tuple[Path, str]]:
    """(file, name of its directory at the workers)."""
    return [
        (path, place)
        for directory, place in directories.items()
        for path in sorted(directory.iterdir())
        if path.is_file()
    ]


def _bytes_of(path: Path) -> NDArray[np.uint8]:
    return np.frombuffer(path.read_bytes(), np.uint8)
