r"""The exact value of an expression that is nothing but arithmetic on numbers.

    r"2^{10}-\frac{1}{2}"  ──► tokens ──► descent ──► Fraction(2047, 2)
    r"x+1", r"\sqrt{2}"    ──► None: not for this file
    r"9^{9^{9^9}}"         ──► TOO_LARGE, before it is computed

Nothing is rounded and nothing is evaluated that could grow: every result has at most MAX_BITS bits.
"""

import math
import re
from enum import Enum
from fractions import Fraction

from rllm.rewards.long_integers import whole_number

MAX_BITS = 20_000
"""The size of a numerator or denominator: about 6,000 digits, more than any answer has."""
MAX_NESTING = 40
"""The depth of brackets; deeper is no answer."""
_TOKEN = re.compile(
    r"\s*(?:"
    r"(?P<mixed>[0-9]+ +[0-9]+/[0-9]+(?![0-9.]))"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:\\overline\{[0-9]+\})?(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<sign>\\frac|\\sqrt|\\times|\\cdot|\\div|\\%|[-+*/^(){}\[\]!%])"
    r")"
)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}\Z")
_MULTIPLY = frozenset({"*", r"\times", r"\cdot"})
_DIVIDE = frozenset({"/", r"\div"})
_PERCENT = frozenset({"%", r"\%"})


class NoValue(Enum):
    """The reason that arithmetic has no value that could be compared."""

    TOO_LARGE = "too large"
    UNDEFINED = "undefined"


class _NotArithmeticError(Exception):
    """It holds something else than numbers and the four operations, powers and roots that come out even."""


class _NoValueError(Exception):
    def __init__(self, why: NoValue) -> None:
        super().__init__(why.value)
        self.why = why


def arithmetic_value(text: str) -> Fraction | NoValue | None:
    """The value; None for what is no plain arithmetic, which says nothing about what it is."""
    try:
        return _Descent(text).value()
    except _NotArithmeticError:
        return None
    except _NoValueError as error:
        return error.why


