"""The content of a message: text, or parts of which some may be images.

"text"                                                                           any
{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}           OpenAI, chat completions
{"type": "input_image", "image_url": "data:…"}                                   OpenAI, responses
{"type": "image", "source": {"type": "base64", "media_type": …, "data": …}}      Anthropic
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Any, cast

from rllm.errors import ConfigError

IMAGE_TYPES = frozenset({"image_url", "input_image", "image"})
_DATA_URL = re.compile(r"data:(image/[a-z.+-]+);base64,([A-Za-z0-9+/]+={0,2})")


def is_image_part(part: Any) -> bool:
    return _field(part, "type") in IMAGE_TYPES


def source_of(part: Any) -> str:
    """The URL of an image part, in whichever form it is written; empty where it names none."""
    if not is_image_part(part):
        return ""
    value = _field(part, "image_url")
    if _field(part, "type") == "image":
        source = _field(part, "source")
        if _field(source, "type") == "base64":
            return f"data:{_field(source, 'media_type')};base64,{_field(source, 'data')}"
        value = _field(source, "url")
    elif isinstance(value, Mapping):
        value = _field(value, "url")
    return value if isinstance(value, str) else ""


def with_source(part: Mapping[str, Any], url: str) -> dict[str, Any]:
    """An image part whose image is at another URL."""
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": url}}
    value = part.get("image_url")
    return {**part, "image_url": {**value, "url": url} if isinstance(value, Mapping) else url}


def with_captions(text: str) -> str:
    """`text` for people: in place of each image that is written into it, its type, size and hash."""

    def caption(match: re.Match[str]) -> str:
        try:
            data = base64.b64decode(match[2], validate=True)
        except binascii.Error:
            return match[0]
        return f"[{match[1]}, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()[:12]}]"

    return _DATA_URL.sub(caption, text)


def words_of(content: Any) -> str:
    """The text of a message that may show images, without them. Raises ConfigError for what is neither."""
    if isinstance(content, list):
        content = [part for part in cast(list[Any], content) if not is_image_part(part)]
    return text_of(content)


def text_of(content: Any) -> str:
    """A message's content as text: parts joined, nothing for null. Raises ConfigError for what is no text."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    texts: list[str] = []
    for part in content:
        text = _field(part, "text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = _field(part, "type") if isinstance(part, Mapping) else type(part).__name__
            raise ConfigError(f"A message has a part of type `{kind}`; this model reads text alone.")
        texts.append(text)
    return "".join(texts)


def _field(part: Any, name: str) -> Any:
    """That field of an object; None of what is no object."""
    return cast(Mapping[str, Any], part).get(name) if isinstance(part, Mapping) else None
