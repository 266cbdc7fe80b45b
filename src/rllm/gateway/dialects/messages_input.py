"""The messages and tools of a Messages request, made into chat messages and chat tools.

    user [tool_result, tool_result, text]      ──► tool, tool, user
    assistant [thinking, text, tool_use]       ──► assistant with `reasoning_content`, content and tool_calls
    {"name", "input_schema"}                   ──► {"type": "function", "function": {…}}

Blocks without a chat form (documents, results of hosted tools) stay content parts under their own type, so
that an engine that reads text alone refuses them by name. Text blocks of one message stand on lines of
their own; those of an assistant belong together without a gap, as they were written.
"""

from typing import Any

import orjson

from rllm.gateway.dialects.openai_fields import Fields, refusal
from rllm.gateway.dialects.tool_input import arguments_of
from rllm.types.messages import Message
from rllm.types.wire import ToolChoice, ToolMode

BILLING_LINE = "x-anthropic-billing-header:"
"""Claude Code puts such a line before its system prompt, with a number that changes at every request. It is
meant for the server, not for the model, and would make every request a new conversation."""

Parts = list[dict[str, Any]]


def chat_messages(fields: Fields, *, to_answer: bool) -> list[Message]:
    """`system` and `messages` as one conversation; `to_answer` when the model shall go on with it."""
    messages: list[Message] = []
    system = _without_billing(_parts(fields, "system"))
    if system:
        messages.append({"role": "system", "content": _join(system, "\n")})
    entries = fields.each("messages")
    if not entries:
        raise fields.refusal("messages", "it must be a list with at least one message")
    for entry in entries:
        match entry.raw("role"):
            case "user":
                messages += _user(entry)
            case "assistant":
                messages.append(_assistant(entry))
            case "system":
                messages.append({"role": "system", "content": _join(_parts(entry, "content"), "\n")})
            case _:
                raise entry.refusal("role", "choose user, assistant or system")
    if to_answer and entries[-1].raw("role") == "assistant":
        raise entries[-1].refusal(
            "role", "this server does not go on with a prefilled answer. End `messages` with a user message"
        )
    return messages


def _user(entry: Fields) -> list[Message]:
    """Tool results become messages of their own; the order is kept."""
    if not isinstance(entry.raw("content"), list):
        return [{"role": "user", "content": _join(_parts(entry, "content"), "\n")}]
    messages: list[Message] = []
    user_parts: Parts = []
    for block in entry.each("content"):
        if block.name("type") != "tool_result":
            user_parts.append(_part(block))
            continue
        if user_parts:
            messages.append({"role": "user", "content": _join(user_parts, "\n")})
            user_parts = []
        messages.append(_tool_result(block))
    if user_parts or not messages:
        messages.append({"role": "user", "content": _join(user_parts, "\n")})
    return messages


def _tool_result(block: Fields) -> Message:
    content = _join([] if block.raw("content") is None else _parts(block, "content"), "\n")
    if block.flag("is_error", False):
        content = _marked_as_error(content)
    return {"role": "tool", "content": content, "tool_call_id": block.name("tool_use_id")}


def _marked_as_error(content: str | Parts) -> str | Parts:
    """Chat has no place for `is_error`, so the model reads it."""
    if isinstance(content, list):
        return [{"type": "text", "text": "Error:"}, *content]
    return content if content.lower().startswith("error") else f"Error: {content}"


def _assistant(entry: Fields) -> Message:
    message: Message = {"role": "assistant", "content": None}
    if not isinstance(entry.raw("content"), list):
        message["content"] = _join(_parts(entry, "content"), "")
        return message
    text_parts: Parts = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in entry.each("content"):
        match block.name("type"):
            case "thinking":
                thoughts.append(block.text("thinking") or "")
            case "redacted_thinking":  # nobody but its author can read it
                pass
            case "tool_use":
                calls.append(_call(block))
            case _:
                text_parts.append(_part(block))
    message["content"] = _join(text_parts, "") or (None if calls else "")
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Fields) -> dict[str, Any]:
    try:
        arguments = arguments_of(block.mapping("input") or {})
    except orjson.JSONEncodeError as error:
        raise block.refusal("input", f"it must be a JSON object ({error})") from error
    return {
        "id": block.name("id"),
        "type": "function",
        "function": {"name": block.name("name"), "arguments": arguments},
    }