class _Descent:
    """sum ──► product ──► signed ──► power ──► atom, as in every textbook."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        place = 0
        text = text.rstrip()
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                raise _NotArithmeticError
            kind = match.lastgroup or ""
            self._tokens.append((kind, match.group(kind)))
            place = match.end()
        self._place = 0
        self._depth = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._place != len(self._tokens):
            raise _NotArithmeticError
        return value

    def _peek(self) -> str:
        if self._place >= len(self._tokens):
            return ""
        kind, token = self._tokens[self._place]
        return token if kind == "sign" else kind

    def _take(self, symbol: str) -> None:
        if self._peek() != symbol:
            raise _NotArithmeticError
        self._place += 1

    def _sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise _NoValueError(NoValue.TOO_LARGE)
        value = self._product()
        while (sign := self._peek()) in ("+", "-"):
            self._place += 1
            value = _within_bounds(value + self._product() if sign == "+" else value - self._product())
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._sign()
        while True:
            sign = self._peek()
            if sign in _MULTIPLY:
                self._place += 1
                value = _within_bounds(value * self._sign())
            elif sign in _DIVIDE:
                self._place += 1
                value = _quotient(value, self._sign())
            elif sign in ("(", r"\frac", r"\sqrt"):
                value = _within_bounds(value * self._power())
            else:
                return value

    def _sign(self) -> Fraction:
        negative = False
        while (sign := self._peek()) in ("+", "-"):
            self._place += 1
            negative ^= sign == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Fraction:
        value = self._postfix()
        if self._peek() != "^":
            return value
        self._place += 1
        return _to_power(value, self._exponent())

    def _exponent(self) -> Fraction:
        negative = self._peek() == "-"
        self._place += negative
        value = self._power()
        return -value if negative else value

    def _postfix(self) -> Fraction:
        value = self._atom()
        while (sign := self._peek()) in _PERCENT or sign == "!":
            self._place += 1
            value = value / 100 if sign in _PERCENT else _factorial(value)
        return value

    def _atom(self) -> Fraction:
        kind = self._peek()
        if kind == "number":
            return self._number()
        if kind == "mixed":
            whole, numerator, denominator = re.split(r"[ /]+", self._tokens[self._place][1])
            self._place += 1
            return _integer(whole) + _quotient(_integer(numerator), _integer(denominator))
        if kind in ("(", "{"):
            return self._bracket()
        if kind == r"\frac":
            self._place += 1
            upper = self._bracket("{")
            return _quotient(upper, self._bracket("{"))
        if kind == r"\sqrt":
            self._place += 1
            degree = self._bracket("[") if self._peek() == "[" else Fraction(2)
            if degree == 0:
                raise _NoValueError(NoValue.UNDEFINED)
            return _to_power(self._bracket("{"), 1 / degree)
        raise _NotArithmeticError

    def _bracket(self, closer: str = "") -> Fraction:
        opening = closer or self._peek()
        self._take(opening)
        value = self._sum()
        self._take({"(": ")", "{": "}", "[": "]"}[opening])
        return value

    def _number(self) -> Fraction:
        token = self._tokens[self._place][1]
        self._place += 1
        value = _decimal(token)
        if token.isdigit() and self._peek() == r"\frac" and (part := self._proper_fraction()) is not None:
            return value + part  # a mixed number: 2\frac{1}{2} is two and a half
        return value

    def _proper_fraction(self) -> Fraction | None:
        r"""The fraction that stands here, where it is one of two plain numbers and below 1."""
        kinds = [kind if kind == "number" else token for kind, token in self._tokens[self._place :][:7]]
        if kinds != [r"\frac", "{", "number", "}", "{", "number", "}"]:
            return None
        upper, lower = (self._tokens[self._place + offset][1] for offset in (2, 5))
        if not (upper.isdigit() and lower.isdigit() and _integer(upper) < _integer(lower)):
            return None
        self._place += 7
        return _integer(upper) / _integer(lower)


def _decimal(token: str) -> Fraction:
    mantissa, _, exponent = token.replace("E", "e").partition("e") if "\\" not in token else (token, "", "")
    if match := _REPEATING.match(mantissa):
        whole, fraction, repetend = match.groups()
        scale = 10 ** len(fraction)
        period = _integer(repetend) / (10 ** len(repetend) - 1)
        return _integer(whole or "0") + (_integer(fraction or "0") + period) / scale
    if "\\" in mantissa:
        raise _NotArithmeticError
    whole, _, decimals = mantissa.partition(".")
    if len(exponent) > 6:
        raise _NoValueError(NoValue.TOO_LARGE)
    value = _integer(whole + decimals) / 10 ** len(decimals)
    return value * _to_power(Fraction(10), Fraction(exponent)) if exponent else value


def _integer(digits: str) -> Fraction:
    # A decimal digit is log2(10) = 3.32 bits.
    if len(digits) * 3.33 > MAX_BITS:
        raise _NoValueError(NoValue.TOO_LARGE)
    return Fraction(whole_number(digits))


def _within_bounds(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _NoValueError(NoValue.TOO_LARGE)
    return value


def _quotient(upper: Fraction, lower: Fraction) -> Fraction:
    if lower == 0:
        raise _NoValueError(NoValue.UNDEFINED)
    return _within_bounds(upper / lower)


def _to_power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise _NoValueError(NoValue.UNDEFINED)
    if base in (0, 1) and exponent > 0:
        return base
    if exponent.denominator != 1:
        base, exponent = _root(base, exponent.denominator), Fraction(exponent.numerator)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    # Before it is computed: the power has at most as many bits as this product.
    if base not in (1, -1) and bits * abs(exponent) > MAX_BITS + bits:
        raise _NoValueError(NoValue.TOO_LARGE)
    if base == 0 and exponent == 0:
        raise _NotArithmeticError  # a matter of taste
    # The exponent of 1 and -1 has no limit above. Only whether it is odd matters.
    return base ** (int(exponent) if base not in (1, -1) else int(exponent) % 2)


def _root(value: Fraction, degree: int) -> Fraction:
    """The root where it is rational; what is not, or is complex, is for others to judge."""
    if value < 0 or degree < 0 or degree > 64:
        raise _NotArithmeticError
    root = Fraction(_integer_root(value.numerator, degree), _integer_root(value.denominator, degree))
    if root**degree != value:
        raise _NotArithmeticError
    return root


def _integer_root(number: int, degree: int) -> int:
    """The largest integer whose power is at most `number` (Newton's method on integers)."""
    if degree == 2:
        return math.isqrt(number)
    if number < 2:
        return number
    # Not below the root, because from above each step comes nearer to it and none falls below its whole part.
    guess = 1 << -(-number.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + number // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess
        guess = better


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise _NotArithmeticError
    if value > 1500:
        raise _NoValueError(NoValue.TOO_LARGE)
    return Fraction(math.factorial(int(value)))
