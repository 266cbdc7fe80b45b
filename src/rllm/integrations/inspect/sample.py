"""One sample of an Inspect task, evaluated by Inspect itself, in a process that has nothing else to do.

{"task": "FILE@task", "id": 3, "base_url": …} ──► inspect_ai.eval
    ──► its scores, the limit that ended it, its error, completion ids of the solver's calls
"""
# pyright: reportMissingImports=false

import os
import tempfile
from typing import Any

from inspect_ai import eval as evaluate

_SERVICE = "rllm"
_SCORERS = "scorers"
"""Name of the span in which Inspect scores."""


def play_sample(request: dict[str, Any]) -> dict[str, Any]:
    """Plain JSON in and out; see `rllm.integrations.inspect.task`."""
    os.environ[f"{_SERVICE.upper()}_API_KEY"] = request["api_key"]
    os.chdir(request["directory"])
    with tempfile.TemporaryDirectory(prefix="rllm-inspect-") as log_dir:
        (log,) = evaluate(
            request["task"],
            task_args=request["arguments"],
            model=f"openai-api/{_SERVICE}/{request['model']}",
            model_base_url=request["base_url"],
            sample_id=request["id"],
            epochs=1,
            max_retries=0,  # who retries is rLLM, in a new session
            fail_on_error=False,
            log_dir=log_dir,
            log_model_api=True,
            log_realtime=False,
            display="none",
        )
        # The samples are read from there when they are looked at.
        sample = log.samples[0] if log.samples else None
        error = log.error if sample is None else sample.error
        if sample is None or error is not None:
            return {"error": error.message if error is not None else f"Inspect ended with {log.status}."}
        return {
            "error": "",
            "scores": {name: score.value for name, score in (sample.scores or {}).items()},
            "limit": sample.limit.type if sample.limit is not None else "",
            "calls": _solver_calls(sample.events),
        }


def _solver_calls(events: list[Any]) -> list[str]:
    """Completion ids of the calls before scoring began: a scorer may ask the same model, and what it is
    answered is nothing to learn from."""
    calls: list[str] = []
    for event in events:
        if event.event == "span_begin" and event.name == _SCORERS:
            break
        if event.event == "model" and event.call is not None and event.call.response:
            calls.append(str(event.call.response["id"]))
    return calls
