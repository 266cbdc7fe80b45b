"""Contracts and inputs that nobody thought of: schemas at random, values that fit, nearly fit and do not.

The oracle is jsonschema. What fits is drawn together with its schema, by hypothesis-jsonschema where it can:
since Hypothesis 6.170.6 it draws no objects, and it writes into its own constant for what nothing fits.
"""

import asyncio
import copy
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_jsonschema import _canonicalise, from_schema
from jsonschema import Draft202012Validator

from rllm.agents.flow import AgentFlow
from rllm.contracts import Contract, parse_contract
from rllm.contracts.contract import RunStatus
from rllm.worker.attempt import Backing
from rllm.worker.disk import StoreThread
from rllm.worker.runtime import WorkerRuntime
from rllm.worker.store import RunStore

_DEFINITIONS = {"$defs": {"shared": {"type": ["string", "integer"]}}}
_Pair = tuple[Any, st.SearchStrategy[Any]]
"""A schema, and values that fit it."""
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


_NUMBERS = count()


# ---- by hypothesis-jsonschema ------------------------------------------------------------------------------


def _typed(name: str, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(name)}, optional=optional)


_PLAIN = st.one_of(
    _typed(
        "string",
        minLength=st.integers(0, 3),
        maxLength=st.integers(3, 6),
        pattern=st.sampled_from(["^[a-c]+$", "x", "[0-9]{2}", "^$|é"]),
    ),
    _typed(
        "integer",
        minimum=st.integers(-9, 0),
        exclusiveMaximum=st.integers(2, 9),
        multipleOf=st.integers(1, 3),
    ),
    _typed(
        "number",
        exclusiveMinimum=st.integers(-9, 0),
        maximum=st.integers(1, 9),
        multipleOf=st.sampled_from([0.5, 1, 2]),
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"$ref": "#/$defs/shared"}]),
    st.lists(_JSON, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from([{"$ref": "#/nowhere"}, [], 0, False, 0.5]).map(lambda value: {"const": value}),
)
_NO_OBJECT = {"type": ["string", "number", "boolean", "null", "array"]}


def _several(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        _typed(
            "array",
            items=inner,
            minItems=st.integers(0, 1),
            maxItems=st.integers(1, 3),
            uniqueItems=st.booleans(),
        ),
        *(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts, name=name: {name: parts})
            for name in ("anyOf", "oneOf", "allOf")
        ),
        st.fixed_dictionaries({"if": inner, "then": inner, "else": inner}).map(
            lambda part: part | _NO_OBJECT
        ),
    )


def _by_library(schema: Any) -> st.SearchStrategy[Any]:
    """Empty where nothing fits."""
    # What the last schema left in the constant for those that nothing fits.
    _canonicalise.FALSEY.clear()
    _canonicalise.FALSEY["not"] = {}
    return from_schema(copy.deepcopy(schema | _DEFINITIONS))


_LIBRARY_PAIRS: st.SearchStrategy[_Pair] = (
    st.recursive(_PLAIN, _several, max_leaves=4)
    .map(lambda schema: (schema, _by_library(schema)))
    .filter(lambda pair: not pair[1].is_empty)
)


# ---- by hand -----------------------------------------------------------------------------------------------


def _array(parts: list[_Pair]) -> _Pair:
    """One item for each part, and more of the last."""
    *first, (last, values) = parts
    schema = {"type": "array", "prefixItems": [part for part, _ in first], "items": last}
    schema = schema if first else {"type": "array", "items": last}
    begin = st.tuples(*(each for _, each in first)).map(list)
    return schema, st.builds(lambda some, more: some + more, begin, st.lists(values, max_size=2))


def _containing(item: _Pair) -> _Pair:
    schema = {"type": "array", "contains": item[0], "minContains": 1}
    return schema, st.builds(lambda some, one: [*some, one], st.lists(_JSON, max_size=2), item[1])


