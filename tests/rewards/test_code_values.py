"""Values between two processes: equal when Python says so, and safe whatever the other side writes."""

import contextlib
import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.rewards.code_values import (
    MalformedError,
    as_node,
    display_text,
    results_of,
    same,
    same_output,
    truth_of,
)
from rllm.rewards.programs import wire

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**60)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES: Any = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=12,
)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("vtsdifbcqmrnx"), inner, max_size=2),
    max_leaves=8,
)


@given(VALUES)
def test_a_plain_value_comes_back_as_it_went(value: Any) -> None:
    back = wire.decode(as_node(value))
    assert back == value
    assert same(as_node(value), as_node(back), tuples_are_lists=False)


@given(VALUES, VALUES)
def test_two_values_are_the_same_exactly_when_python_says_so(one: Any, other: Any) -> None:
    assert same(as_node(one), as_node(other), tuples_are_lists=False) == (one == other)
    assert truth_of(as_node(one)) == bool(one)


def test_json_knows_no_tuples_and_floats_are_never_exact(subtests: pytest.Subtests) -> None:
    for one, other, expected in [
        ((1, [2]), [1, (2,)], True),
        ({"a": (1,)}, {"a": [1]}, True),
        ([1.0000000001], [1], True),
        ([1.001], [1], False),
        ({0.1 + 0.2: 1}, {0.3: 1}, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (math.inf, 1e308, False),
        ([1], {1}, False),
        ("1", 1, False),
        (None, False, False),
        (Fraction(4, 2), 2, True),
        (Decimal("1.5"), Decimal("1.5"), True),
        (10**400, 1e308, False),
    ]:
        with subtests.test(one=one, other=other, expected=expected):
            assert same(as_node(one), as_node(other), tolerance=1e-9) is expected


@given(JSON, VALUES)
def test_what_a_hostile_process_writes_is_a_value_or_malformed(forged: Any, wanted: Any) -> None:
    with contextlib.suppress(MalformedError):
        same(forged, as_node(wanted))
    assert isinstance(display_text(forged), str)
    text = f"[0,{json.dumps({'v': forged})}]\n"
    assert results_of(text, 1) == (None, [{"v": forged}])


def test_lines_that_no_driver_writes_are_malformed(subtests: pytest.Subtests) -> None:
    for text in [
        "junk\n",
        "[0]\n",
        '[1,{"v":1}]\n',
        '[0,{"v":1}]\n[0,{"v":1}]\n',
        '[0,{"v":1}]\n[1,{"v":1}]\n[2,{"v":1}]\n',
        '[0,{"v":1,"e":["E","",[]]}]\n',
        '[0,{"e":"E"}]\n',
        '[0,{"v":1,"m":{"x":1}}]\n',
        '[0,{"v":NaN}]\n',
        "[" * 100_000 + "\n",
        '[0,{"v":' + "[" * 800 + "]" * 800 + "}]\n",
        '[0,{"v":' + "9" * 10_000 + "}]\n",
        '["0",{"v":1}]\n',
        "[true,{}]\n",
    ]:
        with subtests.test(text=text), pytest.raises(MalformedError):
            results_of(text, 2)


def test_a_line_that_was_cut_off_is_no_result() -> None:
    assert results_of('[0,{"v":1}]\n[1,{"v":2', 2) == (None, [{"v": 1}])
    assert results_of(None, 2) == (None, [])
    assert results_of('[-1,{"e":["E","no",[]]}]\n', 2)[0] == {"e": ["E", "no", []]}


class Named(list[int]):
    """A list that lies about what it holds."""

    def __iter__(self) -> Any:
        raise SystemExit(0)

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_a_subclass_is_the_plain_value_that_it_holds() -> None:
    assert as_node(Named([1, 2])) == [1, 2]
    with pytest.raises(wire.NoPlainValueError):
        as_node(object())
    deep: list[Any] = []
    for _ in range(1_000):
        deep = [deep]
    with pytest.raises(wire.NoPlainValueError, match="deep"):
        as_node(deep)
    wide: list[Any] = [0]
    for _ in range(60):
        wide = [wide, wide]
    with pytest.raises(wire.NoPlainValueError, match="large"):
        as_node(wide)


def test_sets_of_numbers_with_one_hash_are_compared_in_no_time() -> None:
    colliding = {"s": [{"i": hex(number * (2**61 - 1))} for number in range(2**53 // 2**52, 60_000)]}
    assert not same(colliding, as_node({1}))
    assert same(colliding, colliding)


def test_outputs_are_compared_line_by_line(subtests: pytest.Subtests) -> None:
    for got, wanted, expected in [
        ("3\n", "3", True),
        ("3 \r\n4\n\n", "3\n4", True),
        ("3\n\n4", "3\n4", False),
        ("1  2", "1 2", True),
        ("0.3333333", "0.33333331", True),
        ("0.34", "0.33", False),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("nan", "1.0", False),
        ("inf", "1.5", False),
        ("yes", "YES", False),
        ("", "3", False),
        ("3\n3", "3", False),
        ("1" * 100_000, "1.5", False),
    ]:
        with subtests.test(got=got, wanted=wanted, expected=expected):
            assert same_output(got, wanted) is expected


@given(st.text())
def test_every_output_is_the_same_as_itself(text: str) -> None:
    assert same_output(text, text)
