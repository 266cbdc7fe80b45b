"""Workers as steps of a workflow: inputs that fit a contract in, outputs that fit it out.

    self.worker("summarise", inputs) ──► input schema ──► who does the work?
        nobody is bound: the workflow's own policy, as the role `summarise` ──► a trajectory, trained on
        a program, a model: the WorkerRunner that the workflow was handed   ──► own model, limits, retries
                                          └── output schema ──► WorkerStep, or an outcome of the episode

A policy that breaks the contract fails the episode (WorkerStepError), or is paid the configured penalty and
the episode ends there. Another's failure says nothing about the policy: InferenceError.
"""

import asyncio
import hashlib
import inspect
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rllm.contracts.answering import (
    answer_schema,
    checked_outputs,
    is_json,
    messages_for,
    read_answer,
    repair_message,
)
from rllm.contracts.contract import Contract, RunStatus
from rllm.contracts.schemas import Violation
from rllm.contracts.worker_file import read_contract
from rllm.errors import ConfigError, InferenceError, WorkerStepError
from rllm.inference.rollout_engine import RolloutEngine
from rllm.types.episode import Step, TerminationEvent, TerminationReason, Trajectory


@dataclass(kw_only=True, slots=True)
class StepReply:
    """The answer of a worker that has its own model or program."""

    status: RunStatus
    outputs: dict[str, Any] | None = None
    message: str = ""
    """The reason that there are no outputs."""
    observability: dict[str, Any] = field(default_factory=dict[str, Any])


class WorkerRunner(Protocol):
    """Runs the workers that a workflow does not play itself."""

    async def run_step(self, contract: Contract, inputs: Mapping[str, Any], key: str) -> StepReply:
        """`key` names the run where the inputs do not; raises nothing for what the worker does."""
        ...


OpenWorkers = Callable[[Mapping[str, Contract], Path], AbstractAsyncContextManager[WorkerRunner]]
"""(contracts by name, directory for their runs) -> a runner, open for as long as its `with`."""


@asynccontextmanager
async def opened_workers(
    open_workers: OpenWorkers | None, contracts: Mapping[str, Contract], directory: Path
) -> AsyncIterator[WorkerRunner | None]:
    """None where nobody opens them, or the policy plays all of them."""
    if open_workers is None or all(map(is_played_by_policy, contracts.values())):
        yield None
        return
    async with open_workers(contracts, directory) as runner:
        yield runner


@dataclass(kw_only=True, slots=True)
class WorkerStep:
    """A step that kept to its contract."""

    outputs: dict[str, Any]
    trajectory: Trajectory | None = None
    """The policy's answer: set its `reward`. None for a worker with its own model or program."""
    observability: dict[str, Any] = field(default_factory=dict[str, Any])


def worker_contracts(workflow_class: type[Any]) -> dict[str, Contract]:
    """The contracts of the class's `workers`. Raises ContractError, or ConfigError for what names none."""
    workers = getattr(workflow_class, "workers", None) or {}
    if not isinstance(workers, Mapping):
        return {}  # an attribute of the user's own
    contracts: dict[str, Contract] = {}
    for name, place in workers.items():
        if isinstance(place, Contract):
            contracts[name] = place
        elif isinstance(place, str | Path):
            contracts[name] = read_contract(_folder_of(workflow_class) / place)
        else:
            raise ConfigError(
                f"`{workflow_class.__name__}.workers[{name!r}]` is {place!r:.100}; give the path of its "
                "worker.md file, or a Contract."
            )
    return contracts


def is_played_by_policy(contract: Contract) -> bool:
    """Nobody is bound to it: whoever calls it does its work."""
    return not contract.binding.is_bound


def require_workers(
    workflow_name: str, contracts: Mapping[str, Contract], runner: WorkerRunner | None
) -> None:
    """Raises ConfigError for a workflow whose workers nobody can run."""
    for name, contract in contracts.items():
        if runner is None and not is_played_by_policy(contract):
            raise ConfigError(
                f"`{workflow_name}` calls the worker `{name}`, whose contract names who does its "
                "work, but nobody here runs it; give `workers=`, or leave `rllm:` out of "
                f"{contract.source or 'its contract'} so that the policy plays it."
            )


