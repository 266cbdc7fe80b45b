"""Exact arithmetic on what a model writes: a parser of our own, no `eval`.

    "2 * (3 + 4)" ──signs──► a walk down: sum, product, sign, power, atom ──► 14 ──► "14"

Numbers are fractions as long as that is possible, so 0.1 + 0.2 is 0.3. Roots, logarithms and the like are
floats where they are not exact. Every step is bounded before it is made: no expression takes long or fills
memory.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction

from rllm.tools.base import Tool, ToolError

MAX_EXPRESSION_CHARS = 500
MAX_DEPTH = 100
"""The depth of brackets, signs and powers."""
MAX_BITS = 4096
"""The size of a numerator or denominator: 1,233 digits."""
MAX_FACTORIAL = 400
MAX_EXPONENT = 1000
"""The exponent of ten, in a number such as 6.02e23."""

Number = Fraction | float

_SIGN = re.compile(r"\s*(?:((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|([A-Za-z_]\w*)|(\*\*|//|[-+*/%(),]))", re.A)
_SPELLINGS = {"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", "π": " pi "}
_COMMA = "A comma stands between two numbers; write 1000 for a thousand, 0.5 for a half."
_CONSTANTS = {"pi": math.pi, "e": math.e}
_SUMS: dict[str, Callable[[Number, Number], Number]] = {
    "+": lambda one, other: one + other,
    "-": lambda one, other: one - other,
}
_PRODUCTS: dict[str, Callable[[Number, Number], Number]] = {
    "*": lambda one, other: one * other,
    "/": lambda one, other: one / other,
    "//": lambda one, other: _exact(one // other),
    "%": lambda one, other: one % other,
}


class Calculator(Tool):
    """`calculator(expression)`: what an expression comes to."""

    name = "calculator"

    def forward(self, expression: str) -> str:
        """Evaluate an arithmetic expression exactly.

        Args:
            expression: Numbers with + - * / // % ** and brackets; also sqrt, abs, min, max, round, floor,
                ceil, gcd, lcm, factorial, comb, exp, log, log2, log10, sin, cos, tan, pi and e.
        """
        return write_number(calculate(expression))


def calculate(expression: str) -> Number:
    """The value of the expression: a Fraction where that is exact.

    Raises ToolError that says what is wrong with it.
    """
    text = "".join(_SPELLINGS.get(sign, sign) for sign in expression).strip().removesuffix("=").strip()
    if not text:
        raise ToolError("The expression is empty.")
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ToolError(
            f"The expression has {len(text)} characters; at most {MAX_EXPRESSION_CHARS} are taken. "
            "Split it into several calls."
        )
    walk = _Walk(_signs(text))
    value = walk.sum()
    if walk.next == ",":
        raise ToolError(_COMMA)
    if walk.next:
        raise ToolError(f"`{walk.next}` stands where an operator such as + or * belongs in `{text}`.")
    return value


def write_number(value: Number) -> str:
    """The number as people write it: exactly where its decimals end, or else as fraction and decimal."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if value.denominator == 1:
        return str(value.numerator)
    decimals = _num_decimals(value.denominator)
    if decimals is not None and decimals <= 30:
        digits = str(abs(value.numerator) * 10**decimals // value.denominator).rjust(decimals + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-decimals]}.{digits[-decimals:]}"
    try:
        return f"{value} ≈ {float(value)!r}"
    except OverflowError:
        return str(value)


def _num_decimals(denominator: int) -> int | None:
    """The number of decimals of a fraction; None when they never end."""
    counts: list[int] = []
    for prime in (2, 5):
        count = 0
        while denominator % prime == 0:
            denominator //= prime
            count += 1
        counts.append(count)
    return max(counts) if denominator == 1 else None


def _signs(text: str) -> list[str]:
    signs: list[str] = []
    place = 0
    while place < len(text):
        match = _SIGN.match(text, place)
        if match is None:
            raise ToolError(f"`{text[place:].lstrip()[0]}` is not part of arithmetic in `{text}`.")
        signs.append(match.group().strip())
        place = match.end()
    return signs


class _Walk:
    """Computes while it reads. Each method takes the signs that belong to it."""

    def __init__(self, signs: list[str]) -> None:
        self._left = signs[::-1]
        self._depth = 0

    @property
    def next(self) -> str:
        return self._left[-1] if self._left else ""

    def sum(self) -> Number:
        value = self._product()
        while self.next in _SUMS:
            apply = _SUMS[self._left.pop()]
            value = _within_bounds(apply, value, self._product())
        return value

    def _product(self) -> Number:
        value = self._sign()
        while self.next in _PRODUCTS:
            apply = _PRODUCTS[self._left.pop()]
            value = _within_bounds(apply, value, self._sign())
        return value

    def _sign(self) -> Number:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ToolError(f"The expression is nested more than {MAX_DEPTH} deep.")
        if self.next in _SUMS:
            value = self._sign() if self._left.pop() == "+" else -self._sign()
        else:
            value = self._power()
        self._depth -= 1
        return value

    def _power(self) -> Number:
        """Binds stronger than a sign before it, weaker than one behind it: -2 ** -2 is -(2 ** (-2))."""
        base = self._atom()
        if self.next != "**":
            return base
        self._left.pop()
        return _within_bounds(_power_of, base, self._sign())

    def _atom(self) -> Number:
        sign = self._left.pop() if self._left else ""
        if sign[:1].isdigit() or sign[:1] == ".":
            return _read(sign)
        if sign == "(":
            value = self.sum()
            self._close()
            return value
        if sign.isidentifier():
            return self._name(sign)
        where = f"`{sign}` stands" if sign else "The expression ends"
        raise ToolError(f"{where} where a number belongs.")

    def _name(self, name: str) -> Number:
        if self.next != "(":
            if name in _CONSTANTS:
                return _CONSTANTS[name]
            raise ToolError(f"There is no number called `{name}`; there are {', '.join(_CONSTANTS)}.")
        if name not in _FUNCTIONS:
            raise ToolError(f"There is no function `{name}`; there are {', '.join(sorted(_FUNCTIONS))}.")
        self._left.pop()
        arguments = [self.sum()]
        while self.next == ",":
            self._left.pop()
            arguments.append(self.sum())
        self._close()
        return _apply(name, arguments)

    def _close(self) -> None:
        if self.next == ",":
            raise ToolError(_COMMA)
        if self.next != ")":
            raise ToolError("A bracket is not closed.")
        self._left.pop()


def _read(sign: str) -> Fraction:
    exponent = re.split("[eE]", sign)[1] if re.search("[eE]", sign) else "0"
    if len(exponent) > 6 or abs(int(exponent)) > MAX_EXPONENT:
        raise ToolError(f"`{sign}` is out of range: exponents go to {MAX_EXPONENT}.")
    return Fraction(sign.rstrip(".") if sign.endswith(".") else sign)


def _within_bounds(apply: Callable[[Number, Number], Number], one: Number, other: Number) -> Number:
    """One step, refused where it has no value or would grow beyond what anyone reads."""
    try:
        return _in_range(apply(one, other))
    except ZeroDivisionError:
        raise ToolError("Division by zero.") from None
    except OverflowError:
        raise ToolError("A number on the way is out of range.") from None


def _in_range(value: Number) -> Number:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ToolError("A number on the way is out of range.")
    elif max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("A number on the way has more than 1,200 digits.")
    return value


def _exact(value: Number | int) -> Number:
    return value if isinstance(value, float) else Fraction(value)


def _power_of(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        if abs(base) == 1 or (base == 0 and exponent >= 0):  # any exponent, however large
            return Fraction(1) if exponent == 0 else base if exponent % 2 else abs(base)
        # A number of so many bits is at least 2 ** (bits - 1), which bounds the size of its power from below.
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * (bits - 1) > MAX_BITS:
            raise ToolError("The power is too large: it would have more than 1,200 digits.")
        return Fraction(base ** int(exponent))
    if base < 0:
        raise ToolError("A negative number has no power with a broken exponent.")
    return _root(base, exponent)


def _root(base: Number, exponent: Number) -> Number:
    """Exact where it comes out, such as 8 ** (1/3)."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator <= 64:
        roots = [_whole_root(part, exponent.denominator) for part in (base.numerator, base.denominator)]
        if roots[0] is not None and roots[1] is not None:
            return _power_of(Fraction(roots[0], roots[1]), Fraction(exponent.numerator))
    return float(base) ** float(exponent)


def _whole_root(number: int, degree: int) -> int | None:
    """The whole root, None when there is none."""
    # Bisection on whole numbers, because a float does not have all digits of a large one.
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**degree >= number else (middle + 1, high)
    return low if low**degree == number else None


def _apply(name: str, arguments: list[Number]) -> Number:
    least, most, apply = _FUNCTIONS[name]
    if not least <= len(arguments) <= most:
        arity = f"{least}" if least == most else f"{least} or more" if most > 9 else f"{least} to {most}"
        raise ToolError(f"`{name}` takes {arity} numbers, not {len(arguments)}.")
    try:
        return _in_range(_exact(apply(*arguments)))
    except ZeroDivisionError:
        raise ToolError("Division by zero.") from None
    except OverflowError:
        raise ToolError(f"`{name}` is out of range here.") from None
    except ValueError:
        raise ToolError(f"`{name}` has no value for {', '.join(map(write_number, arguments))}.") from None


def _whole(value: Number) -> int:
    if isinstance(value, float) or value.denominator != 1:
        raise ToolError(f"{write_number(value)} must be a whole number here.")
    return value.numerator


def _factorial(value: Number) -> int:
    if _whole(value) > MAX_FACTORIAL:
        raise ToolError(f"Factorials go to {MAX_FACTORIAL}.")
    return math.factorial(_whole(value))


def _combinations(of: Number, count: Number) -> int:
    if min(_whole(count), _whole(of) - _whole(count)) > MAX_FACTORIAL:
        raise ToolError(f"`comb` takes at most {MAX_FACTORIAL} out of a set.")
    return math.comb(_whole(of), _whole(count))


def _square_root(value: Number) -> Number:
    if value < 0:
        raise ValueError
    return _root(value, Fraction(1, 2))


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    """Halves go to the even neighbour, as in Python."""
    if abs(_whole(digits)) > MAX_EXPONENT:
        raise ToolError(f"`round` takes at most {MAX_EXPONENT} digits.")
    return round(Fraction(value), _whole(digits))


def _logarithm(value: Number, base: Number = math.e) -> float:
    return math.log(value) if base == math.e else math.log(value) / math.log(base)


_FUNCTIONS: dict[str, tuple[int, int, Callable[..., Number | int]]] = {
    "sqrt": (1, 1, _square_root),
    "abs": (1, 1, lambda value: abs(value)),
    "min": (1, 99, lambda *values: min(values)),
    "max": (1, 99, lambda *values: max(values)),
    "round": (1, 2, _round),
    "floor": (1, 1, math.floor),
    "ceil": (1, 1, math.ceil),
    "gcd": (2, 2, lambda one, other: math.gcd(_whole(one), _whole(other))),
    "lcm": (2, 2, lambda one, other: math.lcm(_whole(one), _whole(other))),
    "factorial": (1, 1, _factorial),
    "comb": (2, 2, _combinations),
    "exp": (1, 1, math.exp),
    "log": (1, 2, _logarithm),
    "log2": (1, 1, math.log2),
    "log10": (1, 1, math.log10),
    "sin": (1, 1, math.sin),
    "cos": (1, 1, math.cos),
    "tan": (1, 1, math.tan),
}
"""name -> fewest and most numbers, function."""
