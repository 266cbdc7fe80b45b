"""Spans of requests and attempts, which nobody collects here; those of OpenTelemetry are in `otel`.

with telemetry.request(contract, trace) as span:      one request: its trace id, its response
    with telemetry.attempt(contract, number) as span: one attempt within it: its result, its error
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rllm.contracts.contract import Contract

if TYPE_CHECKING:
    from rllm.worker.attempt import AttemptResult
    from rllm.worker.response import RunError, WorkerResponse

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
"""https://www.w3.org/TR/trace-context/"""


def trace_id_of(trace: str) -> str:
    """The trace id in a W3C `traceparent`; another text as it is; a new id for none."""
    parent = _TRACEPARENT.fullmatch(trace)
    return parent["trace"] if parent else trace or uuid.uuid4().hex


class RequestSpan:
    """One request."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id

    def set_response(self, response: "WorkerResponse") -> None:
        """Record the response."""


class AttemptSpan:
    """One attempt."""

    def set_result(self, result: "AttemptResult", error: "RunError | None") -> None:
        """Record the result: its model calls, and the reason that there are no outputs."""


class Telemetry:
    """Keeps nothing."""

    @contextmanager
    def request(self, contract: Contract, trace: str) -> Iterator[RequestSpan]:
        """`trace`: a W3C `traceparent` or any name that the caller has for it; may be empty."""
        yield RequestSpan(trace_id_of(trace))

    @contextmanager
    def attempt(self, contract: Contract, number: int, run_id: str) -> Iterator[AttemptSpan]:
        """Within the request that started the run. `run_id`: as the answer has it."""
        yield AttemptSpan()

    def close(self) -> None:
        """Hand over what was not yet collected."""
