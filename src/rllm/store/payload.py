"""The content of an episode beside its tokens, as compressed JSON that gives back what went in.

    fields ──► plain? ──────────────────────────────► JSON ──► zlib
                 └─► equal when JSON is read back? ──► yes: as it is
                                                  └──► no: tuples, Tasks, other keys tagged ──► JSON ──► zlib

Plain JSON would silently turn a tuple into a list and the key 1 into "1". A value that neither form holds is
an AgentError that names the field: such values come from an agent or an environment.
"""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rllm.errors import AgentError, ConfigError
from rllm.store.images import with_images, without_images
from rllm.types.episode import Outcome, TerminationReason
from rllm.types.messages import FinishReason, LogprobMeaning
from rllm.types.task import Task

# What holds itself ends in a RecursionError, so nothing has to be remembered of the values that were seen.
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
_TUPLE, _PAIRS, _TASK, _PATH, _TAGGED = "__tuple__", "__pairs__", "__task__", "__path__", "__tagged__"
_DEEPEST = 100
_MAX_INTEGER_BITS = 14_000
"""Python neither writes nor reads a number of more than 4,300 digits."""
MAX_PAYLOAD_CHARS = 256 << 20
"""The length of one episode, tokens apart; SQLite holds no value of more than a gigabyte."""


def pack_payload(fields: dict[str, Any], where: str, images: dict[str, bytes] | None = None) -> bytes:
    """`images` takes the images, by hash, that the payload then refers to; without it they stay inside.

    Raises AgentError for what cannot be given back.
    """
    text = payload_text(fields, where)
    if images is not None:
        text = without_images(text, images)
    return zlib.compress(text.encode(), 1)


def require_payload(fields: dict[str, Any], where: str) -> None:
    """Raises what `pack_payload` would raise."""
    if not 0 < most_chars(fields) <= MAX_PAYLOAD_CHARS:
        payload_text(fields, where)


def payload_text(fields: dict[str, Any], where: str) -> str:
    """Plain JSON where that gives back what went in; else tuples, other keys and Tasks are tagged."""
    try:
        text = _to_json(fields)
        faithful = most_chars(fields) > 0 or json.loads(text) == fields
    except (TypeError, ValueError, RecursionError):
        faithful, text = False, ""
    if not faithful:
        text = _to_json({_TAGGED: _tagged_episode(fields, where)})
    if len(text) > MAX_PAYLOAD_CHARS:
        raise AgentError(
            f"{where}: as JSON it has {len(text):,} characters beside its tokens, and at most "
            f"{MAX_PAYLOAD_CHARS:,} are kept; keep large things in files and their names in the episode."
        )
    return text


def most_chars(value: Any, depth: int = _DEEPEST) -> int:
    """A bound of the characters that a list or dict has as JSON, where JSON gives back what went in; else 0.

    Nearly all episodes hold texts and finite numbers in lists, and in dicts by text: of these it knows in a
    quarter of the time that writing and reading take. What it does not know is tried out.
    """
    kind = type(value)
    if depth == 0 or (kind is not dict and kind is not list):
        return 0
    size = 2 + _MOST_CHARS_OF_NUMBER * len(value)
    items = value
    if kind is dict:
        try:
            size += _MOST_CHARS_OF_CHARACTER * len("".join(value))
        except TypeError:
            return 0
        items = value.values()
    for item in items:
        kind = type(item)
        if kind is str:
            size += _MOST_CHARS_OF_CHARACTER * len(item)
        elif kind in _SHORT:
            continue
        elif kind is float:
            if item - item != 0.0:  # not finite
                return 0
        elif kind is int:
            if not -_LARGE < item < _LARGE:
                return 0
        else:
            inner = most_chars(item, depth - 1)
            if not inner:
                return 0
            size += inner
    return size


_LARGE = 1 << 63
_MOST_CHARS_OF_NUMBER, _MOST_CHARS_OF_CHARACTER = 32, 12
"""With what stands between values: -1.7976931348623157e+308, and \\ud83d\\ude00 for one beyond 16 bits."""
_SHORT = frozenset({bool, type(None), Outcome, TerminationReason, FinishReason, LogprobMeaning})
"""Types whose values are a few characters, and equal to the text or value that JSON gives back."""


