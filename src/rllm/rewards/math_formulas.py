r"""The formulas of school, as sympy knows them; in a tenth of the time that a whole LaTeX parser takes.

    r"\frac{\sqrt{2}}{2}\sin^{2} x+x_1"  ──► tokens ──► descent ──► sympy
    anything with a doubt about it       ──► None: latex2sympy reads it

A doubt is what two readers could read in two ways: `f(x)`, `\sin 2x`, `\sin^{-1} x`, a command that is not in
the table. Both sides of a comparison are read by the same reader.
"""

import re
from collections.abc import Callable
from typing import Any

import sympy

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<letter>[A-Za-z])(?:_(?:(?P<index>[A-Za-z0-9])|\{(?P<indices>[A-Za-z0-9]+)\}))?'?"
    r"|(?P<command>\\[a-zA-Z]+|\\%)"
    r"|(?P<sign>[-+*/^(){}\[\]!%|_]))"
)
_GREEK = frozenset(
    f"\\{name}"
    for name in (
        *(
            "alpha",
            "beta",
            "gamma",
            "delta",
            "epsilon",
            "varepsilon",
            "zeta",
            "eta",
            "theta",
            "kappa",
            "lambda",
        ),
        *("mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega"),
    )
)
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{rf"\{name}": getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{rf"\{name}": getattr(sympy, name) for name in ("sinh", "cosh", "tanh", "exp")},
    **{rf"\arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan")},
    r"\ln": sympy.log,
}
_MULTIPLY = frozenset({"*", r"\cdot", r"\times"})
_DIVIDE = frozenset({"/", r"\div"})
_BEGINS_FACTOR = frozenset({"number", "letter", "(", "{", r"\frac", r"\sqrt", r"\pi", r"\log"})
_MAY_CALL = frozenset("fghFGHP")
"""Letters whose bracket is an argument as often as a factor."""
_CLOSING = {"(": ")", "{": "}", "[": "]", "|": "|"}


class _DoubtError(Exception):
    """Somebody else has to read it."""


def formula(text: str) -> Any | None:
    """The formula; None where there is a doubt about it."""
    try:
        return _Descent(text).formula()
    except _DoubtError:
        return None


