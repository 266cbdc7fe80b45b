"""Messages as chat templates take them, whatever shape a client sent them in.

content: text, null, absent, parts ──► text        (templates add texts up)
         parts with images         ──► texts and marks, for models that read images
arguments: JSON text               ──► an object   (templates print it as they print tools), or text again
           null, absent                           for those that can print nothing else
ids of calls                       ──► nine letters and digits, for templates that take no others
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rllm.types.content import is_image_part, text_of
from rllm.types.messages import Message


def as_template_sees(
    message: Message, *, short_ids: bool, text_arguments: bool, takes_images: bool
) -> Message:
    """Templates add texts up, so content is text, and parts only where some of them are images; and they
    print arguments as objects, or as text alone."""
    content = message.get("content")
    calls = message.get("tool_calls")
    has_ids = short_ids and "tool_call_id" in message
    if isinstance(content, str) and "tool_calls" not in message and not has_ids:
        return message
    template_message = dict(message)
    if takes_images and isinstance(content, list) and any(map(is_image_part, content)):
        template_message["content"] = _parts_of(content)
    else:
        template_message["content"] = text_of(content)
    if calls:
        template_message["tool_calls"] = [
            _call_as_template_sees(call, short_ids=short_ids, text_arguments=text_arguments) for call in calls
        ]
    else:
        template_message.pop("tool_calls", None)
    if has_ids:
        template_message["tool_call_id"] = _short_id(template_message["tool_call_id"])
    return template_message


def _call_as_template_sees(
    call: Mapping[str, Any], *, short_ids: bool, text_arguments: bool
) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        arguments = function["arguments"] = {}  # templates go through its members
    if text_arguments:
        function["arguments"] = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
    elif isinstance(arguments, str):
        function["arguments"] = _object_or_text(arguments)
    template_call = {**call, "type": call.get("type", "function"), "function": function}
    if short_ids:
        template_call["id"] = _short_id(template_call.get("id", ""))
    return template_call


def _object_or_text(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    if len(text) == 9 and text.isascii() and text.isalnum():
        return text
    # One id always has the same short one, so the result of a call still names its call.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


def _parts_of(content: list[Any]) -> list[dict[str, Any]]:
    """A mark for every image: the templates of vision models look at the type of a part alone."""
    return [
        {"type": "image"} if is_image_part(part) else {"type": "text", "text": text_of([part])}
        for part in content
    ]