def _object(parts: dict[str, _Pair]) -> _Pair:
    """The first property is required, others may be left out, and there is no other."""
    properties = {name: schema for name, (schema, _) in parts.items()}
    first, *others = parts
    schema = {"type": "object", "properties": properties, "required": [first], "additionalProperties": False}
    optional = {name: parts[name][1] for name in others}
    return schema, st.fixed_dictionaries({first: parts[first][1]}, optional=optional)


def _by_pattern(value: _Pair) -> _Pair:
    """Names that fit one of two patterns have this value, all others are whole numbers."""
    schema = {
        "patternProperties": {"^x": value[0], "[0-9]$": value[0]},
        "additionalProperties": {"type": "integer"},
        "type": "object",
    }
    names = st.from_regex(r"\Ax[a-z]{0,2}\Z|\A[a-z]{1,2}[0-9]\Z")
    others = st.text("abc", min_size=1, max_size=2)
    return schema, st.builds(
        lambda some, more: some | more,
        st.dictionaries(names, value[1], max_size=2),
        st.dictionaries(others, st.integers(), max_size=1),
    )


_PAIRS: st.SearchStrategy[_Pair] = st.recursive(
    _LIBRARY_PAIRS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(_array),
        inner.map(_containing),
        inner.map(_by_pattern),
        st.dictionaries(st.sampled_from(["x", "y", "$ref", "a/b~c"]), inner, min_size=1, max_size=3).map(
            _object
        ),
    ),
    max_leaves=4,
)


@st.composite
def _near(draw: st.DrawFn, value: Any) -> Any:
    """The value with one place of it changed: another value, a part less, a part more."""
    if isinstance(value, list | dict) and value and draw(st.booleans()):
        changed = copy.copy(value)
        place = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else list(range(len(value)))))
        if draw(st.booleans()):
            changed[place] = draw(_near(value[place]))
        else:
            del changed[place]
        return changed
    if isinstance(value, list) and draw(st.booleans()):
        return [*value, draw(_JSON)]
    if isinstance(value, dict) and draw(st.booleans()):
        return value | {draw(st.text(max_size=3)): draw(_JSON)}
    if isinstance(value, int | float) and not isinstance(value, bool) and draw(st.booleans()):
        return value + draw(st.sampled_from([-1, 0.5, 1]))
    if isinstance(value, str) and draw(st.booleans()):
        return value[1:] + draw(st.text(max_size=2))
    return draw(_JSON)


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


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreThread]:
    """One store for all examples: keys tell them apart."""
    thread = StoreThread(RunStore(tmp_path_factory.mktemp("fuzz")))
    yield thread
    thread.close()


@given(pair=_PAIRS, values=st.data())
def test_what_fits_is_answered_and_what_does_not_is_refused(
    disk: StoreThread, pair: _Pair, values: st.DataObject
) -> None:
    """What fits, what nearly does and anything at all, as input and as result."""
    schema, fitting = pair
    contract, oracle = contract_of(schema), Draft202012Validator({**schema, **_DEFINITIONS})
    right = values.draw(fitting)
    others = [values.draw(_near(right)), values.draw(_near(right)), values.draw(_JSON)]
    results: dict[str, Any] = {}

    def answer(task: Any, config: Any) -> dict[str, Any]:
        return {"value": results[task.metadata["run_id"]]}

    async def statuses() -> list[tuple[str, str]]:
        worker = WorkerRuntime(contract, Backing(flow=AgentFlow(answer, "answer")), disk)

        async def status(value: Any, result: Any) -> str:
            key = f"{next(_NUMBERS)}"
            results[key] = result
            response = (await worker.run({"run_id": key, "value": value})).to_dict()
            assert response["outputs"] == (None if response["error"] else {"value": result})
            return response["status"]

        try:
            return [(await status(each, right), await status(right, each)) for each in (right, *others)]
        finally:
            await worker.close()

    assert oracle.is_valid(right)
    for value, (as_input, as_result) in zip((right, *others), asyncio.run(statuses()), strict=True):
        fits = oracle.is_valid(value)
        assert as_input == (RunStatus.OK if fits else RunStatus.INVALID_REQUEST), value
        assert as_result == (RunStatus.OK if fits else RunStatus.INVALID_OUTPUT), value
