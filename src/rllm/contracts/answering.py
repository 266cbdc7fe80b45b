"""A contract as a model and a program meet it: the question, the answer, what fits.

    contract, inputs ──messages_for──► messages ──a model──► text ──read_answer──► a value
    value ──checked_outputs──► outputs, with what the runtime fills in; or the Violation

One place for service and training: a policy learns on the prompts that it will see.
"""

import json
from collections.abc import Mapping
from typing import Any

from rllm.contracts.contract import Contract, RunStatus
from rllm.contracts.schemas import Violation
from rllm.types.messages import Message


def answer_schema(contract: Contract) -> dict[str, Any]:
    """The schema of what the one who does the work gives: the outputs without what the runtime fills in."""
    return contract.output_schema.without(*contract.runtime_properties)


def messages_for(contract: Contract, inputs: Mapping[str, Any]) -> list[Message]:
    """The question to a model that does the work of a contract itself."""
    schema = json.dumps(answer_schema(contract), ensure_ascii=False)
    rules = (
        f"{contract.purpose}\n\nAnswer with one JSON object that fits this JSON Schema, and nothing else:\n"
        f"{schema}"
    )
    # A name of the run says nothing about its task: without it equal tasks are equal prompts.
    visible_inputs = {name: value for name, value in inputs.items() if name != "run_id"}
    return [
        {"role": "system", "content": rules},
        {"role": "user", "content": json.dumps(visible_inputs, ensure_ascii=False)},
    ]


def repair_message(violation: Violation) -> Message:
    """The one more turn of a model whose answer did not fit."""
    return {"role": "user", "content": f"{violation.message} Answer again, with the JSON object alone."}


def read_answer(text: str) -> Any:
    """The JSON in what a model wrote, perhaps in a fenced block; other text stays text."""
    bare = text.strip()
    if bare.startswith("```"):
        bare = bare.removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        return json.loads(bare)
    except (ValueError, RecursionError):
        return text


def checked_outputs(
    contract: Contract, value: Any, run_id: str
) -> tuple[dict[str, Any] | None, Violation | None]:
    """The outputs with what the runtime fills in, or why there are none. The message is a whole sentence."""
    if not isinstance(value, Mapping) or not is_json(value):
        kind = type(value).__name__
        return None, Violation("$", f"The result is no JSON object but {value!r:.200} (a {kind}).")
    outputs = dict(value)
    for name in contract.runtime_properties:
        expected = contract.filled_run_id(run_id) if name == "run_id" else str(RunStatus.OK)
        if outputs.setdefault(name, expected) != expected:
            text = f"The result has `{name}` {outputs[name]!r:.100}; the runtime says {expected!r}."
            return None, Violation(f"$.{name}", text)
    violation = contract.output_schema.first_violation(outputs)
    if violation is None:
        return outputs, None
    return None, Violation(violation.path, f"The result breaks the output schema at {violation}")


def is_json(value: Any) -> bool:
    """Whether JSON has all of it: no NaN, no infinity, no other kind of value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
