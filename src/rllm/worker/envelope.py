"""The envelope of a request: the same rules at every door."""

from typing import Any

from rllm.contracts.contract import Contract
from rllm.worker.replies import is_text

MAX_TRACE_CHARACTERS = 256
REQUEST_KEYS = ("worker_id", "version", "trace", "inputs", "constraints")


def envelope_problem(contract: Contract, body: Any) -> str:
    """The reason that the envelope is refused; empty where it is well formed. The inputs are the schema's to
    judge."""
    if not isinstance(body, dict):
        return 'The body is no object; send {"inputs": {…}}.'
    if unknown := [key for key in body if key not in REQUEST_KEYS]:
        return f"The request has {', '.join(map(repr, unknown))}; it may have {', '.join(REQUEST_KEYS)}."
    if "inputs" not in body:
        return "The request has no `inputs`."
    for key, own in (("worker_id", contract.id), ("version", contract.version)):
        if body.get(key, own) != own:
            return f"`{key}` is {body[key]!r:.100}; here is {own!r}."
    trace = body.get("trace", "")
    if not isinstance(trace, str) or len(trace) > MAX_TRACE_CHARACTERS:
        return f"`trace` is {trace!r:.100}; it is a text of at most {MAX_TRACE_CHARACTERS} characters."
    if not is_text(trace):
        return "`trace` holds half a surrogate pair, which is no text."
    limits = {} if body.get("constraints") is None else body["constraints"]
    if not isinstance(limits, dict) or set(limits) - {"timeout_seconds"}:
        return "`constraints` may hold `timeout_seconds` alone; the contract sets the rest."
    timeout_s = limits.get("timeout_seconds", 1)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        return f"`timeout_seconds` is {timeout_s!r:.100}; it is a number above 0."
    return ""
