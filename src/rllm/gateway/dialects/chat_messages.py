"""Messages and tools of a chat request, in the many shapes that clients send them, made into one.

    developer, part lists, null and absent contents ──► roles system, user, assistant, tool; content as text

Contents with a part that is not text stay lists. Keys that mean nothing to a model are dropped.
"""

from typing import Any

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.dialects.openai_fields import Fields
from rllm.types.messages import Message
from rllm.types.wire import ToolChoice, ToolMode

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXT_OF_PART = {"text": "text", "refusal": "refusal"}
"""Content parts that are text, and the key that holds it."""


def chat_messages(fields: Fields) -> list[Message]:
    messages = fields.each("messages")
    if not messages:
        raise fields.refusal("messages", "it must be a list with at least one message")
    return [_message(entry) for entry in messages]


def chat_tools(fields: Fields) -> list[dict[str, Any]]:
    if fields.raw("functions"):
        raise fields.refusal(
            "functions", "this form was replaced in 2023. Send `tools` and `tool_choice` instead"
        )
    return [_tool(entry) for entry in fields.each("tools")]


def chat_tool_choice(fields: Fields, tools: list[dict[str, Any]]) -> ToolChoice:
    if fields.raw("function_call") is not None:
        raise fields.refusal("function_call", "this form was replaced in 2023. Send `tool_choice` instead")
    value = fields.raw("tool_choice")
    if value is None:
        return ToolChoice()
    if value in ("none", "auto"):
        return ToolChoice(mode=ToolMode(value))
    if value == "required":
        if not tools:
            raise fields.refusal("tool_choice", "`tools` offers none to call. Add tools, or leave it out")
        return ToolChoice(mode=ToolMode.REQUIRED)
    if not isinstance(value, dict):
        raise fields.refusal("tool_choice", "choose none, auto, required or one function")
    return _named_choice(fields.inside("tool_choice"), tools)


def _named_choice(choice: Fields, tools: list[dict[str, Any]]) -> ToolChoice:
    if choice.raw("type") != "function":
        raise choice.refusal("type", "the only kind of tool that can be chosen here is function")
    holder = choice if isinstance(choice.raw("name"), str) else choice.inside("function")
    name = holder.name("name")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise holder.refusal("name", "it is not the name of one of the `tools`")
    return ToolChoice(mode=ToolMode.NAMED, name=name)


def _tool(entry: Fields) -> dict[str, Any]:
    if entry.raw("type") not in ("function", None):
        raise entry.refusal("type", "the only kind of tool that chat completions know here is function")
    function = entry.inside("function")
    function_fields: dict[str, Any] = {
        "name": function.name("name"),
        "description": function.text("description") or "",
        "parameters": function.mapping("parameters") or {"type": "object", "properties": {}},
    }
    if function.raw("strict") is not None:
        function_fields["strict"] = function.flag("strict", False)
    return {"type": "function", "function": function_fields}


def _message(entry: Fields) -> Message:
    role = entry.raw("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise entry.refusal("role", "choose system, developer, user, assistant or tool")
    message: Message = {"role": _ROLES[role], "content": _content(entry)}
    if role == "assistant":
        _complete_assistant(entry, message)
    elif message["content"] is None:
        if role != "tool":
            raise entry.refusal("content", "it must be text or a list of parts")
        message["content"] = ""  # a tool that answered nothing
    if role == "tool":
        message["tool_call_id"] = entry.name("tool_call_id")
    if name := entry.text("name"):
        message["name"] = name
    return message


def _complete_assistant(entry: Fields, message: Message) -> None:
    for name in ("function_call", "audio"):
        if entry.raw(name) is not None:
            raise entry.refusal(name, "answers are given back as `content` and `tool_calls` here")
    calls = [_tool_call(call) for call in entry.each("tool_calls")]
    if message["content"] is None:
        message["content"] = entry.text("refusal")
    # One shape for what clients echo as "", null or nothing at all: the shape in which it was answered.
    message["content"] = message["content"] or (None if calls else "")
    reasoning = entry.raw("reasoning_content") or entry.raw("reasoning")
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls


def _tool_call(call: Fields) -> dict[str, Any]:
    if call.raw("type") not in ("function", None):
        raise call.refusal("type", "the only kind of call that chat completions know here is function")
    function = call.inside("function")
    return {
        "id": call.name("id"),
        "type": "function",
        "function": {"name": function.name("name"), "arguments": _arguments(function)},
    }


def _arguments(function: Fields) -> str:
    """The text that the model wrote, well-formed or not. Some clients send it decoded."""
    value = function.raw("arguments")
    if value is None:
        return "{}"
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise function.refusal("arguments", "it must be the JSON text of an object")
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise function.refusal("arguments", f"it must be the JSON text of an object ({error})") from error


def _content(entry: Fields) -> str | list[dict[str, Any]] | None:
    value = entry.raw("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise entry.refusal("content", "it must be text or a list of parts")
    parts = [_part(part, f"{entry.param('content')}[{place}]") for place, part in enumerate(value)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    part = Fields(value, where)
    kind = part.name("type")
    if (key := _TEXT_OF_PART.get(kind)) is None:
        return part.body
    text = part.text(key)
    if text is None:
        raise RequestRefused(f"`{part.param(key)}` is missing; a part of type {kind} holds it.", param=where)
    return {"type": "text", "text": text}
