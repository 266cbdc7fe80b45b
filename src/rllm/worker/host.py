"""Several workers in one process, over one directory of runs.

    contracts ──bound by `rllm.build.workers`──► WorkerHost ──► the doors: http, mcp, the command, Python

DIRECTORY/  runs.sqlite   every run and attempt, with its answer
            calls/        every model call, as `rllm serve` keeps them
            lock          held by the one process that writes
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rllm.build.workers import Models, open_worker_model, place_of
from rllm.contracts.answering import answer_schema
from rllm.contracts.contract import Contract
from rllm.contracts.worker_file import read_contract
from rllm.errors import ConfigError
from rllm.worker.actors import flow_behind
from rllm.worker.admission import Admission
from rllm.worker.attempt import Backing
from rllm.worker.disk import StoreThread
from rllm.worker.runtime import WorkerRuntime
from rllm.worker.steps import HostRunner, with_called_workers
from rllm.worker.store import Run, RunStore
from rllm.worker.telemetry import Telemetry


class WorkerHost:
    """Opens what the contracts are bound to, and closes it. An asynchronous context manager."""

    def __init__(
        self,
        contracts: Sequence[Contract],
        directory: Path,
        *,
        max_parallel: int = 64,
        max_queue: int = 1024,
        telemetry: Telemetry | None = None,
        seed: int = 0,
        threads: int = 0,
    ) -> None:
        """`telemetry` collects spans until the host is closed. `threads` of torch, for models that are here;
        0 takes one per core."""
        for name, value, least in (("max_parallel", max_parallel, 1), ("max_queue", max_queue, 0)):
            if value < least:
                raise ConfigError(f"`{name}` is {value}; it must be at least {least}.")
        by_id: dict[str, Contract] = {}
        for contract in contracts:
            if (other := by_id.get(contract.id)) is not None:
                raise ConfigError(f"{other.source} and {contract.source} have one id, {contract.id!r}.")
            by_id[contract.id] = contract
        self.directory = directory
        self.workers: dict[str, WorkerRuntime] = {}
        """By id."""
        self._runtimes: dict[str, WorkerRuntime] = {}
        """These, and those that their workflows call."""
        self._contracts = by_id
        self._limits = (max_parallel, max_queue)
        self._telemetry = telemetry or Telemetry()
        self._seed, self._threads = seed, threads
        self._disk: StoreThread | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        actors = await asyncio.to_thread(with_called_workers, list(self._contracts.values()))
        runner, models = HostRunner(lambda: self._runtimes), Models(threads=self._threads)
        # Closed in reverse: runtimes before their models, both
        # before the disk that takes the last ends of runs.
        async with AsyncExitStack() as stack:
            stack.callback(self._telemetry.close)
            disk = StoreThread(await asyncio.to_thread(RunStore, self.directory))
            stack.callback(disk.close)
            self._disk = disk
            for contract, actor in actors:
                model = await stack.enter_async_context(
                    open_worker_model(
                        contract.binding,
                        models,
                        beside=Path(contract.source).parent,
                        calls=self.directory / "calls" / contract.id,
                    )
                )
                runtime = WorkerRuntime(
                    contract,
                    Backing(
                        flow=flow_behind(contract, actor, runner, model),
                        model=model,
                        answer_schema=answer_schema(contract) if actor is None else None,
                    ),
                    disk,
                    admission=Admission(max_parallel=self._limits[0], max_queue=self._limits[1]),
                    telemetry=self._telemetry,
                    seed=self._seed,
                )
                stack.push_async_callback(runtime.close)
                self._runtimes[contract.id] = runtime
            self.workers |= {name: self._runtimes[name] for name in self._contracts}
            self._stack = stack.pop_all()
        return self

    async def runs_named(self, name: str) -> list[Run]:
        """The runs of workers here that somebody may call so: by their id, or by their key."""
        disk = self._open_disk()
        runs = await disk.call(lambda: disk.store.named(name))
        return [each for each in runs if each.worker in self.workers]

    async def try_to_write(self) -> None:
        """Raises StorageError where no run could be kept now."""
        await self._open_disk().try_to_write()

    def _open_disk(self) -> StoreThread:
        assert self._disk is not None, "the host is open"
        return self._disk

    async def reload_model(self, worker_id: str) -> str:
        """Let a worker have the model that its file names now; the model's name.

        No run is dropped: attempts that run end with the model that they began with. Raises ConfigError for a
        file whose contract differs in anything but the model, and for a model that cannot be loaded.
        """
        contract = self._contracts[worker_id]
        if not contract.source:
            raise ConfigError(f"{worker_id} was not read from a file; serve it from one.")
        new = await asyncio.to_thread(read_contract, contract.source)
        binding = replace(contract.binding, model=new.binding.model, base_url=new.binding.base_url)
        if new != replace(contract, binding=binding):
            raise ConfigError(
                f"{contract.source} differs from what is served in more than its model, or the server has "
                "another binding; restart it."
            )
        place = place_of(binding, Path(contract.source).parent)
        await self.workers[worker_id].switch_model(place)
        # After the switch: where the model cannot be loaded,
        # the next call still compares with what is served.
        self._contracts[worker_id] = new
        return new.binding.model

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self.workers.clear()
        self._runtimes.clear()
