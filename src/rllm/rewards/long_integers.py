"""Integers of any length in texts: Python itself reads at most 4,300 digits, and benchmarks expect more.

"1000…"         ──► whole_number ──► int
'[1, 1000…]'    ──► json_value ──► [1, int]
"f(1000…) == 2" ──► with_short_literals ──► "f(0x…) == 2"
"""

import io
import json
import re
import tokenize
from typing import Any

MAX_DIGITS = 4_300
_LONG = re.compile(rf"[0-9]{{{MAX_DIGITS + 1},}}")


def whole_number(digits: str) -> int:
    """Return the integer that decimal digits, with a sign or without, write."""
    if len(digits) <= MAX_DIGITS:
        return int(digits)
    # By halves, because answers choose the length and one pass takes quadratic time.
    num_low = len(digits) // 2
    low = whole_number(digits[-num_low:])
    high = whole_number(digits[:-num_low])
    return high * 10**num_low + (-low if digits.startswith("-") else low)


def json_value(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError, or RecursionError where it is too deep."""
    return json.loads(text, parse_int=whole_number)


def with_short_literals(source: str) -> str:
    """Return Python source with its long integers in hexadecimal, which Python reads at any length."""
    if _LONG.search(source) is None:
        return source
    lines = source.splitlines(keepends=True)
    try:
        tokens = [*tokenize.generate_tokens(io.StringIO(source).readline)]
    except (tokenize.TokenError, SyntaxError):
        return source  # reading it says what is wrong with it
    for token in reversed(tokens):
        if token.type == tokenize.NUMBER and _LONG.fullmatch(token.string):
            (row, begin), (_, end) = token.start, token.end
            line = lines[row - 1]
            lines[row - 1] = f"{line[:begin]}{hex(whole_number(token.string))}{line[end:]}"
    return "".join(lines)