def _parts(fields: Fields, name: str) -> Parts:
    """Text or a list of blocks as content parts. Only `system` may be missing."""
    value = fields.raw(name)
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list) and not (name == "system" and value is None):
        raise fields.refusal(name, "it must be text or a list of blocks")
    return [_part(block) for block in fields.each(name)]


def _part(block: Fields) -> dict[str, Any]:
    kind = block.name("type")
    if kind == "text":
        text = block.text("text")
        if text is None:
            raise block.refusal("text", "a block of type text holds it there")
        return {"type": "text", "text": text}
    if kind == "image":
        return _image(block)
    return block.body


def _image(block: Fields) -> dict[str, Any]:
    source = block.inside("source")
    match source.raw("type"):
        case "url":
            url = source.name("url")
        case "base64":
            url = f"data:{source.name('media_type')};base64,{source.name('data')}"
        case _:  # files live at their provider
            return block.body
    return {"type": "image_url", "image_url": {"url": url}}


def _join(parts: Parts, between: str) -> str | Parts:
    if all(part["type"] == "text" for part in parts):
        return between.join(part["text"] for part in parts)
    return parts


def _without_billing(parts: Parts) -> Parts:
    parts_left: Parts = []
    for part in parts:
        text = part.get("text")
        if isinstance(text, str) and text.startswith(BILLING_LINE):
            text = text.partition("\n")[2]
        if text != "":
            parts_left.append(part if text == part.get("text") else {"type": "text", "text": text})
    return parts_left


# ---- tools -------------------------------------------------------------------------------------------------


def chat_tools(fields: Fields) -> list[dict[str, Any]]:
    """The client's own tools in chat form. Anthropic's typed tools have no schema and some run on its
    servers: the model is not offered them, which `tool_choice` auto allows."""
    tools: list[dict[str, Any]] = []
    for entry in fields.each("tools"):
        if entry.raw("type") not in (None, "custom"):
            continue
        schema = entry.mapping("input_schema")
        if schema is None:
            raise entry.refusal("input_schema", "it must be the JSON schema of the tool's input")
        function: dict[str, Any] = {
            "name": entry.name("name"),
            "description": entry.text("description") or "",
            "parameters": schema,
        }
        if entry.raw("strict") is not None:
            function["strict"] = entry.flag("strict", False)
        tools.append({"type": "function", "function": function})
    return tools


def chosen_tool(fields: Fields, tools: list[dict[str, Any]]) -> tuple[ToolChoice, bool]:
    """`tool_choice`, and whether several calls may come at once."""
    if fields.raw("tool_choice") is None:
        return ToolChoice(), True
    choice = fields.inside("tool_choice")
    parallel = not choice.flag("disable_parallel_tool_use", False)
    match choice.raw("type"):
        case "auto":
            return ToolChoice(), parallel
        case "none":
            return ToolChoice(mode=ToolMode.NONE), parallel
        case "any":
            return ToolChoice(mode=ToolMode.REQUIRED), parallel
        case "tool":
            return ToolChoice(mode=ToolMode.NAMED, name=_offered_name(choice, tools)), parallel
        case _:
            raise choice.refusal("type", "choose auto, any, tool or none")


def _offered_name(choice: Fields, tools: list[dict[str, Any]]) -> str:
    name = choice.name("name")
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise refusal(
            choice.param("name"),
            name,
            f"the `tools` with an `input_schema` are {', '.join(names[:20]) or 'none'}",
        )
    return name
