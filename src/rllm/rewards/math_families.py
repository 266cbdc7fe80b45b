r"""Solutions that an integer counts: `\frac{\pi}{4}+k\pi`, for every integer k.

    r"x=\frac{\pi}{4}+n\pi, n\in\mathbb{Z}"  ──► read_family ──► (r"\frac{\pi}{4}+n\pi", "n")
    [a + b k]  ──► same_families ──► the same numbers, whatever the letter and the place that is counted from

Two families are compared within one common period, as the numbers that they hold there.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any

_SEPARATORS = re.compile(r"(?<![a-zA-Z\\])(?:or|and)(?![a-zA-Z])")
_INTEGERS = (
    r"\\in\s*(?:\\mathbb\s*\{?\s*Z\s*\}?|Z)|\\text\{\s*(?:is )?(?:an |any )?integers?\s*\}"
    r"|=\s*0\s*,\s*\\pm\s*1\s*,.*(?:dots|\.\.)"
)
_FOR_INTEGERS = re.compile(
    r"(?:[,;:|]|\\mid|\\quad|\\text\{,?\s*(?:where|with|for|for (?:all|any|every|some))?\s*\})?\s*[,(]?\s*"
    rf"(?P<letter>[a-zA-Z])\s*(?:{_INTEGERS})\s*\)?\s*\Z"
)
_FOR_ALL = re.compile(r"\\text\{[^{}]*\binteger\}\s*(?P<letter>[a-zA-Z])\s*\Z")
_NAMED = re.compile(r"(?:(?<=[,;])|\A)\s*(?:\\theta|[a-zA-Z])\s*=")
_LETTERS = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]")
_PERIODIC = re.compile(r"\\pi(?![a-zA-Z])|\^\{?\\circ")
_NUMBER_COMMANDS = frozenset({r"\pi", r"\frac", r"\sqrt", r"\pm", r"\mp", r"\cdot", r"\times", r"\circ"})
_SET = re.compile(r"\\\{(?P<inside>.*)\\\}\Z")
MAX_MEMBERS = 256
"""The numbers of a family within one common period; more are not compared."""


def read_family(text: str) -> tuple[str, str, bool] | None:
    """Return (the formula, the letter that counts, whether the text says so) of a tidy text; None for others.

    Without "for integer k" only a formula of numbers, π or degrees and one of k, l, m, n is taken for one.
    """
    if whole := _SET.match(text):
        text = whole["inside"]
    clause = _FOR_INTEGERS.search(text) or _FOR_ALL.search(text)
    if clause and text[: clause.start()].strip():
        body, letter = text[: clause.start()].rstrip(" ,;"), clause["letter"]
        is_in_body = re.search(rf"(?<![a-zA-Z\\]){letter}(?![a-zA-Z])", body) is not None
        return (body, letter, True) if is_in_body else None
    if _PERIODIC.search(text) is None:
        return None
    names = {
        name
        for name in _LETTERS.findall(_NAMED.sub("", _SEPARATORS.sub(",", text)))
        if name not in _NUMBER_COMMANDS
    }
    letter = names.pop() if len(names) == 1 else ""
    return (text, letter, False) if letter and letter in "klmn" else None


def same_families(
    golds: Sequence[tuple[Any, Any]],
    answers: Sequence[tuple[Any, Any]],
    ratio_of: Callable[[Any, Any], Fraction | None],
) -> bool | None:
    """Whether {begin + period k} are the same numbers; None where periods or begins have no common measure.

    `ratio_of` gives the quotient of two numbers where it is rational.
    """
    unit = golds[0][1]
    periods = [ratio_of(period, unit) for _, period in (*golds, *answers)]
    if any(period is None or period == 0 for period in periods):
        return None
    lengths = [abs(period) for period in periods if period is not None]
    common = Fraction(
        lcm(*(length.numerator for length in lengths)), gcd(*(length.denominator for length in lengths))
    )
    sides = (lengths[: len(golds)], lengths[len(golds) :])
    origin = golds[0][0]
    members: list[set[Fraction]] = []
    for families, side in zip((golds, answers), sides, strict=True):
        numbers: set[Fraction] = set()
        for (begin, _), length in zip(families, side, strict=True):
            distance = ratio_of(begin - origin, unit)
            count = common / length
            if distance is None or count > MAX_MEMBERS:
                return None
            numbers |= {(distance + place * length) % common for place in range(int(count))}
        members.append(numbers)
    return members[0] == members[1]
