r"""Do two formulas mean the same? The side of the math grader that runs in a worker process.

    check(gold, answer) ──► read ──► same, asking ──► sympy ──► is the difference 0 at points?
                                                       │           └ none to be had: math-verify says
                                                       └ math_formulas; where that has a doubt, latex2sympy

Decimals are made fractions before anything is computed, so nothing is rounded: 3.14159 is not \pi. Formulas
with unknowns are compared at fixed rational points, half of them negative; where a formula is not real, the
point says nothing. Nothing here has a limit of its own: it runs where it can be killed.
"""

import logging
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import verify

from rllm.rewards.math_comparison import Comparable, same
from rllm.rewards.math_families import same_families
from rllm.rewards.math_formulas import formula
from rllm.rewards.math_reading import UnreadableError, read
from rllm.rewards.math_values import Equation, Scalar, Several, SolutionFamily, Value

_DIGITS = 50
_POINTS = 6
_CLOSE = 1e-40
"""The share of a value by which two computations of it differ."""
_MOST_DIGITS = 200
"""The digits with which a difference is looked for before it counts as 0."""
_UNEVALUATED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit)
_CONVERSION = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=True)
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?|\))\s*\\?%")
_DEGREES = re.compile(r"\^\{?\\circ\s*\}?|\\degree(?![a-zA-Z])")

logging.getLogger("math_verify").setLevel(logging.ERROR)


class _NoFormulaError(Exception):
    """latex2sympy cannot make anything of it."""


def check(gold: str, answer: str, tolerance: float = 0.0) -> dict[str, Any]:
    """`{"same": bool}`, or `{"unreadable": "gold" | "answer", "why": str}`."""
    parts: dict[str, Value] = {}
    texts: list[str] = []
    for side, text in (("gold", gold), ("answer", answer)):
        try:
            parts[side] = read(text)
            texts += [scalar.text for scalar in _formulas(parts[side])]
        except UnreadableError as error:
            return {"unreadable": side, "why": str(error)[:300]}
    # One reader for both sides, so that what is written in the same way is understood in the same way.
    as_formula: Callable[[str], Any] = (
        _of_school if all(_of_school(text) is not None for text in texts) else _sympy
    )
    for side, value in parts.items():
        try:
            for scalar in _formulas(value):
                if as_formula(scalar.text).has(sympy.nan, sympy.zoo):
                    return {"unreadable": side, "why": "a division by zero"}
        except _NoFormulaError as error:
            return {"unreadable": side, "why": str(error)[:300]}

    def formula_of(scalar: Scalar) -> Any:
        value = scalar.value
        return (
            as_formula(scalar.text) if value is None else sympy.Rational(value.numerator, value.denominator)
        )

    def ask(one: Comparable, other: Comparable) -> bool:
        if isinstance(one, SolutionFamily) and isinstance(other, SolutionFamily):
            return _families_same(one, other, formula_of)
        if isinstance(one, Equation) and isinstance(other, Equation):
            return _equations_same(*(formula_of(each.left) - formula_of(each.right) for each in (one, other)))
        if isinstance(one, Scalar) and isinstance(other, Scalar):
            return _formulas_same(formula_of(one), formula_of(other), tolerance)
        return False

    return {"same": same(parts["gold"], parts["answer"], ask, tolerance=tolerance) is True}


def _formulas(value: Value) -> Iterator[Scalar]:
    """The formulas that have to be understood before a value can be compared."""
    if isinstance(value, Scalar):
        if value.value is None and not value.is_huge and r"\infty" not in value.text:
            yield value
    elif isinstance(value, Equation):
        yield from (*_formulas(value.left), *_formulas(value.right))
    elif isinstance(value, Several | SolutionFamily):
        for item in value.items if isinstance(value, Several) else value.members:
            yield from _formulas(item)


@lru_cache(maxsize=1024)
def _of_school(text: str) -> Any:
    return formula(text)


@lru_cache(maxsize=1024)
def _sympy(text: str) -> Any:
    """Raises _NoFormulaError."""
    text = _DEGREES.sub(r"\\cdot\\frac{\\pi}{180}", text)
    text = _PERCENT.sub(r"\1\\cdot\\frac{1}{100}", text)
    text = _DECIMAL.sub(
        lambda number: rf"\frac{{{int(number[1] + number[2])}}}{{{10 ** len(number[2])}}}", text
    )
    try:
        formula = latex2sympy(
            text,
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=_CONVERSION,
        )
    # Its name reaches the grader, which calls the answer too large and not unreadable.
    except RecursionError:
        raise
    except Exception as error:
        raise _NoFormulaError(str(error).partition("\n")[0]) from error
    if not isinstance(formula, sympy.Basic | sympy.MatrixBase):
        raise _NoFormulaError("no formula")
    if "i" in text and not re.search(r"_\{?i|\\lim|\\sum|\\prod", text):
        formula = formula.xreplace({sympy.Symbol("i", real=True): sympy.I})
    return formula.doit() if formula.has(*_UNEVALUATED) else formula


def _formulas_same(gold: Any, answer: Any, tolerance: float) -> bool:
    if gold == answer:
        return True
    num_real = num_complex = 0
    complex_same = True
    for point in _points(gold, answer):
        values = _values(point, gold, answer)
        if values is None:
            continue
        if not values:
            return False  # what divides by zero is no answer
        one, other = values
        is_close = bool(abs(one - other) <= abs(one) * sympy.Float(tolerance or _CLOSE))
        # One point with all digits tells apart what agrees in the first fifty everywhere. A value of which
        # no digit is known may be 0, and then nothing is close to it.
        is_first = num_real + num_complex == 0
        if (is_close and is_first and not tolerance) or any(map(_is_unknown, values)):
            is_close = _is_zero((gold - answer).xreplace(point))
        are_real = [_is_real(value) for value in values]
        if all(are_real):
            num_real += 1
            if not is_close:
                return False
        elif not any(are_real):
            num_complex += 1
            complex_same &= is_close
    # At a single point two different formulas may happen to meet.
    num_points = 2 if gold.free_symbols | answer.free_symbols else 1
    if num_real >= num_points:
        return True
    if num_complex >= num_points:
        return complex_same
    return bool(
        verify(gold, answer, float_rounding=15, numeric_precision=_DIGITS, strict=True, timeout_seconds=None)
    )


