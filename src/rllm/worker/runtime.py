"""One contract at work: requests in, the same answer for the same key, whatever crashes in between.

    request ──schema──► key known? ──final──► the bytes that were answered before
                            │ ──under way──► joined: the same answer for both
                            │ ──other input──► conflict
                            ▼
                        admission ──► attempt, on disk before it begins ──► program ──► output schema
                                          ▲                                              │
                                          └── broken, and attempts and time are left ────┘

An attempt that fails for reasons of the infrastructure is answered at once as retryable: the same key starts
the next one. A response is on disk before it leaves.
"""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from rllm.build.providers import ModelPlace
from rllm.contracts.answering import checked_outputs
from rllm.contracts.contract import Contract, RunStatus
from rllm.engine.program_threads import OutOfTime, ProgramRunner
from rllm.errors import ConfigError
from rllm.gateway.server.counts import Histogram
from rllm.types.draws import draw_seed
from rllm.types.task import Task
from rllm.worker.admission import Admission, AdmissionRefused
from rllm.worker.attempt import (
    AttemptResult,
    Backing,
    by_call,
    completion_tokens_of,
    play_attempt,
    prompt_tokens_of,
)
from rllm.worker.disk import StoreThread
from rllm.worker.replies import MAX_KEY_CHARACTERS, Replies, RunUnderWay, is_text
from rllm.worker.response import ErrorCode, RunError, WorkerResponse
from rllm.worker.store import Run, canonical_json, digest_of
from rllm.worker.telemetry import Telemetry

_T = TypeVar("_T")
_LONG_CHARACTERS = 32_768
"""The length of JSON that takes some 10 ms to check."""
Progress = dict[str, Any]
"""An event of a run: `event`, `attempt`, and what belongs to it."""


