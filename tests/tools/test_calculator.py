"""Exact arithmetic: right, bounded, and with words for what is wrong."""

import math
import operator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.tools import ToolError
from rllm.tools.calculator import Calculator, calculate, write_number


def test_it_computes_as_people_do(subtests: pytest.Subtests) -> None:
    for expression, text in [
        ("2 * (3 + 4)", "14"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 ≈ 0.3333333333333333"),
        ("-2 ** 2", "-4"),
        ("2 ** -2", "0.25"),
        ("2 ^ 10", "1024"),
        ("2 ** 3 ** 2", "512"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("3 × 4 ÷ 2 − 1 =", "5"),
        ("6.02e2", "602"),
        ("007 + .5", "7.5"),
        ("sqrt(16)", "4"),
        ("sqrt(2)", repr(math.sqrt(2))),
        ("8 ** (1/3)", "2"),
        ("(4/9) ** 0.5", "2/3 ≈ 0.6666666666666666"),
        ("max(1, 2, 3) + min(4)", "7"),
        ("round(2.5) + round(2.346, 2)", "4.35"),
        ("floor(2.7) + ceil(2.1)", "5"),
        ("factorial(20) / gcd(12, 18)", str(math.factorial(20) // 6)),
        ("comb(52, 5)", "2598960"),
        ("log(8, 2)", "3"),
        ("cos(0) + sin(0)", "1"),
        ("(-1) ** 1000000000001", "-1"),
        ("0 ** 0 + 1 ** 10 ** 30", "2"),
        ("1 + 2 = ", "3"),
    ]:
        with subtests.test(expression=expression, text=text):
            assert Calculator()(expression=expression).text == text


def test_what_is_wrong_is_said_at_once(subtests: pytest.Subtests) -> None:
    for expression, error in [
        ("", "empty"),
        ("1 / (2 - 2)", "Division by zero"),
        ("0 ** -1", "Division by zero"),
        ("5 % 0", "Division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 1000000000", "too large"),
        ("1.5 ** 4000", "1,200 digits"),
        ("1e999999999", "out of range"),
        ("factorial(1000000000)", "Factorials go to 400"),
        ("comb(10 ** 30, 10 ** 9)", "at most 400"),
        ("exp(1000)", "out of range"),
        ("sqrt(2) * 2 ** 4000", "out of range"),
        ("sqrt(-1)", "no value for -1"),
        ("log(0)", "no value for 0"),
        ("(0 - 8) ** 0.5", "negative"),
        ("1,000 + 1", "write 1000"),
        ("(1,2)", "write 1000"),
        ("2 3", "`3` stands where an operator"),
        ("2x", "`x` stands where an operator"),
        ("(1 + 2", "not closed"),
        ("1 +", "ends where a number belongs"),
        ("round(1, 2, 3)", "takes 1 to 2 numbers, not 3"),
        ("gcd(2.5, 3)", "whole number"),
        ("tau", "no number called `tau`"),
        ("f(1)", "no function `f`"),
        ("__import__('os')", "not part of arithmetic"),
        ("().__class__", "not part of arithmetic"),
        ("1" * 501, "501 characters"),
        ("(" * 200, "nested more than 100"),
        ("-" * 200 + "1", "nested more than 100"),
    ]:
        with subtests.test(expression=expression, error=error):
            assert error in str(Calculator()(expression=expression).error)


SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
TREES: Any = st.recursive(
    st.integers(0, 99),
    lambda inner: st.tuples(st.sampled_from(sorted(SIGNS)), inner, inner),
    max_leaves=12,
)


def spelled(tree: Any) -> str:
    return str(tree) if isinstance(tree, int) else f"({spelled(tree[1])} {tree[0]} {spelled(tree[2])})"


def worth(tree: Any) -> Fraction:
    return Fraction(tree) if isinstance(tree, int) else SIGNS[tree[0]](worth(tree[1]), worth(tree[2]))


@given(TREES)
def test_it_agrees_with_a_tree_of_fractions(tree: Any) -> None:
    try:
        value = worth(tree)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="Division by zero"):
            calculate(spelled(tree))
    else:
        assert calculate(spelled(tree)) == value


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=6))
def test_a_number_with_few_decimals_is_written_exactly(number: Any) -> None:
    assert Fraction(write_number(Fraction(number))) == Fraction(number)


@given(st.text("0123456789.+-*/%^() ,=eEsqrtlogmaxfi", max_size=30))
def test_any_text_is_computed_or_refused(text: str) -> None:
    output = Calculator()(expression=text)
    assert (output.error is None) != (output.output is None)
