"""The life of a model call, from a parsed request to an answer that is on disk.

    CallRequest ──► ClientCall ──task──► Policy.answer ──► records ──► Ledger.append ──► Answer
                     ▲ waiters: the client, its retries  │ failed, broke off, cancelled
                     └── the last one leaves: it stops   └──► error or partial record ──► RequestRefused

The answer is nobody's before its record is on disk. This is where what a policy raises becomes data.
"""

import asyncio
import copy
import logging
import time

from rllm.errors import (
    ConfigError,
    ContextLengthError,
    CountError,
    InferenceError,
    PartialAnswer,
    RequestRefused,
    StorageError,
)
from rllm.gateway.ledger import Ledger
from rllm.gateway.server.budgets import SessionBudget
from rllm.gateway.server.call_records import Circumstances, answer_so_far, error_record, records_of
from rllm.gateway.server.counts import Counts
from rllm.gateway.server.delivery import KEEP_ALIVE_S, EventSink
from rllm.gateway.server.retries import Placement, Retries
from rllm.gateway.server.sessions import Session
from rllm.types.wire import (
    Answer,
    CallRecord,
    CallRequest,
    CallStatus,
    Emit,
    Piece,
    Policy,
    completion_id,
)

_log = logging.getLogger(__name__)


# New ones each time: an exception that is raised again and again collects the tracebacks of all.


def client_left() -> RequestRefused:
    return RequestRefused(
        "The client disconnected before the answer was whole.",
        status=499,
        kind="client_disconnected",
        code="client_disconnected",
    )


def gateway_closed() -> RequestRefused:
    return RequestRefused(
        "The gateway is shutting down; try again when it is back.",
        status=503,
        kind="server_error",
        code="gateway_closed",
    )


def session_closed() -> RequestRefused:
    return RequestRefused(
        "The session was closed while the call was on its way.", status=410, code="session_closed"
    )


