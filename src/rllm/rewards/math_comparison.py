"""Are two answers the same? Structure first, then numbers; formulas are decided elsewhere.

    same(gold, answer, ask)  ──► True | False | None (only a formula's meaning can tell)
                        └ asked of two scalars that are not plain numbers, and of two equations

In this process `ask_none` decides no formula, so that plain numbers and words are decided at once; in a
worker `math_symbols` decides it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction

from rllm.rewards.math_units import is_known, unit_named
from rllm.rewards.math_values import (
    WITHOUT,
    Equation,
    Scalar,
    Several,
    SolutionFamily,
    Value,
    Words,
    multiply,
)

_MINUTES = re.compile(r"[0-5][0-9]\Z")
"""The second number of what may be a time of day, and is then no ratio."""
_WRITTEN_TOGETHER = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)([A-Za-z]{1,3})\Z")
Comparable = Scalar | Equation | SolutionFamily
Ask = Callable[[Comparable, Comparable], bool | None]


def ask_none(gold: Comparable, answer: Comparable) -> None:
    """Decide nothing: the answer of this process about a formula."""


def same(gold: Value, answer: Value, ask: Ask, *, tolerance: float = 0.0) -> bool | None:
    """Whether `answer` says what `gold` says; None where `ask` had to be asked and did not know.

    `tolerance`: how far a plain number may be off, as a share of the right one.
    """

    def compare(one: Value, other: Value) -> bool | None:
        return same(one, other, ask, tolerance=tolerance)

    if gold == answer:
        return True
    if isinstance(gold, Several) and gold.brackets == "=":
        return compare(gold.items[-1], answer)
    if isinstance(answer, Several) and answer.brackets == "=":
        is_empty = len(answer.items) > 1 and all(side == answer.items[0] for side in answer.items)
        return False if is_empty else _all(compare(gold, side) for side in answer.items)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return isinstance(gold, Words) and isinstance(answer, Words) and gold.text == answer.text
    if isinstance(gold, SolutionFamily) or isinstance(answer, SolutionFamily):
        return isinstance(gold, SolutionFamily) and isinstance(answer, SolutionFamily) and ask(gold, answer)
    if isinstance(gold, Several) and isinstance(answer, Several):
        return _several_same(gold, answer, compare)
    if isinstance(gold, Several) or isinstance(answer, Several):
        return _quotient_same(gold, answer, compare) or _one_of_one(gold, answer, compare)
    if isinstance(gold, Equation) or _names_differ(gold, answer):
        one, other = _equation(gold), _equation(answer)
        return one is not None and other is not None and ask(one, other)
    if isinstance(gold, Scalar) and isinstance(answer, Equation):  # "1 + 2 = 3" says 3 if both sides are 3
        if answer.left == answer.right:
            return False  # "3 = 3" says nothing
        sides = _all((compare(gold, answer.left), compare(gold, answer.right)))
        one = _equation(gold)
        return sides if one is None else _any((sides, ask(one, answer)))
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return _scalars_same(gold, answer, ask, tolerance)
    return False


def _names_differ(gold: Value, answer: Value) -> bool:
    names = [value.name for value in (gold, answer) if isinstance(value, Scalar) and value.name]
    return len(names) == 2 and names[0] != names[1]


def _equation(value: Value) -> Equation | None:
    """A statement with its name, as an equation; a named function is a name and no unknown."""
    if isinstance(value, Scalar) and value.name and "(" not in value.name:
        return Equation(left=Scalar(text=value.name), right=replace(value, name="", unit=""))
    return value if isinstance(value, Equation) else None


def _scalars_same(gold: Scalar, answer: Scalar, ask: Ask, tolerance: float) -> bool | None:
    answer = _with_unit(answer, gold.unit)
    if not _units_agree(gold.unit, answer.unit):
        return False
    if gold.text == answer.text:
        return True
    if gold.value is not None and answer.value is not None:
        return numbers_same(gold.value, answer.value, tolerance)
    if r"\infty" in gold.text or r"\infty" in answer.text:
        return False  # what is infinite in the same way is written in the same way
    if gold.is_huge is not answer.is_huge:
        return False
    return ask(replace(gold, unit="", name=""), replace(answer, unit="", name=""))


def _with_unit(answer: Scalar, unit: str) -> Scalar:
    """`1500m`, as what it is where metres are right: a number and its unit, no product."""
    match = _WRITTEN_TOGETHER.match(answer.text)
    if not unit or answer.unit or match is None or unit_named(match[2]) != unit:
        return answer
    return replace(answer, text=match[1], value=Fraction(match[1]), unit=unit)


def numbers_same(gold: Fraction, answer: Fraction, tolerance: float) -> bool:
    return gold == answer or (tolerance > 0.0 and abs(gold - answer) <= Fraction(tolerance) * abs(gold))


def _units_agree(gold: str, answer: str) -> bool:
    """Left out, or the same, or two nouns. A noun for a unit, "12 apples" for "12 cm", is another answer."""
    if {gold, answer} == {"pound", "pound sterling"}:
        return True  # money, where one side says so
    return gold == answer or not answer or not gold or not (is_known(gold) or is_known(answer))


def _several_same(
    gold: Several, answer: Several, compare: Callable[[Value, Value], bool | None]
) -> bool | None:
    gold, answer = _as_tuple(gold, answer), _as_tuple(answer, gold)
    kinds = {gold.brackets, answer.brackets}
    if kinds == {":"}:
        return _proportional(gold, answer, compare)
    if kinds in ({"{}"}, {"{}", ""}):
        pairs = [[compare(one, other) for other in answer.items] for one in gold.items]
        columns = zip(*pairs, strict=True) if pairs else ([] for _ in answer.items)
        return _all([*map(_any, pairs), *map(_any, columns)])
    if len(gold.items) != len(answer.items):
        return False
    if kinds in ({""}, {"U"}, {WITHOUT}):
        return _same_in_any_order(gold.items, answer.items, compare)
    if len(kinds) == 1 or kinds == {"()", ""}:
        return _all(map(compare, gold.items, answer.items))
    return False


def _as_tuple(value: Several, other: Several) -> Several:
    """A column, or a row, as the tuple that it is compared with; three numbers in square brackets as well."""
    if other.brackets not in ("()", "M") or value.brackets not in ("M", "[]"):
        return value
    if value.brackets == "[]":
        return replace(value, brackets="()") if len(value.items) != 2 else value
    rows = [row.items if isinstance(row, Several) else (row,) for row in value.items]
    if other.brackets == "M" or (len(rows) > 1 and any(len(row) != 1 for row in rows)):
        return value
    return Several(brackets="()", items=tuple(item for row in rows for item in row))


def _proportional(
    gold: Several, answer: Several, compare: Callable[[Value, Value], bool | None]
) -> bool | None:
    golds, answers = _scalars(gold), _scalars(answer)
    if _is_time_of_day(golds):
        return len(answers) == 2 and _all(map(compare, golds, answers))
    if len(golds) != len(answers) or all(item.value == 0 for item in answers):
        return False
    return _all(
        compare(multiply(one, answers[0]), multiply(golds[0], other))
        for one, other in zip(golds, answers, strict=True)
    )


def _is_time_of_day(ratio: list[Scalar]) -> bool:
    return len(ratio) == 2 and (bool(ratio[1].unit) or _MINUTES.match(ratio[1].text) is not None)


def _quotient_same(gold: Value, answer: Value, compare: Callable[[Value, Value], bool | None]) -> bool | None:
    """A ratio of two numbers as their quotient, where the right answer is no whole number."""
    if isinstance(answer, Several) and answer.brackets == ":" and isinstance(gold, Scalar):
        is_whole = gold.value is not None and gold.value.denominator == 1
        ratio, number = _scalars(answer), None if is_whole else gold
    elif isinstance(gold, Several) and gold.brackets == ":" and isinstance(answer, Scalar):
        ratio, number = _scalars(gold), answer
    else:
        return False
    if number is None or number.unit or len(ratio) != 2 or ratio[1].value == 0 or _is_time_of_day(ratio):
        return False
    return compare(multiply(number, ratio[1]), ratio[0])


def _scalars(several: Several) -> list[Scalar]:
    return [item for item in several.items if isinstance(item, Scalar)]


def _same_in_any_order(
    gold: tuple[Value, ...], answer: tuple[Value, ...], compare: Callable[[Value, Value], bool | None]
) -> bool | None:
    left = list(answer)
    is_open = False
    for one in gold:
        verdicts = [compare(one, other) for other in left]
        if True in verdicts:
            del left[verdicts.index(True)]
        elif None in verdicts:
            is_open = True
        else:
            return False
    return None if is_open else True


def _one_of_one(gold: Value, answer: Value, compare: Callable[[Value, Value], bool | None]) -> bool | None:
    """A set of one thing is as good as the thing: solutions are written either way."""
    if isinstance(gold, Several) and gold.brackets == "{}" and len(gold.items) == 1:
        return compare(gold.items[0], answer)
    if isinstance(answer, Several) and answer.brackets == "{}" and len(answer.items) == 1:
        return compare(gold, answer.items[0])
    return False


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    results = list(verdicts)
    return False if False in results else None if None in results else True


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    results = list(verdicts)
    return True if True in results else None if None in results else False