def unpack_payload(payload: bytes, images: Mapping[str, bytes] = {}) -> dict[str, Any]:
    """`images`: those that the payload refers to. Raises ConfigError for more than a run keeps."""
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(payload, MAX_PAYLOAD_CHARS)  # JSON is written in ASCII
    if unpacking.unconsumed_tail:
        raise ConfigError(
            f"An episode of {len(payload):,} bytes unpacks to more than {MAX_PAYLOAD_CHARS:,}, which no run "
            "writes; restore the store, or name another run."
        )
    if not unpacking.eof:
        raise zlib.error("an episode is cut off")
    fields = json.loads(with_images(text.decode(), images) if images else text)
    return _without_tags(fields[_TAGGED]) if _TAGGED in fields else fields


def _tagged_episode(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Field by field, so that an error can say where the value stands that JSON cannot hold."""
    payload = _tagged_fields(fields, where, without="trajectories")
    payload["trajectories"] = []
    for trajectory in fields["trajectories"]:
        role = repr(trajectory["name"])
        payload["trajectories"].append(_tagged_fields(trajectory, f"{where}, {role}", without="steps"))
        payload["trajectories"][-1]["steps"] = [
            _tagged_fields(step, f"{where}, step {position} of {role}")
            for position, step in enumerate(trajectory["steps"])
        ]
    return payload


def _tagged_fields(fields: dict[str, Any], where: str, *, without: str = "") -> dict[str, Any]:
    return {
        name: _with_tags(value, where, (None, "chat_completions" if name == "messages" else name))
        for name, value in fields.items()
        if name != without
    }


_Place = tuple["_Place | None", str | int]
"""(what holds it, its key): put into words only when there is something to complain about."""


def _with_tags(value: Any, where: str, place: _Place, depth: int = 0) -> Any:
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if depth > _DEEPEST:
        raise AgentError(
            f"{where}: `{_spelling(place)[:40]}…` is nested deeper than {_DEEPEST} levels, or holds itself."
        )
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise AgentError(
            f"{where}: `{_spelling(place)}` is {value}, which JSON cannot hold; "
            "leave it out or write it as a string."
        )
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise AgentError(
            f"{where}: `{_spelling(place)}` has {value.bit_length():,} bits, and JSON cannot hold a number "
            f"of more than {_MAX_INTEGER_BITS:,}; write it as a string."
        )
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_with_tags(each, where, (place, index), depth + 1) for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: _with_tags(list(value), where, place, depth)}
    if isinstance(value, dict):
        # A dict of a user's that looks like a tag is written as pairs, or it would be read as one.
        if all(isinstance(key, str) for key in value) and not (value.keys() & _UNTAG.keys()):
            return {key: _with_tags(each, where, (place, key), depth + 1) for key, each in value.items()}
        return {_PAIRS: _with_tags([list(pair) for pair in value.items()], where, place, depth)}
    if isinstance(value, Path):
        return {_PATH: str(value)}
    if isinstance(value, Task):
        parts = [value.id, value.instruction, value.metadata, value.dataset_dir, value.sub_dir]
        return {_TASK: _with_tags(parts, where, place, depth)}
    raise AgentError(
        f"{where}: `{_spelling(place)}` is a {type(value).__name__}, which JSON cannot hold; "
        "make it a string, a number, a list or a dict."
    )


def _spelling(place: _Place) -> str:
    """`info['cells'][3]`, as one would write it in Python."""
    holder, key = place
    return str(key) if holder is None else f"{_spelling(holder)}[{key!r}]"


_UNTAG = {_TUPLE: tuple, _PAIRS: dict, _PATH: Path, _TASK: lambda parts: Task(*parts)}


def _without_tags(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_tags(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))) in _UNTAG:
        return _UNTAG[tag](_without_tags(value[tag]))
    return {key: _without_tags(each) for key, each in value.items()}
