"""The checks of a run by one contract: does the input fit, does the result, and the response either way.

inputs ──problem_of──► None, or why no model is asked
result of an attempt ──checked──► outputs, or why there are none ──reply──► the bytes that leave and are kept
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.contracts.answering import checked_outputs, is_json
from rllm.contracts.contract import Contract, RunStatus
from rllm.eval.report import Prices
from rllm.worker.admission import AdmissionRefused
from rllm.worker.attempt import AttemptResult, Enforcement
from rllm.worker.response import ErrorCode, RunError, WorkerResponse
from rllm.worker.store import Run

MAX_KEY_CHARACTERS = 512


@dataclass(kw_only=True, slots=True)
class RunUnderWay:
    """A run that somebody waits for."""

    run: Run
    started_s: float
    deadline_s: float
    """On the event loop's clock."""
    trace_id: str
    usage: Counter[str] = field(default_factory=Counter[str])
    enforcement: Enforcement = Enforcement.CHECKED
    """The enforcement of the latest attempt."""


class Replies:
    """The responses of one contract."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.prices = Prices(
            prompt=contract.binding.prompt_price, completion=contract.binding.completion_price
        )

    def problem_of(self, inputs: Any) -> RunError | None:
        if not is_json(inputs):
            return RunError(
                code=ErrorCode.SCHEMA, message="The input is no JSON: it holds NaN, infinity or other values."
            )
        violation = self.contract.input_schema.first_violation(inputs)
        if violation is not None:
            return RunError(
                code=ErrorCode.SCHEMA,
                message=f"The input breaks its schema at {violation}",
                details={"path": violation.path},
            )
        name = self.contract.constraints.idempotency_key
        value = inputs.get(name, "")
        # JSON Schema takes 1.0 for an integer, but as a text it is another key than 1.
        if isinstance(value, float):
            return RunError(
                code=ErrorCode.SCHEMA,
                message=f"`{name}` is {value!r}; a key that is a number is written without a point.",
                details={"path": f"$.{name}"},
            )
        key = str(value)
        if not is_text(key):
            return RunError(
                code=ErrorCode.SCHEMA,
                message=f"`{name}` holds half a surrogate pair, which is no text; a key is text.",
                details={"path": f"$.{name}"},
            )
        if len(key) > MAX_KEY_CHARACTERS:
            return RunError(
                code=ErrorCode.SCHEMA,
                message=f"`{name}` has {len(key)} characters; a key has at most {MAX_KEY_CHARACTERS}.",
                details={"path": f"$.{name}"},
            )
        return None

    def checked(self, run: Run, result: AttemptResult) -> tuple[dict[str, Any] | None, RunError | None]:
        """The outputs with what the runtime fills in, or why there are none."""
        if result.error is not None:
            return None, result.error
        outputs, violation = checked_outputs(self.contract, result.value, self.run_id(run))
        if violation is None:
            return outputs, None
        details = {"path": violation.path}
        return None, RunError(code=ErrorCode.SCHEMA, message=violation.message, details=details)

    def run_id(self, run: Run) -> str:
        """The caller's name for the run, where the contract has a key of that name."""
        return run.key if self.contract.constraints.idempotency_key == "run_id" else run.id

    def reply(
        self,
        run: Run | None,
        status: RunStatus,
        trace_id: str,
        *,
        outputs: dict[str, Any] | None = None,
        error: RunError | None = None,
        under_way: RunUnderWay | None = None,
        result: AttemptResult | None = None,
    ) -> WorkerResponse:
        duration_s = 0.0 if under_way is None else asyncio.get_running_loop().time() - under_way.started_s
        usage = Counter[str]() if under_way is None else under_way.usage
        value = {
            "worker_id": self.contract.id,
            "version": self.contract.version,
            "run_id": None if run is None else self.run_id(run),
            "status": str(status),
            "outputs": outputs,
            "error": None if error is None else error.to_dict(),
            "observability": {
                "attempt": 0 if run is None else run.attempts,
                "duration_ms": round(1000 * duration_s, 3),
                "trace_id": trace_id,
                "model_calls": usage["model_calls"],
                "prompt_tokens": usage["prompt_tokens"],
                "completion_tokens": usage["completion_tokens"],
                "output_schema": str(Enforcement.CHECKED if under_way is None else under_way.enforcement),
                **self._cost(usage),
            },
            "artifacts": {} if result is None else result.artifacts,
        }
        code = None if error is None else error.code
        # In ASCII: what is no UTF-8, such as half a surrogate pair, comes back as it was.
        return WorkerResponse(status=status, body=json.dumps(value).encode(), code=code)

    def _cost(self, usage: Mapping[str, int]) -> dict[str, float]:
        """Nothing where no price is set."""
        cost = self.prices.cost(usage["prompt_tokens"], usage["completion_tokens"])
        return {} if cost is None else {"cost": cost}

    def unstored(self, error: RunError | None, trace_id: str) -> WorkerResponse:
        return self.reply(None, RunStatus.INVALID_REQUEST, trace_id, error=error)

    def refused(self, refused: AdmissionRefused, trace_id: str) -> WorkerResponse:
        error = RunError(
            code=ErrorCode.OVERLOADED,
            message=str(refused),
            details={"retry_after_s": round(refused.retry_after_s, 3)},
        )
        response = self.reply(None, RunStatus.RETRYABLE_ERROR, trace_id, error=error)
        response.retry_after_s = refused.retry_after_s
        return response

    def exhausted(
        self, under_way: RunUnderWay, message: str, *, cause: ErrorCode | None = None
    ) -> WorkerResponse:
        most = self.contract.constraints.max_attempts
        error = RunError(
            code=ErrorCode.ATTEMPTS_EXHAUSTED,
            message=f"All {most} attempts were used. {message}",
            details={} if cause is None else {"cause": str(cause)},
        )
        return self.reply(
            under_way.run, RunStatus.RETRYABLE_ERROR, under_way.trace_id, error=error, under_way=under_way
        )

    def conflict(self, key: str) -> RunError:
        return RunError(
            code=ErrorCode.CONFLICT,
            message=f"The key {key!r:.100} was used with another input; use a new one.",
        )


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it: half a surrogate pair is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
