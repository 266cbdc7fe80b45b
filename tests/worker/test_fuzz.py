"""Contracts and inputs that nobody thought of: schemas at random, values that fit and that do not.

The oracle is jsonschema; what fits is drawn together with its schema.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from worker_files import runtime_of

from rllm.contracts import Contract, parse_contract
from rllm.contracts.contract import RunStatus

_SCALARS = [
    ({"type": "string", "maxLength": 8}, st.text(max_size=8)),
    ({"type": "integer", "minimum": -5, "maximum": 5}, st.integers(-5, 5)),
    ({"type": "number"}, st.floats(allow_nan=False, allow_infinity=False) | st.integers()),
    ({"type": "boolean"}, st.booleans()),
    ({"type": "null"}, st.none()),
    ({"enum": ["a", 1, None, {"b": [2]}]}, st.sampled_from(["a", 1, None, {"b": [2]}])),
    ({"const": {"$ref": "#/nowhere"}}, st.just({"$ref": "#/nowhere"})),
    ({"$ref": "#/$defs/shared"}, st.text(max_size=4) | st.integers()),
]
"""Schemas, each with values that fit it."""
_Pair = tuple[Any, st.SearchStrategy[Any]]


def _array(items: _Pair) -> _Pair:
    return {"type": "array", "items": items[0], "maxItems": 3}, st.lists(items[1], max_size=3)


def _any_of(parts: list[_Pair]) -> _Pair:
    return {"anyOf": [schema for schema, _ in parts]}, st.one_of([values for _, values in parts])


def _object(parts: dict[str, _Pair]) -> _Pair:
    """The first property is required, others may be left out, and there is no other."""
    properties = {name: schema for name, (schema, _) in parts.items()}
    first, *others = parts
    schema = {"type": "object", "properties": properties, "required": [first], "additionalProperties": False}
    optional = {name: parts[name][1] for name in others}
    return schema, st.fixed_dictionaries({first: parts[first][1]}, optional=optional)


_PAIRS: st.SearchStrategy[_Pair] = st.recursive(
    st.sampled_from(_SCALARS),
    lambda inner: st.one_of(
        inner.map(_array),
        st.lists(inner, min_size=1, max_size=3).map(_any_of),
        st.dictionaries(st.sampled_from(["x", "y", "$ref", "a/b~c"]), inner, min_size=1, max_size=3).map(
            _object
        ),
    ),
    max_leaves=5,
)
_DEFINITIONS = {"$defs": {"shared": {"type": ["string", "integer"]}}}
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def contract_of(value: Any) -> Contract:
    """Takes a `value` of this schema and gives it back."""

    def whole(**properties: Any) -> str:
        schema = {
            "type": "object",
            "additionalProperties": False,
            "required": sorted(properties),
            "properties": properties,
            **_DEFINITIONS,
        }
        return f"```json\n{json.dumps(schema)}\n```"

    return parse_contract(
        "---\nid: echo\nversion: 1.0.0\n---\n## worker.md contract\n\nPurpose: Give it back.\n\n"
        f"### Input schema\n\n{whole(run_id={'type': 'string'}, value=value)}\n\n"
        f"### Output schema\n\n{whole(value=value)}\n\n"
        "### Constraints\n\n- max_attempts: 1\n- timeout_seconds: 600\n- idempotency_key: run_id\n"
    )


@given(pair=_PAIRS, values=st.data())
@settings(max_examples=15, deadline=None)
def test_what_fits_is_answered_and_what_does_not_is_refused(
    tmp_path_factory: pytest.TempPathFactory, pair: _Pair, values: st.DataObject
) -> None:
    """What fits by construction, and anything at all, as input and as result."""
    schema, fitting = pair
    contract = contract_of(schema)
    right, any_input, any_result = values.draw(fitting), values.draw(_JSON), values.draw(_JSON)
    results = {"a": right, "b": any_input, "c": any_result}
    inputs = {"a": right, "b": any_input, "c": right}

    def answer(task: Any, config: Any) -> dict[str, Any]:
        return {"value": results[task.metadata["run_id"]]}

    async def statuses(folder: Path) -> list[Any]:
        async with runtime_of(contract, answer, folder) as worker:
            return [
                (await worker.run({"run_id": key, "value": value})).to_dict() for key, value in inputs.items()
            ]

    first, second, third = asyncio.run(statuses(tmp_path_factory.mktemp("fuzz")))
    oracle = Draft202012Validator({**schema, **_DEFINITIONS})
    assert (first["status"], first["outputs"]) == (RunStatus.OK, {"value": right})
    assert second["status"] == (RunStatus.OK if oracle.is_valid(any_input) else RunStatus.INVALID_REQUEST)
    assert third["status"] == (RunStatus.OK if oracle.is_valid(any_result) else RunStatus.INVALID_OUTPUT)