class _Descent:
    """sum ──► product ──► signed ──► power ──► atom."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        place = 0
        text = text.rstrip().replace(r"^{\circ}", r"\degree").replace(r"^\circ", r"\degree")
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                raise _DoubtError
            kind = next(name for name in ("number", "letter", "command", "sign") if match[name])
            index = match["index"] or match["indices"]
            self._tokens.append((kind, match[kind] + (f"_{index}" if index else "")))
            place = match.end()
        self._place = 0
        self._in_bars = False

    def formula(self) -> Any:
        value = self._sum()
        if self._place != len(self._tokens):
            raise _DoubtError
        return value

    def _peek(self, offset: int = 0) -> str:
        if self._place + offset >= len(self._tokens):
            return ""
        kind, token = self._tokens[self._place + offset]
        return token if kind in ("sign", "command") else kind

    def _next(self) -> str:
        self._place += 1
        return self._tokens[self._place - 1][1]

    def _take(self, symbol: str) -> None:
        if self._peek() != symbol:
            raise _DoubtError
        self._place += 1

    def _sum(self) -> Any:
        value = self._product()
        while (sign := self._peek()) in ("+", "-"):
            self._place += 1
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def _product(self) -> Any:
        value = self._sign()
        while True:
            sign = self._peek()
            if sign in _MULTIPLY:
                self._place += 1
                value = value * self._sign()
            elif sign in _DIVIDE:
                self._place += 1
                value = value / self._divisor()
            elif sign in _BEGINS_FACTOR or sign in _FUNCTIONS or sign in _GREEK:
                if sign == "number":
                    raise _DoubtError  # "x 2"
                value = value * self._power()
            elif sign == "|" and not self._in_bars:
                value = value * self._power()
            else:
                return value

    def _divisor(self) -> Any:
        """The divisor behind a slash; "1/2x" is read in two ways."""
        value = self._sign()
        if self._peek() in _BEGINS_FACTOR or self._peek() in _FUNCTIONS or self._peek() in _GREEK:
            raise _DoubtError
        return value

    def _sign(self) -> Any:
        # A sign binds less than a power: -x^2 is -(x^2).
        negative = False
        while (sign := self._peek()) in ("+", "-"):
            self._place += 1
            negative ^= sign == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Any:
        if self._peek() in _FUNCTIONS or self._peek() == r"\log":
            return self._call()
        value = self._atom()
        while (sign := self._peek()) in ("%", r"\%", "!", r"\degree"):
            self._place += 1
            if sign == "!":
                value = sympy.factorial(value)
            else:
                value = value * (sympy.pi / 180 if sign == r"\degree" else sympy.Rational(1, 100))
        if self._peek() != "^":
            return value
        self._place += 1
        exponent = self._bracket("{") if self._peek() == "{" else self._atom()
        if self._peek() in ("^", "!"):
            raise _DoubtError
        return value**exponent

    def _call(self) -> Any:
        """A function and its argument, which is one atom or stands in brackets."""
        name = self._next()
        base: Any = None
        if name == r"\log":
            base = sympy.Integer(10)
            if self._peek() == "_":
                self._place += 1
                base = self._bracket("{") if self._peek() == "{" else self._atom()
        exponent: Any = 1
        if self._peek() == "^":
            self._place += 1
            exponent = self._bracket("{") if self._peek() == "{" else self._atom()
            if exponent != 2 and exponent != 3:
                raise _DoubtError  # \sin^{-1} is a function of its own
        is_bare = self._peek() not in ("(", "{")
        argument = self._atom()
        follows = self._peek()
        if follows in ("^", "!", "%", r"\%", r"\degree", "_"):
            raise _DoubtError
        if is_bare and (
            follows in _BEGINS_FACTOR or follows in _GREEK or follows in _DIVIDE or follows in _MULTIPLY
        ):
            raise _DoubtError  # \sin 2x, \sin x/2
        value = sympy.log(argument) / sympy.log(base) if base is not None else _FUNCTIONS[name](argument)
        return value**exponent

    def _atom(self) -> Any:
        kind = self._peek()
        if kind == "number":
            return self._number()
        if kind == "letter":
            return self._letter()
        if kind in ("(", "{"):
            return self._bracket(kind)
        # Both ends of an absolute value look alike, so one within another has two readings.
        if kind == "|" and not self._in_bars:
            self._in_bars = True
            value = sympy.Abs(self._bracket("|"))
            self._in_bars = False
            return value
        if kind == r"\frac":
            self._place += 1
            upper = self._bracket("{")
            return upper / self._bracket("{")
        if kind == r"\sqrt":
            self._place += 1
            degree = self._bracket("[") if self._peek() == "[" else sympy.Integer(2)
            return self._bracket("{") ** (1 / degree)
        if kind == r"\pi":
            self._place += 1
            return sympy.pi
        if kind in _GREEK and self._peek(1) != "_":
            return sympy.Symbol(self._next()[1:], real=True)
        raise _DoubtError

    def _bracket(self, opening: str) -> Any:
        self._take(opening)
        value = self._sum()
        self._take(_CLOSING[opening])
        return value

    def _number(self) -> Any:
        token = self._next()
        if self._peek() == r"\frac":
            raise _DoubtError  # a mixed number, or a product
        # Exact, so that 0.1 equals 1/10.
        whole, _, decimals = token.partition(".")
        return sympy.Rational(int(whole + decimals), 10 ** len(decimals))

    def _letter(self) -> Any:
        token = self._next()
        if token in _MAY_CALL and self._peek() == "(":
            raise _DoubtError
        if token == "e":
            return sympy.E
        return sympy.I if token == "i" else sympy.Symbol(token, real=True)