class ClientCall:
    """One model call on its way. Created by `Calls.start`."""

    def __init__(
        self,
        request: CallRequest,
        session: Session,
        placement: Placement["ClientCall"],
        sink: EventSink | None,
    ) -> None:
        self.request = request
        self.session = session
        self.key = placement.key
        self.digest = placement.digest
        self.sink = sink
        self.num_waiters = 0
        self.has_begun = False
        self.is_ending = False
        """The policy is through with it; from here on it is never cancelled."""
        self.cancelled_because: RequestRefused | None = None
        self.outcome: Answer | RequestRefused | None = None
        """Set once the call is on disk."""
        self._waiting: list[asyncio.Future[None]] = []
        self.task: asyncio.Task[None] | None = None
        self.pieces: list[Piece] = []
        self.started_at = time.time()
        self._started_at = time.perf_counter()
        self.first_token_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started_at

    async def wait(self, timeout_s: float | None) -> None:
        """Returns when there is an outcome, or after `timeout_s`. Whoever is cancelled here stops nothing."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        timer = None if timeout_s is None else loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiting.remove(waiter)
            if timer is not None:
                timer.cancel()

    def end(self, outcome: Answer | RequestRefused) -> None:
        """Tell all who wait."""
        self.outcome = outcome
        for waiter in self._waiting:
            _wake(waiter)

    async def emit(self, piece: Piece) -> None:
        if self.first_token_s is None:
            self.first_token_s = self.elapsed_s
        self.pieces.append(piece)
        if self.session.clock is not None:
            self.session.clock.note_part()
        if self.sink is not None:
            await self.sink.piece(piece)

    def circumstances(self) -> Circumstances:
        return Circumstances(
            session=self.session,
            retry_key=self.key,
            started_at=self.started_at,
            latency_s=self.elapsed_s,
            first_token_s=self.first_token_s,
        )


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Calls:
    """All calls of a gateway."""

    def __init__(self, policy: Policy, ledger: Ledger, counts: Counts) -> None:
        self.retries: Retries[ClientCall] = Retries(ledger)
        self._policy = policy
        self._ledger = ledger
        self._counts = counts
        self._in_flight: set[ClientCall] = set()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def start(
        self, request: CallRequest, session: Session, placement: Placement[ClientCall], sink: EventSink | None
    ) -> ClientCall:
        """Begin a new call; it is accepted from here on."""
        call = ClientCall(request, session, placement, sink)
        # Counted and known before the task runs, so that a shutdown at any moment finds and ends it.
        self._counts.num_accepted += 1
        self._in_flight.add(call)
        session.in_flight.add(call)
        if session.clock is not None:
            session.clock.open_call()
        self.retries.begin(call.key, call)
        call.task = asyncio.create_task(self._run(call))
        return call

    async def refuse(self, request: CallRequest, session: Session, error: RequestRefused) -> None:
        """Record a call that was refused before it began."""
        self.count_refused(error)  # at once: whoever waits for the disk may be cancelled
        around = Circumstances(session=session, retry_key="", started_at=time.time())
        await self._is_written([error_record(request, error, around)], request.num_bytes)

    def count_refused(self, error: RequestRefused) -> None:
        """Count a call of which too little is known to record it."""
        self._counts.num_accepted += 1
        self._counts.ended_in_error(time.monotonic(), _code(error))

    async def answer(self, call: ClientCall, sink: EventSink | None = None) -> Answer:
        """Wait for the outcome, and keep the client's connection awake meanwhile.

        Who waits and is cancelled leaves the call; the last one stops it. Raises what refused it.
        """
        call.num_waiters += 1
        try:
            while call.outcome is None:
                await call.wait(None if sink is None else KEEP_ALIVE_S)
                if call.outcome is None and sink is not None:
                    await sink.keep_alive()
            if isinstance(call.outcome, RequestRefused):
                raise copy.copy(call.outcome)  # that of the call then holds no frame that holds the call
            return call.outcome
        except asyncio.CancelledError:
            self._leave(call)
            raise

    def note_undelivered(self, digest: bytes, key: str) -> None:
        """An answer is recorded, but did not reach its client."""
        self._counts.num_undelivered += 1
        self.retries.note_undelivered(digest, key)

    def cancel(self, call: ClientCall, because: RequestRefused) -> None:
        """Stop the work. What is sampled already is recorded all the same."""
        # What is being recorded is recorded whole: a cancelled append may have been written all the same.
        if call.is_ending or call.cancelled_because is not None:
            return
        call.cancelled_because = because
        self.retries.end(call.key, call)  # a retry that comes from here on is a call of its own
        self.retries.note_loss(call.digest)
        if call.has_begun and call.task is not None:  # a task cancelled before its first step never takes it
            call.task.cancel()

    def _leave(self, call: ClientCall) -> None:
        """A client went away."""
        call.num_waiters -= 1
        if call.num_waiters == 0:
            self.cancel(call, client_left())

    async def cancel_session(self, session: Session, because: RequestRefused) -> None:
        """Returns when nothing of the session is in flight."""
        await self._cancel(list(session.in_flight), because)

    async def finish(self, grace_s: float) -> None:
        """Let what is in flight end by itself for a while, then stop it."""
        # `wait` does not cancel what is still running when the grace is over; that is for `_cancel`, with its
        # reason.
        tasks = [each.task for each in self._in_flight if each.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        await self._cancel(list(self._in_flight), gateway_closed())

    async def _cancel(self, calls: list[ClientCall], because: RequestRefused) -> None:
        for call in calls:
            self.cancel(call, because)
        tasks = [each.task for each in calls if each.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    # ---- one call ------------------------------------------------------------------------------------------

    async def _run(self, call: ClientCall) -> None:
        call.has_begun = True
        outcome: Answer | RequestRefused | None = None
        try:
            outcome = await self._outcome(call)
        except Exception as error:  # noqa: BLE001  what a policy or the disk raises becomes data here
            outcome = refusal_of(error)
            call.is_ending = True
            record = error_record(call.request, outcome, call.circumstances())
            await self._end_in_error(record, outcome, call.request.num_bytes)
        finally:
            self._in_flight.discard(call)
            call.session.in_flight.discard(call)
            if (clock := call.session.clock) is not None:
                if isinstance(outcome, Answer):
                    clock.note_answer()
                clock.close_call()
            self.retries.end(call.key, call)
            self._settle(call, gateway_closed() if outcome is None else outcome)

    def _settle(self, call: ClientCall, outcome: Answer | RequestRefused) -> None:
        if isinstance(outcome, Answer):
            if call.num_waiters == 0:  # they left while it was written
                self.note_undelivered(call.digest, call.key)
            call.end(outcome)
            return
        # Its frames hold the call, and the call holds it: what was asked would wait for a garbage collection.
        outcome.__traceback__ = outcome.__context__ = outcome.__cause__ = None
        if call.cancelled_because is None:
            self.retries.note_loss(call.digest)
        call.end(outcome)

    async def _outcome(self, call: ClientCall) -> Answer | RequestRefused:
        emit = call.emit if call.request.stream else None
        try:
            # It may have been cancelled before its task took the first step.
            if call.cancelled_because is None:
                answer = await self._answer(call, emit)
                call.is_ending = True
                return await self._end_whole(call, answer)
            because = call.cancelled_because
        except asyncio.CancelledError:
            # Nobody here cancels what is ending: the loop itself is being ended.
            if call.is_ending:
                raise
            because = call.cancelled_because or gateway_closed()
        except PartialAnswer as error:
            call.is_ending = True
            refusal = RequestRefused(str(error), status=502, kind="server_error", code="partial_answer")
            await self._end_partial(call, refusal, error.answer)
            return refusal
        call.is_ending = True
        await self._end_partial(call, because, None)
        return because

    async def _answer(self, call: ClientCall, emit: Emit | None) -> Answer:
        """The policy's answer, within what the session may still use."""
        budget, sampling = call.session.budget, call.session.sampling
        if budget is None:
            return await self._policy.answer(call.request, call.session, emit)
        share = await budget.admit(call.request, sampling.get("max_tokens", call.request.max_tokens))
        call.request.tokens_left = share.tokens
        late: asyncio.TimerHandle | None = None
        answer: Answer | None = None
        if share.seconds is not None:
            loop = asyncio.get_running_loop()
            late = loop.call_later(share.seconds, self._out_of_time, call, budget)
        try:
            answer = await self._policy.answer(call.request, call.session, emit)
            return answer
        except PartialAnswer as error:
            answer = error.answer if isinstance(error.answer, Answer) else None
            raise
        except asyncio.CancelledError:
            # Tokens that were sampled count against the budget, whoever no longer wants them.
            answer = answer_so_far(call.request, call.pieces, call.request.model)
            raise
        finally:
            if late is not None:
                late.cancel()
            await budget.settle(share, answer)

    def _out_of_time(self, call: ClientCall, budget: SessionBudget) -> None:
        self.cancel(call, budget.refusal("seconds"))

    async def _end_whole(self, call: ClientCall, answer: Answer) -> Answer:
        if call.sink is not None:
            call.sink.adopt(answer)
        answer.id = answer.id or completion_id(call.request.dialect)
        records = records_of(call.request, answer, call.circumstances())
        await self._append(call, records)
        self._counts.ended_ok(time.monotonic(), answer.usage, records[0].latency_s, records[0].first_token_s)
        return answer

    async def _append(self, call: ClientCall, records: list[CallRecord]) -> None:
        session = call.session
        # A call on disk whose session is not would lose its seed and limits in a crash. Shielded, because
        # other calls wait for the same write.
        if session.store_task is not None:
            await asyncio.shield(session.store_task)
        try:
            await self._append_records(records, call.request.num_bytes)
        except CountError:
            # A key that the client chose is kept. One of ours has a number, which this process may not know
            # to be taken: by calls before a restart, or by requests that it has forgotten.
            if call.key.startswith("i-"):
                raise
            self.retries.end(call.key, call)
            call.key = self.retries.unused_key(session.id, call.digest)
            self.retries.begin(call.key, call)
            for record in records:
                record.retry_key = call.key
            await self._append_records(records, call.request.num_bytes)
        session.has_history = True

    async def _append_records(self, records: list[CallRecord], num_bytes: int) -> None:
        await self._ledger.append(records, num_bytes=num_bytes, num_open=len(self._in_flight))

    async def _end_partial(self, call: ClientCall, error: RequestRefused, partial_answer: object) -> None:
        if not isinstance(partial_answer, Answer):
            model = next(iter(self._policy.models()), "")
            partial_answer = answer_so_far(call.request, call.pieces, model)
        if call.sink is not None:
            call.sink.adopt(partial_answer)
        partial_answer.id = partial_answer.id or completion_id(call.request.dialect)
        records = records_of(call.request, partial_answer, call.circumstances(), CallStatus.PARTIAL, error)
        for record in records:
            record.retry_key = ""  # it answers no retry
        if await self._is_written(records, call.request.num_bytes):
            self._counts.ended_partial(time.monotonic())
        else:
            self._counts.ended_in_error(time.monotonic(), _code(error))

    async def _end_in_error(self, record: CallRecord, error: RequestRefused, num_bytes: int) -> None:
        await self._is_written([record], num_bytes)
        self._counts.ended_in_error(time.monotonic(), _code(error))

    async def _is_written(self, records: list[CallRecord], num_bytes: int) -> bool:
        """Record what is no answer. A full disk does not change what the client is told."""
        try:
            await self._append_records(records, num_bytes)
        except Exception as refusal:  # noqa: BLE001  what cannot be recorded is still the client's to hear
            _log.warning("A call that ended as %s could not be recorded: %s", records[0].status, refusal)
            return False
        return True


def refusal_of(error: BaseException) -> RequestRefused:
    """The refusal that a client gets for an exception."""
    match error:
        case RequestRefused():
            return error
        case ContextLengthError():
            return RequestRefused(str(error), code="context_length_exceeded")
        case ConfigError():
            return RequestRefused(str(error))
        case InferenceError():
            return RequestRefused(str(error), status=503, kind="server_error", code="engine_failed")
        case StorageError():
            return RequestRefused(
                f"The answer could not be recorded, so it is not given: {error}",
                status=503,
                kind="server_error",
                code="ledger_unavailable",
            )
        case _:
            _log.error("A model call failed in a way that nobody foresaw.", exc_info=error)
            return RequestRefused(
                f"The gateway failed with {type(error).__name__}; its log says more.",
                status=500,
                kind="server_error",
                code="internal_error",
            )


def _code(error: RequestRefused) -> str:
    return error.code or str(error.status)
