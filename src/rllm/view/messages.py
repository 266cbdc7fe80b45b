"""A chat message as a page shows it: texts, calls and pictures as plain values, whatever form they had.

Everything is text for the page to show as text; nothing here is markup.
"""

import json
from collections.abc import Mapping
from typing import Any

from rllm.types.content import is_image_part, source_of

MAX_CHARS = 200_000
"""The length of one text; the rest is counted."""


def shown_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """`role`, `text`, and where there are any `calls`, `images`, `reasoning`, `name`, `call_id`."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [text for part in parts if (text := _text_of(part))]
    fields: dict[str, Any] = {"role": str(message.get("role", "")), "text": _limited("\n".join(texts))}
    images = [source for part in parts if (source := _picture_of(part))]
    reasoning = next(
        (message[key] for key in ("reasoning", "reasoning_content", "thinking") if message.get(key)), ""
    )
    extras = {
        "images": images,
        "calls": [_call(each) for each in message.get("tool_calls") or ()],
        "reasoning": _limited(str(reasoning)),
        "name": str(message.get("name") or ""),
        "call_id": str(message.get("tool_call_id") or ""),
    }
    return fields | {name: value for name, value in extras.items() if value}


def shown_value(value: Any) -> str:
    """Any value as text: a string as it is, the rest as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return _limited(text)


def is_picture(value: Any) -> bool:
    """Whether a value is a picture as text: a data URL."""
    return isinstance(value, str) and value.startswith("data:image/")


def _text_of(part: Any) -> str:
    if part is None or _picture_of(part):
        return ""
    if isinstance(part, Mapping):
        return str(part["text"]) if "text" in part else json.dumps(part, default=str, ensure_ascii=False)
    return str(part)


def _picture_of(part: Any) -> str:
    """The name of a picture's part: a data URL, an address or a hash."""
    if not is_image_part(part):
        return ""
    return source_of(part) or str(part.get("image") or part.get("hash") or "")


def _call(call: Any) -> dict[str, str]:
    fields: Mapping[str, Any] = call if isinstance(call, Mapping) else {"name": str(call)}
    function: Mapping[str, Any] = fields.get("function") or fields
    return {
        "name": str(function.get("name", "")),
        "arguments": shown_value(function.get("arguments", "")),
        "id": str(fields.get("id") or ""),
    }


def _limited(text: str) -> str:
    left_out = len(text) - MAX_CHARS
    return text if left_out <= 0 else f"{text[:MAX_CHARS]}\n… {left_out:,} characters are left out …"
