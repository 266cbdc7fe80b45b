"""One attempt of a worker: inputs in, what its program gave out, and what it cost.

    inputs ──► Task ──► program(task, AgentConfig) ──► a dict, JSON text, an Episode, or None
                              │ model calls, through a session of the gateway
    without a program: the model is asked once, under the output schema ──► JSON text

Whatever the program raises ends this attempt alone.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rllm.agents.flow import AgentFlow
from rllm.build.workers import WorkerModel
from rllm.contracts.answering import read_answer
from rllm.engine.program_threads import OutOfTime, ProgramEnd, ProgramRunner
from rllm.errors import InferenceError
from rllm.types.episode import Episode, Trajectory
from rllm.types.task import AgentConfig, Task
from rllm.types.wire import CallRecord, CallStatus
from rllm.worker.response import ErrorCode, RunError

_MAX_MESSAGE = 2000
OWN_PROVIDER = "rllm"
"""The provider's name of the built-in engine."""


class Enforcement(StrEnum):
    """The way in which outputs came to fit their schema."""

    ENFORCED = "enforced"
    """While sampling: nothing else could be written."""
    REPAIRED = "repaired"
    """The model was told what did not fit and asked once more."""
    CHECKED = "checked"


@dataclass(kw_only=True, slots=True)
class Backing:
    """The actor behind a contract, ready to be called."""

    flow: AgentFlow
    model: WorkerModel | None = None
    """None for a program that asks no model of ours."""
    answer_schema: Mapping[str, Any] | None = None
    """The schema of the answer of a model that answers alone."""


@dataclass(kw_only=True, slots=True)
class AttemptResult:
    """The result of an attempt: exactly one of `value` and `error` counts."""

    value: Any = None
    """The value that may be the outputs; checked by the caller."""
    error: RunError | None = None
    calls: list[CallRecord] = field(default_factory=list[CallRecord])
    """The model calls, as the gateway captured them: a record for each choice."""
    provider: str = OWN_PROVIDER
    """The provider of that model, as OpenTelemetry calls it."""
    enforcement: Enforcement = Enforcement.CHECKED
    artifacts: dict[str, Any] = field(default_factory=dict[str, Any])


async def play_attempt(
    backing: Backing, runner: ProgramRunner, task: Task, *, session_id: str, seed: int, timeout_s: float
) -> AttemptResult:
    """Run the program once, for at most `timeout_s`."""
    model, schema = backing.model, backing.answer_schema
    can_enforce = model is not None and schema is not None and await model.can_enforce(schema)
    place = None if model is None else model.current.place
    is_server = place is not None and place.is_server
    session = None if model is None else model.open_session(session_id, seed=seed)
    config = AgentConfig(
        base_url="" if session is None else session.base_url,
        model="" if model is None else model.current.name,
        session_uid=session_id,
        metadata={
            "task_id": task.id,
            "deadline_s": time.time() + timeout_s,
            # A server may enforce it or not, and does not say; the built-in engine refuses what it cannot.
            "sends_schema": can_enforce or is_server,
        },
    )

    async def give_up() -> None:
        if session is not None and model is not None:
            await session.close()  # its calls fail at once, so that it may end by itself
            await model.close_session(session_id)

    error: BaseException | None = None
    end = ProgramEnd()
    try:
        end = await runner.run(
            backing.flow.run,
            task,
            config,
            is_async=backing.flow.is_async,
            timeout_s=max(timeout_s, 0.001),
            give_up=give_up,
        )
        error = end.error
    except OutOfTime as late:
        error = late
    finally:
        # After a good end too: no call can come in after those that are read below.
        await give_up()
    calls = [] if session is None else session.traces()
    result = AttemptResult(
        calls=calls,
        provider=str(place.protocol) if place is not None and is_server else OWN_PROVIDER,
        enforcement=_enforcement(can_enforce, was_asked_again=schema is not None and len(by_call(calls)) > 1),
    )
    result.error = _error_of(error, calls)
    if result.error is None:
        result.value, artifacts = _value_of(end.value, calls)
        try:
            # A fault of the program, so it has to show here and not where the response is written.
            result.artifacts = json.loads(json.dumps(artifacts, default=str, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as fault:
            result.error = RunError(code=ErrorCode.PROGRAM, message=f"Its artifacts are no JSON: {fault}.")
    return result


def prompt_tokens_of(call: CallRecord) -> int:
    """As its server counted them, else as many as were captured."""
    return call.usage.get("prompt_tokens", len(call.prompt_ids))


def completion_tokens_of(call: CallRecord) -> int:
    """As its server counted them, else as many as were captured."""
    return call.usage.get("completion_tokens", len(call.completion_ids))


def by_call(records: Sequence[CallRecord]) -> list[list[CallRecord]]:
    """The choices of each call together: all have the usage of the whole call."""
    calls: list[list[CallRecord]] = []
    for record in records:
        if calls and record.choice > calls[-1][-1].choice and record.id == calls[-1][-1].id:
            calls[-1].append(record)
        else:
            calls.append([record])
    return calls


def _enforcement(can_enforce: bool, *, was_asked_again: bool) -> Enforcement:
    if can_enforce:
        return Enforcement.ENFORCED
    return Enforcement.REPAIRED if was_asked_again else Enforcement.CHECKED


def _error_of(error: BaseException | None, calls: list[CallRecord]) -> RunError | None:
    if isinstance(error, OutOfTime):
        return RunError(code=ErrorCode.TIMEOUT, message=str(error))
    failed = next((call for call in reversed(calls) if call.status is not CallStatus.OK), None)
    if error is None:
        return None
    # A client that a program brings raises errors of its
    # own kinds, so how the last call ended counts as well.
    if isinstance(error, InferenceError) or (failed is not None and calls and failed is calls[-1]):
        return RunError(code=ErrorCode.MODEL, message=f"A model call failed: {_text_of(error)}")
    return RunError(code=ErrorCode.PROGRAM, message=_text_of(error))


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]


def _value_of(value: Any, calls: list[CallRecord]) -> tuple[Any, dict[str, Any]]:
    """The outputs and the artifacts in what a program returned.

    None stands for the last answer that its model gave.
    """
    artifacts: dict[str, Any] = {}
    if isinstance(value, Episode):
        artifacts = {name: each for name, each in value.artifacts.items() if name != "output"}
        value = value.artifacts.get("output", value.artifacts.get("answer"))
    elif isinstance(value, Trajectory):
        value = value.output
    if value is None and calls:
        value = calls[-1].response.get("content")
    if isinstance(value, Mapping):
        return dict(value), artifacts
    if isinstance(value, str):
        return read_answer(value), artifacts
    return value, artifacts
