"""Secrets and personal data in texts ──► marks in their place, by rules.

Rules know the usual forms. No text with a name in it is safe from them.
"""

import re
from collections.abc import Mapping
from typing import Any

from rllm.errors.redaction import values_without_keys, without_keys

_PERSONAL = {
    # A word without a domain is taken whole as well: one of megabytes is not searched again from each letter.
    "[email]": re.compile(r"[A-Za-z0-9._%+-]++(?P<domain>@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,})?"),
    "[secret]": re.compile(
        r"\b(?:sk|pk|rk|ghp|gho|ghs|xox[abp])[-_][A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b|"
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        re.DOTALL,
    ),
    "[card]": re.compile(r"\b(?:\d[ -]?){13,19}\b"),
    "[phone]": re.compile(r"(?<![\w.])\+\d{1,3}[ ()./-]*(?:\d[ ()./-]*){7,12}(?!\w)"),
}


def with_marks(value: Any) -> tuple[Any, int]:
    """The same JSON value with marks, and how many of its texts have some."""
    if isinstance(value, str):
        text = _encodable(without_keys(value))
        for mark, pattern in _PERSONAL.items():
            text = pattern.sub(lambda match, mark=mark: _mark_of(match, mark), text)
        return text, int(text != value)
    if isinstance(value, Mapping):
        pairs = {_encodable(str(values_without_keys(name))): with_marks(each) for name, each in value.items()}
        return {name: each for name, (each, _) in pairs.items()}, sum(count for _, count in pairs.values())
    if isinstance(value, list | tuple):
        items = [with_marks(each) for each in value]
        return [each for each, _ in items], sum(count for _, count in items)
    return value, 0


def _encodable(text: str) -> str:
    """Half a surrogate pair, which JSON can carry and no file of text can hold, becomes `?`."""
    return text.encode("utf-8", "replace").decode()


def _mark_of(match: re.Match[str], mark: str) -> str:
    """The mark; a word without a domain and a number that cannot be one of a card stay."""
    is_secret = match["domain"] if mark == "[email]" else mark != "[card]" or _is_card(match[0])
    return mark if is_secret else match[0]


def _is_card(text: str) -> bool:
    """Luhn's check sum (ISO/IEC 7812-1), which nine of ten other numbers do not meet."""
    digits = [int(each) for each in text if each.isdecimal()][::-1]
    doubled_digits = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return (sum(digits[::2]) + sum(doubled_digits)) % 10 == 0