def _equations_same(gold: Any, answer: Any) -> bool:
    """One is a multiple of the other, by a number that is not zero: then they have the same solutions."""
    if not (gold.free_symbols and gold.free_symbols == answer.free_symbols):
        return False
    pairs = [
        (gold.xreplace(point), answer.xreplace(point))
        for point in _points(gold, answer)
        if _values(point, gold, answer)
    ]
    pairs = [pair for pair in pairs if not any(map(_is_zero, pair))]
    return len(pairs) >= 3 and all(
        _is_zero(one * pairs[0][1] - other * pairs[0][0]) for one, other in pairs[1:]
    )


def _families_same(gold: SolutionFamily, answer: SolutionFamily, formula_of: Callable[[Scalar], Any]) -> bool:
    """As the numbers that they hold; formula by formula where no integer is counted evenly."""
    sides = [
        [_in_counter(formula_of(member), family.letter) for member in family.members]
        for family in (gold, answer)
    ]
    golds, answers = ([line for member in side if (line := _line(member))] for side in sides)
    if (len(golds), len(answers)) == (len(sides[0]), len(sides[1])):
        is_multiple = all(begin == 0 for begin, _ in (*golds, *answers))
        # `2n\pi` alone may be a formula in n as well, and then `-2n\pi` is another one.
        if gold.is_declared or answer.is_declared or not is_multiple:
            verdict = same_families(golds, answers, _rational_ratio)
            if verdict is not None:
                return verdict
    left = list(sides[1])
    for member in sides[0]:
        equal = next((other for other in left if _formulas_same(member, other, 0.0)), None)
        if equal is None:
            return False
        left.remove(equal)
    return not left


_COUNTER = sympy.Symbol("k", integer=True)


def _in_counter(formula: Any, letter: str) -> Any:
    return formula.xreplace({symbol: _COUNTER for symbol in formula.free_symbols if symbol.name == letter})


def _line(formula: Any) -> tuple[Any, Any] | None:
    """(begin, period) of a formula that is linear in the counter and holds nothing else."""
    begin, period = (sympy.expand(formula).coeff(_COUNTER, power) for power in (0, 1))
    is_line = sympy.expand(formula - begin - period * _COUNTER) == 0
    return (begin, period) if is_line and not (begin.free_symbols | period.free_symbols) else None


def _rational_ratio(number: Any, unit: Any) -> Fraction | None:
    ratio = sympy.simplify(number / unit)
    return Fraction(int(ratio.p), int(ratio.q)) if ratio.is_Rational else None


def _is_zero(number: Any) -> bool:
    """Whether a number is 0: exactly where it simplifies, else where no digit of it can be computed.

    No smallest size counts as 0, because right answers may be smaller than any.
    """
    return _is_unknown(sympy.N(number, _DIGITS, maxn=_MOST_DIGITS))


def _is_unknown(value: Any) -> bool:
    """Whether no digit of a computed value is known, or it is 0."""
    return all(map(_is_without_digits, value.as_real_imag()))


def _is_real(value: Any) -> bool:
    return _is_without_digits(value.as_real_imag()[1])


def _is_without_digits(part: Any) -> bool:
    # sympy gives a sum of which it could compute no digit the precision of one bit.
    return part == 0 or part._prec == 1


def _points(gold: Any, answer: Any) -> list[dict[Any, Any]]:
    """Places at which to compare: the same for the same unknowns, every other one with negative numbers."""
    unknowns = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not unknowns:
        return [{}]
    draw = random.Random(str(unknowns))
    return [
        {
            unknown: sympy.Rational(draw.randint(101, 4000), 997) * (draw.choice((1, -1)) if place % 2 else 1)
            for unknown in unknowns
        }
        for place in range(_POINTS)
    ]


def _values(point: dict[Any, Any], *formulas: Any) -> list[Any] | None:
    """The values of the formulas, to 50 digits; [] where one divides by zero, None for no number."""
    values: list[Any] = []
    for each in formulas:
        try:
            value = sympy.N(each.xreplace(point), _DIGITS)
        except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
            return None  # sympy knows no number for it
        if value.has(sympy.nan, sympy.zoo):
            return []
        if not (isinstance(value, sympy.Expr) and value.is_number and value.is_finite):
            return None
        if value.atoms(sympy.Function, sympy.Integral, sympy.Sum, sympy.Limit):
            return None
        values.append(value)
    return values


def _warm_up() -> None:
    """The parser builds its tables while it reads; what it has read once, it reads in a millisecond."""
    for text in (
        *(
            r"\frac{1}{2}+x^{2}-2x",
            r"2\sqrt{3}\cdot \pi",
            r"(x+1)(x-1)/3",
            r"\sin(x)+\log_{2}(8)-\ln x",
            "-x_1",
        ),
        *(r"e^{i\pi}", r"3!+|x|", r"\binom{5}{2}", r"x^{-1}", r"f(x)", r"\sqrt[3]{2}", r"\theta\cdot a b"),
    ):
        _formulas_same(_sympy(text), _sympy(f"{text}+0"), 0.0)


_warm_up()
