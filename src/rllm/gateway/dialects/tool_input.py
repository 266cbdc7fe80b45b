"""Arguments as text, which models write, and as an object, which the Messages protocol has instead.

    '{"city": "Rome"}'  ◄──►  {"city": "Rome"}
    'city = Rome'       ◄──►  {"_raw": "city = Rome"}

Text that is no JSON object travels under one key. So nothing that the model wrote is lost or made up, the
tool's own check of its input says what is wrong, and the text is itself again when the client sends its
history back.
"""

import json
from typing import Any

import orjson

RAW = "_raw"
_DEEPER = 64
"""JSON is written up to 254 levels deep. An input has to leave room for the levels around it, and for the
limit of 200 that the gateway sets when it comes back."""


def tool_input(arguments: str) -> dict[str, Any]:
    """No text at all is a call without arguments."""
    if not arguments:
        return {}
    try:
        value = orjson.loads(arguments)
        # Tried out with the levels around it, because orjson tells its limit only by failing.
        inner: Any = value
        for _ in range(_DEEPER):
            inner = [inner]
        orjson.dumps(inner)
        whole = json.loads(arguments, object_pairs_hook=_object_of)
        exact = orjson.loads(orjson.dumps(value)) == whole  # not so beyond 64 bits
    except (ValueError, TypeError):  # no JSON, or JSON that cannot be written
        return {RAW: arguments}
    if not exact or not isinstance(value, dict) or _is_wrapped(value):
        return {RAW: arguments}
    return value


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key that is there twice: only the last of its values would be left."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("A key is there twice.")
    return value


def arguments_of(value: dict[str, Any]) -> str:
    """Raises orjson.JSONEncodeError for an object that cannot be written as JSON."""
    return value[RAW] if _is_wrapped(value) else orjson.dumps(value).decode()


def _is_wrapped(value: dict[str, Any]) -> bool:
    return len(value) == 1 and isinstance(value.get(RAW), str)
