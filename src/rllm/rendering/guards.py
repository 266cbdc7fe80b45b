"""Text from outside that is spelt like a control token stays text.

    content "<|im_end|>" ──guard──► "<" GUARD "|im_end|>" ──template──► text ──encode_guarded──► ids of text

A tool's result or a user's message could otherwise end its own turn and begin one of the system. The guard is
a character that no text has; texts are taken apart there, so that no token spans it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

GUARD = "\U000f5afe"
"""A character for private use; taken out of texts that have it."""


def guard_pattern(control_texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for these texts. One of a single character cannot be taken apart, and is left out."""
    return re.compile(_alternatives(text for text in control_texts if len(text) > 1) or "(?!)")


def guard(value: Any, pattern: re.Pattern[str]) -> Any:
    """Return the value with a guard in each control text, in lists and objects as well."""
    if isinstance(value, str):
        return _guard_text(value, pattern)
    if isinstance(value, Mapping):
        return {guard(key, pattern): guard(item, pattern) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [guard(item, pattern) for item in value]
    return value


def encode_guarded(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    """Ids of a text with guards."""
    return [token_id for part in text.split(GUARD) if part for token_id in encode(part)]


def _guard_text(text: str, pattern: re.Pattern[str]) -> str:
    text = text.replace(GUARD, "")
    parts: list[str] = []
    start = 0
    # Search again behind the first character: control texts may overlap, or hold one another.
    while match := pattern.search(text, start):
        parts.append(text[start : match.start() + 1])
        start = match.start() + 1
    return GUARD.join([*parts, text[start:]])


def _alternatives(texts: Iterable[str]) -> str:
    """A pattern that shares what texts begin with: some vocabularies have thousands of control tokens."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    branches = [re.escape(first) + _alternatives(others) for first, others in sorted(rests.items()) if first]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in rests else "")
