"""The workers that a workflow calls, run by the runtimes of a host.

workflow (in the programs' loop, or the trainer's) ──run_step──► WorkerRuntime (in the host's loop)
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm.build.actors import Actor
from rllm.build.workers import actor_of
from rllm.contracts.contract import Contract
from rllm.errors import ConfigError
from rllm.worker.runtime import WorkerRuntime
from rllm.workflows.workers import StepReply, is_played_by_policy, worker_contracts


class HostRunner:
    """Runs steps by the id of their contract, from whatever event loop a workflow is in."""

    def __init__(self, runtimes: Callable[[], Mapping[str, WorkerRuntime]]) -> None:
        self._runtimes = runtimes
        self._loop = asyncio.get_running_loop()

    async def run_step(self, contract: Contract, inputs: Mapping[str, Any], key: str) -> StepReply:
        """See `rllm.workflows.workers.WorkerRunner`."""
        runtime = self._runtimes()[contract.id]
        call = runtime.run(dict(inputs), ends_with_caller=True)
        # Cancelling what is awaited here cancels the call in the host's loop.
        response = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
        value = response.to_dict()
        error = value["error"] or {}
        return StepReply(
            status=response.status,
            outputs=response.outputs,
            message=f"{error.get('code')}: {error.get('message')}" if error else "",
            observability=value["observability"],
        )


def with_called_workers(contracts: Sequence[Contract]) -> list[tuple[Contract, Actor | None]]:
    """The contracts and those that their workflows call, callees first, each with who does its work.

    Raises ConfigError for workers that call each other in a circle, and for two of one id.
    """
    order: dict[str, tuple[Contract, Actor | None]] = {}

    def visit(contract: Contract, path: tuple[str, ...]) -> None:
        if contract.id in path:
            raise ConfigError(f"Workers call each other in a circle: {' calls '.join((*path, contract.id))}.")
        if contract.id in order:
            if order[contract.id][0] != contract:
                other = order[contract.id][0]
                raise ConfigError(f"{other.source} and {contract.source} have one id, {contract.id!r}.")
            return
        beside = Path(contract.source).parent
        actor = actor_of(contract.binding, beside=beside, what=contract.source or contract.id)
        for callee in called_by(actor).values():
            if not is_played_by_policy(callee):
                visit(callee, (*path, contract.id))
        order[contract.id] = (contract, actor)

    for contract in contracts:
        visit(contract, ())
    return list(order.values())


def called_by(actor: Actor | None) -> dict[str, Contract]:
    """The workers of a workflow; none of anybody else."""
    return {} if actor is None or actor.workflow is None else worker_contracts(actor.workflow)
