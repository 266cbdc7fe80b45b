"""Values as JSON text and back, for sandboxes: plain values only, whatever class or trick stands behind them.

    1, 1.5, "a", None, True     as in JSON           [1, 2]      a list
    {"i": "0xff"}               a large int          {"t": […]}  a tuple       {"s": […]}  a set
    {"f": "nan"}                nan, inf, -inf       {"b": "ff"} bytes         {"d": [[k, v], …]}  a dict
    {"c": [re, im]}             a complex            {"q": ["n", "d"]} a Fraction    {"m": "1.5"} a Decimal
    {"D": ["date", "2026-01-31"]} date, time, …      {"Q": […]}  a deque       {"R": [0, 9, 1]}  a range
    {"r": 3}                    what call 3 gave     {"n": "f"}  a name of the program

A value of a subclass is written as the plain value that it holds: methods that the subclass overrides are
never called. Runs in the sandbox, as text, before and after code that nobody can trust.
"""

import datetime
from collections import deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

MAX_DEPTH = 150
MAX_PARTS = 400_000
_SMALL = 2**53
_DATES = (datetime.date, datetime.datetime, datetime.time)

Special = Callable[[Any], "str | None"]
"""The text of a value that is not plain, or None."""


class NoPlainValueError(Exception):
    """The value is of a class of its own, too deep, too large or goes in a circle."""


def encode(value: Any, special: "Special | None" = None) -> str:
    """JSON text. Raises NoPlainValueError."""
    parts: list[str] = []
    _write(value, 0, parts, special)
    return "".join(parts)


def _write(value: Any, depth: int, parts: list[str], special: "Special | None") -> None:
    if depth > MAX_DEPTH or len(parts) > MAX_PARTS:
        raise NoPlainValueError("nested too deeply" if depth > MAX_DEPTH else "too large")
    kind = type(value)
    if value is None:
        parts.append("null")
    elif kind is bool:
        parts.append("true" if value else "false")
    elif issubclass(kind, int):
        number = int.__pos__(value)
        # Larger ones in hex: Python reads and writes decimals of at most 4300 digits.
        parts.append(str(number) if -_SMALL < number < _SMALL else f'{{"i":"{hex(number)}"}}')
    elif issubclass(kind, float):
        parts.append(_float(float.__pos__(value)))
    elif issubclass(kind, str):
        parts.append(quoted(str.__str__(value)))
    elif issubclass(kind, list):
        _write_all("[", list.__iter__(value), "]", depth, parts, special)
    elif issubclass(kind, tuple):
        _write_all('{"t":[', tuple.__iter__(value), "]}", depth, parts, special)
    elif issubclass(kind, set):
        _write_all('{"s":[', set.__iter__(value), "]}", depth, parts, special)
    elif issubclass(kind, frozenset):
        _write_all('{"s":[', frozenset.__iter__(value), "]}", depth, parts, special)
    elif issubclass(kind, dict):
        _write_dict(value, depth, parts, special)
    elif issubclass(kind, complex):
        number = complex.__pos__(value)
        parts.append(f'{{"c":[{_float(number.real)},{_float(number.imag)}]}}')
    elif issubclass(kind, bytes):
        parts.append(f'{{"b":"{bytes.hex(value)}"}}')
    elif issubclass(kind, bytearray):
        parts.append(f'{{"b":"{bytearray.hex(value)}"}}')
    elif kind is Fraction:
        parts.append(f'{{"q":["{hex(value.numerator)}","{hex(value.denominator)}"]}}')
    elif kind is Decimal:
        parts.append(f'{{"m":"{value}"}}')
    else:
        _write_other(value, kind, depth, parts, special)


def _write_all(
    begin: str, values: Iterable[Any], end: str, depth: int, parts: list[str], special: "Special | None"
) -> None:
    parts.append(begin)
    comma = ""
    for each in values:
        parts.append(comma)
        _write(each, depth + 1, parts, special)
        comma = ","
    parts.append(end)


def _write_dict(value: dict[Any, Any], depth: int, parts: list[str], special: "Special | None") -> None:
    parts.append('{"d":[')
    comma = ""
    for key, item in dict.items(value):
        parts.append(f"{comma}[")
        _write(key, depth + 1, parts, special)
        parts.append(",")
        _write(item, depth + 1, parts, special)
        parts.append("]")
        comma = ","
    parts.append("]}")


def _write_other(value: Any, kind: Any, depth: int, parts: list[str], special: "Special | None") -> None:
    text = None if special is None else special(value)
    if text is not None:
        parts.append(text)
    elif kind in _DATES:
        parts.append(f'{{"D":["{kind.__name__}","{value.isoformat()}"]}}')
    elif kind is datetime.timedelta:
        parts.append(f'{{"D":["timedelta",[{value.days},{value.seconds},{value.microseconds}]]}}')
    elif kind is deque:
        _write_all('{"Q":[', value, "]}", depth, parts, special)
    elif kind is range:
        ends = ",".join(encode(each) for each in (value.start, value.stop, value.step))
        parts.append(f'{{"R":[{ends}]}}')
    elif kind.__module__ == "numpy" and hasattr(kind, "tolist"):
        _write(kind.tolist(value), depth + 1, parts, special)
    else:
        raise NoPlainValueError(f"of class {kind.__name__}")


def _float(number: float) -> str:
    text = float.__repr__(number)
    return f'{{"f":"{text}"}}' if text in ("nan", "inf", "-inf") else text


def decode(node: Any, special: "Callable[[str, Any], Any] | None" = None) -> Any:
    """The value of a node of parsed JSON; `special` gives that of {"r": …} and {"n": …}.

    What is no node raises ValueError, TypeError or ArithmeticError.
    """
    if isinstance(node, list):
        return [decode(each, special) for each in node]
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    if tag == "t":
        return tuple(decode(each, special) for each in content)
    if tag == "s":
        return {_hashable(decode(each, special)) for each in content}
    if tag == "d":
        return {_hashable(decode(key, special)): decode(each, special) for key, each in content}
    if tag == "i":
        return int(content, 16)
    if tag == "f":
        return float(content)
    if tag == "c":
        return complex(*(decode(each) for each in content))
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "q":
        return Fraction(int(content[0], 16), int(content[1], 16))
    if tag == "m":
        return Decimal(content)
    if tag == "D":
        return _date(*content)
    if tag == "Q":
        return deque(decode(each, special) for each in content)
    if tag == "R":
        return range(*(decode(each) for each in content))
    if special is None:
        raise ValueError(f"no plain value: {tag!r}")
    return special(tag, content)


def _date(name: str, content: Any) -> Any:
    if name == "timedelta":
        return datetime.timedelta(*content)
    classes = {each.__name__: each for each in _DATES}
    return classes[name].fromisoformat(content)


def _hashable(value: Any) -> Any:
    return frozenset(value) if isinstance(value, set) else value