@dataclass(kw_only=True, slots=True)
class WorkerSteps:
    """The worker steps of one attempt."""

    contracts: Mapping[str, Contract]
    rollout_engine: RolloutEngine
    runner: WorkerRunner | None = None
    penalty: float | None = None
    """Reward of an answer that breaks a contract; None fails the episode instead."""
    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    """The policy's answers as workers, in the order in which the steps ended."""
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """One for every step: worker, status, attempts, time."""
    _numbers: dict[str, int] = field(default_factory=dict[str, int])

    async def run(self, name: str, inputs: Mapping[str, Any]) -> WorkerStep:
        """Raises WorkerStepError, TerminationEvent (the penalty), InferenceError or TimeoutError."""
        contract = self.contracts.get(name)
        if contract is None:
            raise ConfigError(
                f"There is no worker `{name}`; the workflow's `workers` has "
                f"{', '.join(self.contracts) or 'none'}."
            )
        # Calls of one worker are told apart by their number, also where their inputs are equal.
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        started_s = time.perf_counter()
        record: dict[str, Any] = {"worker": name, "version": contract.version, "status": "retryable_error"}
        self.records.append(record)
        key = f"{'/'.join(map(str, self.rollout_engine.key))}/{name}/{number}"
        if not is_played_by_policy(contract) and is_json(inputs):
            # Another try of the attempt may come with other inputs: a run of its own, and no conflict.
            key += f"/{hashlib.blake2b(json.dumps(inputs).encode(), digest_size=8).hexdigest()}"
        filled_inputs = contract.with_key(inputs, key)
        try:
            violation = _input_violation(contract, filled_inputs)
            if violation is not None:
                record["status"] = str(RunStatus.INVALID_REQUEST)
                raise WorkerStepError(f"The input of the worker `{name}` breaks its schema at {violation}.")
            if is_played_by_policy(contract):
                return await self._by_policy(name, contract, filled_inputs, key, record)
            return await self._by_runner(name, contract, filled_inputs, key, record)
        finally:
            record["duration_ms"] = round(1000 * (time.perf_counter() - started_s), 3)

    async def _by_runner(
        self, name: str, contract: Contract, inputs: Mapping[str, Any], key: str, record: dict[str, Any]
    ) -> WorkerStep:
        assert self.runner is not None, "`require_workers` made sure of it"
        reply = await self.runner.run_step(contract, inputs, key)
        record |= {"status": str(reply.status), **reply.observability}
        if reply.outputs is None:
            raise InferenceError(f"The worker `{name}` ended with {reply.status}: {reply.message}")
        return WorkerStep(outputs=reply.outputs, observability=record)

    async def _by_policy(
        self, name: str, contract: Contract, inputs: Mapping[str, Any], key: str, record: dict[str, Any]
    ) -> WorkerStep:
        run_id = str(inputs.get("run_id", key))
        violation: Violation | None = None
        async with asyncio.timeout(contract.constraints.timeout_seconds):
            for attempt in range(1, contract.constraints.max_attempts + 1):
                record["attempt"] = attempt
                trajectory = Trajectory(name=name, input=dict(inputs))
                outputs, violation = await self._attempt(contract, inputs, run_id, trajectory, record)
                if outputs is not None:
                    trajectory.output = outputs
                    self.trajectories.append(trajectory)
                    record["status"] = str(RunStatus.OK)
                    return WorkerStep(outputs=outputs, trajectory=trajectory, observability=record)
                # Without a penalty such an answer is no part of the episode: its call is only counted.
                if self.penalty is not None:
                    trajectory.steps[-1].reward = trajectory.reward = self.penalty
                    self.trajectories.append(trajectory)
        record["status"] = str(RunStatus.INVALID_OUTPUT)
        assert violation is not None, "every attempt gives the one or the other"
        if self.penalty is not None:
            raise TerminationEvent(TerminationReason.ENV_DONE)
        raise WorkerStepError(
            f"The worker `{name}` broke its contract in all {contract.constraints.max_attempts} attempts. "
            f"{violation.message}"
        )

    async def _attempt(
        self,
        contract: Contract,
        inputs: Mapping[str, Any],
        run_id: str,
        trajectory: Trajectory,
        record: dict[str, Any],
    ) -> tuple[dict[str, Any] | None, Violation | None]:
        """One conversation: a question, and where the contract says so a turn to repair the answer."""
        messages = messages_for(contract, inputs)
        engine, schema, role = self.rollout_engine, answer_schema(contract), trajectory.name
        is_enforced = await engine.enforces(schema, role=role)
        violation: Violation | None = None
        for turn in range(1 + contract.constraints.repair):
            output = await engine.get_model_response(
                messages, role=role, response_schema=schema if is_enforced else None
            )
            record["output_schema"] = "enforced" if is_enforced else "repaired" if turn else "checked"
            outputs, violation = checked_outputs(contract, read_answer(output.content), run_id)
            trajectory.steps.append(Step.from_model_output(output, messages, action=outputs))
            if violation is None:
                return outputs, None
            messages = [
                *messages,
                {"role": "assistant", "content": output.content},
                repair_message(violation),
            ]
        return None, violation


def with_worker_trajectories(trajectories: list[Trajectory], steps: WorkerSteps) -> list[Trajectory]:
    """`trajectories` and those of the workers that are not among them."""
    uids = {each.uid for each in trajectories}
    return [*trajectories, *(each for each in steps.trajectories if each.uid not in uids)]


def _input_violation(contract: Contract, inputs: Mapping[str, Any]) -> Violation | None:
    if not is_json(inputs):
        return Violation("$", "it is no JSON: it holds NaN, infinity or other values")
    return contract.input_schema.first_violation(inputs)


def _folder_of(workflow_class: type[Any]) -> Path:
    """Where the file of the class is: names in its `workers` begin there."""
    try:
        return Path(inspect.getfile(workflow_class)).parent
    except (TypeError, OSError):  # of a notebook, or of the prompt
        return Path()
