"""A host for the workers of a workflow that is trained or evaluated."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from rllm.contracts.contract import Contract
from rllm.errors import MissingExtraError
from rllm.workflows.workers import WorkerRunner, is_played_by_policy


@asynccontextmanager
async def open_workers(contracts: Mapping[str, Contract], directory: Path) -> AsyncIterator[WorkerRunner]:
    """A runner for the contracts that name who does their work; see `rllm.workflows.workers.OpenWorkers`.

    Their models take as many threads as the run has.
    """
    try:
        from rllm.models.devices import num_threads
        from rllm.worker.host import (
            WorkerHost,
        )  # brings servers and clients: not for commands without workers
        from rllm.worker.steps import HostRunner
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    bound = {each.id: each for each in contracts.values() if not is_played_by_policy(each)}
    async with WorkerHost(list(bound.values()), directory, threads=num_threads()) as host:
        yield HostRunner(lambda: host.workers)
