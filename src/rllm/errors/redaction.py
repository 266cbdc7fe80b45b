"""Text from elsewhere, before it is kept or shown: without keys in it, and without power over a terminal.

    key ──hide_key──► known to this process
    text ──without_keys──► the same with [key] in each key's place: servers quote headers, programs their own
    text ──escaped──► the same with `\\x1b` in place of an escape

Known are the keys that clients were given, and what environment variables of that kind hold. Every error of
ours passes through here when it is made (`RllmError`), and so does every reply of a server that gets a key.
"""

import base64
import html
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

MARK = "[key]"
MIN_KEY_CHARS = 8
"""Shorter ones are placeholders, such as `EMPTY`, and words of any text."""
_MIN_PIECE_CHARS = 12
"""The length of a piece of a longer key that is not quoted either: servers cut off what they quote."""
_OF_A_KEY = re.compile(
    r"(.*[_-])?(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|AUTHORIZATION|COOKIE)", re.IGNORECASE
)
_MIN_VARIABLE_CHARS = 16


@dataclass(slots=True, frozen=True)
class _Key:
    """One key, and how it is recognised."""

    forms: tuple[str, ...]
    """The ways in which it may be written, the key itself first."""
    hints: tuple[str, ...]
    """One of them is in every piece that is long enough to be taken out, and in every form."""
    hint_bytes: tuple[bytes, ...]

    @classmethod
    def of(cls, key: str) -> "_Key":
        packed = base64.b64encode(key.encode()).decode()
        in_json = json.dumps(key, ensure_ascii=False)[1:-1]
        forms = (key, in_json, quote(key, safe=""), html.escape(key), key.replace("/", "\\/"), packed)
        forms = tuple(dict.fromkeys(forms))
        # A piece of 12 characters holds a whole window of 6 of those that begin at each seventh.
        size = min(_MIN_PIECE_CHARS // 2, len(key))
        windows = [
            form[start : start + size] for form in forms for start in range(0, len(form) - size + 1, size + 1)
        ]
        hints = tuple(dict.fromkeys(windows))
        return cls(forms, hints, tuple(hint.encode() for hint in hints))


_keys: dict[str, _Key] = {}


def holds_key(name: str) -> bool:
    """Whether what a variable or header of this name holds is a key, as far as its name tells."""
    return _OF_A_KEY.fullmatch(name) is not None


def hide_key(key: str | None) -> None:
    """From now on `without_keys` knows it."""
    if key is not None and len(key) >= MIN_KEY_CHARS and key not in _keys:
        _keys[key] = _Key.of(key)


def num_known_keys() -> int:
    """It only grows: what was searched when it was smaller may hold a key that is known by now."""
    return len(_keys)


def without_keys(text: str) -> str:
    """Whatever is long enough to be of use to a finder is taken out, not only whole keys."""
    return _without(text, [*_keys.values(), *map(_Key.of, _variables())])


def values_without_keys(value: Any) -> Any:
    """JSON without the keys that were given here, in texts and in names of fields."""
    if isinstance(value, str):
        return _without(value, _keys.values())
    if isinstance(value, Mapping):
        return {values_without_keys(str(name)): values_without_keys(each) for name, each in value.items()}
    return [values_without_keys(each) for each in value] if isinstance(value, list) else value


def may_hold_key(body: bytes) -> bool:
    """Whether JSON has to be searched: it hints at a key that was given here, or escapes letters that need no
    escape."""
    return b"\\u00" in body or hints_at_key(body)


def bytes_without_keys(body: bytes) -> bytes:
    """For bytes that are passed on as they are."""
    if not hints_at_key(body):
        return body
    return _without(body.decode("latin-1"), _keys.values()).encode("latin-1")


def hints_at_key(body: bytes) -> bool:
    """Whether text, or JSON that escapes no letters, has to be searched for keys that were given here."""
    # Two plain loops: every event of every stream comes here.
    for key in tuple(_keys.values()):
        for hint in key.hint_bytes:
            if hint in body:
                return True
    return False


def _without(text: str, keys: Iterable[_Key]) -> str:
    for key in tuple(keys):
        if not any(hint in text for hint in key.hints):
            continue
        for form in key.forms:
            if form in text:
                text = text.replace(form, MARK)
        for form in key.forms:
            text = _without_pieces(text, form)
    return text


def escaped(text: str) -> str:
    """The text of a model, a program or a server with every character that could steer a terminal written
    out: controls, C1 among them, and those that change the direction of writing."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_steerless, text))


def _steerless(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode()


def _variables() -> list[str]:
    """The values of the environment that are keys."""
    return [
        value for name, value in os.environ.items() if len(value) >= _MIN_VARIABLE_CHARS and holds_key(name)
    ]


def _without_pieces(text: str, key: str) -> str:
    start = 0
    while start + _MIN_PIECE_CHARS <= len(key):
        place = text.find(key[start : start + _MIN_PIECE_CHARS])
        if place < 0:
            start += 1
            continue
        size = _MIN_PIECE_CHARS
        while text[place : place + size + 1] == key[start : start + size + 1] and start + size < len(key):
            size += 1
        text = text[:place] + MARK + text[place + size :]
    return text
