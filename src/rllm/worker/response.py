"""The answer of a worker's run, and its HTTP status."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rllm.contracts.contract import RunStatus
from rllm.errors.redaction import without_keys


class ErrorCode(StrEnum):
    """The reason that a run did not end with `ok`."""

    SCHEMA = "schema"
    """Input or output breaks its schema."""
    CONFLICT = "idempotency_conflict"
    """The key was used with another input."""
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"
    """Refused at once; no attempt was used."""
    CANCELLED = "cancelled"
    MODEL = "model"
    """The model behind the worker failed."""
    PROGRAM = "program"
    """The worker's own program raised."""


_HTTP = {
    RunStatus.OK: 200,
    RunStatus.INVALID_REQUEST: 422,
    RunStatus.INVALID_OUTPUT: 502,
    RunStatus.RETRYABLE_ERROR: 503,
}
_HTTP_OF_CODE = {ErrorCode.CONFLICT: 409, ErrorCode.OVERLOADED: 429, ErrorCode.TIMEOUT: 504}


@dataclass(kw_only=True, slots=True)
class RunError:
    """The reason, in a word for programs and a sentence for people."""

    code: ErrorCode
    message: str
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_dict(self) -> dict[str, Any]:
        return {"code": str(self.code), "message": without_keys(self.message), **self.details}


@dataclass(kw_only=True, slots=True)
class WorkerResponse:
    """The answer to one request. `body` is what leaves and what is kept: the same bytes every time."""

    status: RunStatus
    body: bytes
    code: ErrorCode | None = None
    retry_after_s: float | None = None
    """For a request that was refused for lack of room."""

    @property
    def http_status(self) -> int:
        by_code = _HTTP_OF_CODE.get(self.code) if self.code is not None else None
        return by_code or _HTTP[self.status]

    @property
    def is_ok(self) -> bool:
        return self.status is RunStatus.OK

    def to_dict(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def outputs(self) -> dict[str, Any] | None:
        return self.to_dict()["outputs"]

    @classmethod
    def from_body(cls, body: bytes) -> "WorkerResponse":
        """The response of a run that was final before."""
        value = json.loads(body)
        code = (value.get("error") or {}).get("code")
        return cls(
            status=RunStatus(value["status"]), body=body, code=None if code is None else ErrorCode(code)
        )