class WorkerRuntime:
    """Runs one contract. Its methods are for one event loop; `disk` may serve several runtimes."""

    def __init__(
        self,
        contract: Contract,
        backing: Backing,
        disk: StoreThread,
        *,
        admission: Admission | None = None,
        telemetry: Telemetry | None = None,
        seed: int = 0,
    ) -> None:
        self.contract = contract
        self.backing = backing
        self.disk = disk
        self.store = disk.store
        self.admission = admission or Admission()
        self.seed = seed
        self.counts: Counter[str] = Counter()
        """Requests by status, and `joined`, `replayed`, `attempts`, `model_calls`, `prompt_tokens`,
        `completion_tokens`."""
        self.durations = Histogram()
        """The durations of the runs that ended, s."""
        self.cost = 0.0
        self._key_type = int if contract.key_type == "integer" else str
        self._replies = Replies(contract)
        self._telemetry = telemetry or Telemetry()
        self._runner = ProgramRunner(stops_threads=True)
        self._tasks: dict[str, asyncio.Task[WorkerResponse]] = {}
        """The tasks of the runs under way, by key."""
        self._digests: dict[str, bytes] = {}
        self._num_callers: Counter[str] = Counter()
        """Those who wait for each of them."""
        self._watchers: dict[str, set[asyncio.Queue[Progress]]] = {}

    async def close(self) -> None:
        """End what runs. What was not answered goes on with the next request for its key."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._runner.close()

    async def run(
        self,
        inputs: Any,
        *,
        trace: str = "",
        timeout_s: float | None = None,
        ends_with_caller: bool = False,
    ) -> WorkerResponse:
        """The answer to one request. `timeout_s` may shorten the contract's own limit. `trace`: a W3C
        `traceparent`, or any name that the caller has for it.

        Cancelling the call leaves the run under way, and another call with its key joins it; with
        `ends_with_caller` it ends the run as well, unless somebody else waits for it. Raises StorageError
        where the disk refuses, and nothing for what the worker or its model does.
        """
        with self._telemetry.request(self.contract, trace) as span:
            response = await self._respond(inputs, span.trace_id, timeout_s, ends_with_caller)
            span.set_response(response)
        self.counts[str(response.status)] += 1
        return response

    async def run_all(
        self,
        requests: Sequence[Any],
        *,
        num_callers: int,
        on_answer: Callable[[WorkerResponse], object] = lambda response: None,
    ) -> list[WorkerResponse]:
        """The answers, in the order of the requests, to so many callers who ask for one after another: the
        time of a run begins when its turn has come. Raises StorageError as `run` does."""
        # One iterator for all callers, so that each request is taken by exactly one of them.
        remaining = iter(enumerate(requests))
        answers: dict[int, WorkerResponse] = {}

        async def call() -> None:
            for number, inputs in remaining:
                answers[number] = await self.run(inputs)
                on_answer(answers[number])

        await asyncio.gather(*(call() for _ in range(min(num_callers, len(requests)))))
        return [answers[number] for number in range(len(requests))]

    async def _respond(
        self, inputs: Any, trace_id: str, timeout_s: float | None, ends_with_caller: bool
    ) -> WorkerResponse:
        text = _json_text(inputs)
        key = None if text is None else self._key_of(inputs)
        if text is None or key is None:
            return self._replies.unstored(self._replies.problem_of(inputs), trace_id)
        digest = digest_of(text)
        task = self._tasks.get(key)
        if task is not None and self._digests[key] != digest:
            return self._replies.unstored(self._replies.conflict(key), trace_id)
        if task is not None:
            self.counts["joined"] += 1
        else:
            limit_s = self.contract.constraints.timeout_seconds
            allowed_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
            task = asyncio.create_task(self._answer(key, text, trace_id, allowed_s))
            # There is no await since the look-up above, so two requests with one key cannot both start a run.
            self._tasks[key], self._digests[key] = task, digest
            task.add_done_callback(lambda _: self._forget(key))
        self._num_callers[key] += 1
        try:
            # A caller who goes away cancels this call, not the run that others may wait for.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():  # the caller has gone
                if ends_with_caller and self._num_callers[key] == 1:
                    task.cancel()
                raise
            error = RunError(code=ErrorCode.CANCELLED, message="The run was cancelled.")
            return self._replies.reply(None, RunStatus.RETRYABLE_ERROR, trace_id, error=error)
        finally:
            self._num_callers[key] -= 1
            if not self._num_callers[key]:
                del self._num_callers[key]

    async def cancel(self, key: str) -> bool:
        """End a run under way. Its attempt counts; the same key starts the next one."""
        task = self._tasks.get(key)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait({task})
        return True

    def is_under_way(self, key: str) -> bool:
        return key in self._tasks

    async def watch(self, key: str) -> AsyncGenerator[Progress, None]:
        """Events of the run under way with this key, from now on until it ends; none where none is under way.

        Whoever is slow misses nothing: a run has few events.
        """
        task = self._tasks.get(key)
        if task is None:
            return
        events: asyncio.Queue[Progress] = asyncio.Queue()
        self._watchers.setdefault(key, set()).add(events)
        try:
            while not task.done():
                coming = asyncio.ensure_future(events.get())
                try:
                    await asyncio.wait({coming, task}, return_when=asyncio.FIRST_COMPLETED)
                    if coming.done():
                        yield coming.result()
                finally:
                    coming.cancel()
            # What was told between the last wait and the end of the run.
            while not events.empty():
                yield events.get_nowait()
        finally:
            self._watchers[key].discard(events)
            if not self._watchers[key]:
                del self._watchers[key]

    def _tell(self, run: Run, event: str, **facts: Any) -> None:
        for watcher in self._watchers.get(run.key, ()):
            watcher.put_nowait({"event": event, "attempt": run.attempts, **facts})

    async def switch_model(self, place: ModelPlace) -> None:
        """Attempts from now on have this model; those that run end with theirs. Nothing changes where it
        cannot be loaded."""
        if self.backing.model is None:
            raise ConfigError(f"{self.contract.id} has no model that another could take the place of.")
        await self.backing.model.switch_to(place, anew=True)

    def has_model_in_service(self) -> bool:
        """Whether an attempt could ask its model now; true for programs that ask none of ours."""
        model = self.backing.model
        return model is None or bool(model.health().get("healthy", True))

    async def find(self, key: str) -> Run | None:
        return await self.disk.call(lambda: self.store.find(self.contract.id, key))

    async def add_feedback(self, key: str, feedback: Mapping[str, Any]) -> str:
        """Keep what somebody thinks of a final run: `score`, `label`, corrected `outputs`.

        Outputs may leave out what the runtime fills in.

        Empty, or why it was refused.
        """
        run = await self.find(key)
        if run is None or not run.is_final:
            return f"There is no final run with the key {key!r:.100}."
        if "outputs" in feedback:
            outputs, violation = checked_outputs(
                self.contract, feedback["outputs"], self._replies.run_id(run)
            )
            if violation is not None:
                return f"`outputs` is not what the run could have given. {violation.message}"
            feedback = {**feedback, "outputs": outputs}
        await self.disk.call(lambda: self.store.add_feedback(run.id, feedback))
        return ""

    # ---- one run -------------------------------------------------------------------------------------------

    async def _answer(self, key: str, text: str, trace_id: str, allowed_s: float) -> WorkerResponse:
        """`text` is the canonical JSON of the inputs."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        digest = digest_of(text)
        # Whoever has no key of their own has the run's id, so that they can ask for it.
        run_id = uuid.uuid4().hex if self.contract.constraints.idempotency_key else key
        run = await self.find(key) or Run(
            worker=self.contract.id, key=key, id=run_id, digest=digest, attempts=0
        )
        if run.digest != digest:
            return self._replies.unstored(self._replies.conflict(key), trace_id)
        if run.response is not None:
            self.counts["replayed"] += 1
            return WorkerResponse.from_body(run.response)
        deadline_s = started_s + allowed_s
        try:
            violation = await self._checked(
                len(text), deadline_s, lambda: self._replies.problem_of(json.loads(text))
            )
        except OutOfTime:
            message = f"The {allowed_s:g} s of the run were over before its input was checked."
            error = RunError(code=ErrorCode.TIMEOUT, message=message)
            return self._replies.reply(run, RunStatus.RETRYABLE_ERROR, trace_id, error=error)
        if violation is not None:
            response = self._replies.reply(run, RunStatus.INVALID_REQUEST, trace_id, error=violation)
            return await self._finish(run, text, response)
        under_way = RunUnderWay(run=run, started_s=started_s, deadline_s=deadline_s, trace_id=trace_id)
        if run.attempts >= self.contract.constraints.max_attempts:
            response = self._replies.exhausted(under_way, "The last attempt was cut off before it ended.")
            return await self._finish(run, text, response)
        try:
            self.admission.require_room(allowed_s)
            async with self.admission.place(under_way.deadline_s):
                response = await self._attempts(under_way, text)
            self.durations.add(loop.time() - started_s)
            return response
        except AdmissionRefused as refused:
            return self._replies.refused(refused, trace_id)
        except TimeoutError:
            reason = f"The {allowed_s:g} s of the run were over before there was room to start it."
            return self._replies.refused(AdmissionRefused(reason, self.admission.expected_wait_s), trace_id)

    async def _finish(self, run: Run, text: str, response: WorkerResponse) -> WorkerResponse:
        await self.disk.call(lambda: self.store.finish(run, text, response.status, response.body))
        return response

    async def _attempts(self, under_way: RunUnderWay, text: str) -> WorkerResponse:
        """Attempts until one fits the output schema, none is left, or time is up."""
        run, most = under_way.run, self.contract.constraints.max_attempts
        while True:
            result, raw, outputs, error = await self._attempt(under_way, text)
            if error is None:
                response = self._replies.reply(
                    run, RunStatus.OK, under_way.trace_id, outputs=outputs, under_way=under_way, result=result
                )
                return await self._end(run, raw, response, None, is_final=True)
            is_last = run.attempts >= most
            if error.code is ErrorCode.SCHEMA:
                has_time = asyncio.get_running_loop().time() < under_way.deadline_s
                response = self._replies.reply(
                    run, RunStatus.INVALID_OUTPUT, under_way.trace_id, error=error, under_way=under_way
                )
                ended = await self._end(run, raw, response, error, is_final=is_last or not has_time)
                if is_last or not has_time:
                    return ended
                continue
            if is_last:
                response = self._replies.exhausted(under_way, error.message, cause=error.code)
            else:
                response = self._replies.reply(
                    run, RunStatus.RETRYABLE_ERROR, under_way.trace_id, error=error, under_way=under_way
                )
            return await self._end(run, raw, response, error, is_final=is_last)

    async def _attempt(
        self, under_way: RunUnderWay, text: str
    ) -> tuple[AttemptResult, str, dict[str, Any] | None, RunError | None]:
        """The outcome, its value as a text, the outputs if they fit, and why there are none."""
        run = under_way.run
        session_id = f"{run.id}-{run.attempts + 1}"
        number = await self.disk.call(lambda: self.store.start_attempt(run, text, session_id))
        self.counts["attempts"] += 1
        self._tell(run, "attempt")
        inputs = json.loads(text)  # its own copy
        task = Task(id=run.id, instruction=json.dumps(inputs, ensure_ascii=False), metadata=inputs)
        with self._telemetry.attempt(self.contract, number, self._replies.run_id(run)) as span:
            try:
                # The attempt is on disk already: a crash from here
                # on uses it up, and cannot make its key try forever.
                result = await play_attempt(
                    self.backing,
                    self._runner,
                    task,
                    session_id=session_id,
                    # Of the attempt's number too: with the same draws
                    # the model would repeat the answer that did not fit.
                    seed=draw_seed(self.seed, self.contract.id, run.key, number),
                    timeout_s=under_way.deadline_s - asyncio.get_running_loop().time(),
                )
            except asyncio.CancelledError:
                error = RunError(code=ErrorCode.CANCELLED, message="The run was cancelled.")
                response = self._replies.reply(
                    run, RunStatus.RETRYABLE_ERROR, under_way.trace_id, error=error, under_way=under_way
                )
                span.set_result(AttemptResult(), error)
                # This task is being cancelled, and a second cancellation must not keep the end from the disk.
                await asyncio.shield(self._end(run, "", response, error, is_final=False))
                raise
            under_way.enforcement = result.enforcement
            self._add_usage(under_way, result)
            raw = "" if result.value is None else _raw_text(result.value)
            try:
                outputs, error = await self._checked(
                    len(raw), under_way.deadline_s, lambda: self._replies.checked(run, result)
                )
            except OutOfTime:
                message = "The time of the run was over before its result was checked."
                outputs, error = None, RunError(code=ErrorCode.TIMEOUT, message=message)
            span.set_result(result, error)
        return result, raw, outputs, error

    async def _checked(self, num_characters: int, deadline_s: float, check: Callable[[], _T]) -> _T:
        """The answer of `check`; of a long text in a thread, so that others are answered meanwhile.

        Raises OutOfTime at the deadline.
        """
        if num_characters < _LONG_CHARACTERS:
            return check()
        left_s = max(deadline_s - asyncio.get_running_loop().time(), 0.001)
        end = await self._runner.run(check, is_async=False, timeout_s=left_s)
        if end.error is not None:
            raise end.error
        return end.value

    def _add_usage(self, under_way: RunUnderWay, result: AttemptResult) -> None:
        calls = [first for first, *_ in by_call(result.calls)]
        usage = Counter(
            model_calls=len(calls),
            prompt_tokens=sum(map(prompt_tokens_of, calls)),
            completion_tokens=sum(map(completion_tokens_of, calls)),
        )
        under_way.usage += usage
        self.counts.update(usage)
        self.cost += self._replies.prices.cost(usage["prompt_tokens"], usage["completion_tokens"]) or 0.0

    async def _end(
        self,
        run: Run,
        raw: str,
        response: WorkerResponse,
        error: RunError | None,
        *,
        is_final: bool,
    ) -> WorkerResponse:
        """Keep how the attempt ended, and the response if it is the last word."""
        status, body = response.status, response.body if is_final else None
        await self.disk.call(
            lambda: self.store.end_attempt(
                run, status=status, error=error.to_dict() if error else None, result=raw, response=body
            )
        )
        self._tell(run, "attempt_ended", status=str(status))
        return response

    def _key_of(self, inputs: Any) -> str | None:
        """The key of the run; None where the input is too broken to have one."""
        name = self.contract.constraints.idempotency_key
        if not isinstance(inputs, Mapping):
            return None
        if not name:
            return uuid.uuid4().hex
        value = inputs.get(name)
        # The number 1 is another key than the text, and at most one of them is of the schema's type.
        if isinstance(value, bool) or not isinstance(value, self._key_type):
            return None
        key = str(value)
        return key if len(key) <= MAX_KEY_CHARACTERS and is_text(key) else None

    def _forget(self, key: str) -> None:
        self._tasks.pop(key, None)
        self._digests.pop(key, None)


def _json_text(inputs: Any) -> str | None:
    """The canonical JSON of the inputs; None where JSON has not all of them."""
    try:
        return canonical_json(inputs)
    except (TypeError, ValueError, RecursionError):
        return None


def _raw_text(value: Any) -> str:
    """A result as it came, for the record: JSON where it can be."""
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no texts, or a value within itself
        return repr(value)
