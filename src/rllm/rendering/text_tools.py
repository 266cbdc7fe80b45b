"""Tools for chat templates that have none: described in the system message, called and answered in text.

    tools    ──► system message: a signature each, and how a call is written
    a call   ──► <tool_call>{"name": …, "arguments": {…}}</tool_call> in the text of the assistant
    results  ──► <tool_response>…</tool_response> in a message of the user

The calls are those of the format `hermes`, so the same reader and the same grammars serve both.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rllm.types.content import text_of
from rllm.types.messages import Message

SYSTEM_ROLES = ("system", "developer")
_EXAMPLES: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
_PLACEHOLDER = "..."
_NESTING, _FOR_SHOW = {"properties", "oneOf", "allOf", "$ref"}, {"description", "title"}
"""Keys of a schema that is more than a type, and keys that say nothing of values."""


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
) -> list[Message]:
    """The conversation without tools, calls and roles that a template does not know.

    Results that follow each other, and what the user says behind them, become one message: some templates
    demand that user and assistant alternate. `takes_system`: whether the template prints system messages;
    else the tools are described in the first message of the user.
    """
    plain: list[Message] = []
    follows_results = False
    for message in messages:
        if message.get("role") == "assistant":
            plain.append(_with_calls_as_text(message))
        elif message.get("role") == "tool":
            text = f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"
            _add_to_user(plain, text, is_new=not follows_results)
        elif follows_results and message.get("role") == "user" and isinstance(message.get("content"), str):
            _add_to_user(plain, message["content"], is_new=False)
        else:
            plain.append(message)
        follows_results = message.get("role") == "tool"
    return _with_description(plain, describe_tools(tools), takes_system=takes_system) if tools else plain


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text that tells a model its tools and how to call them, with a call of the first one."""
    functions = [tool["function"] for tool in tools]
    listed = "\n".join(map(_signature, functions))
    example = _call_text(functions[0]["name"], _example_arguments(functions[0]))
    return (
        f"You can call these tools:\n{listed}\n\nTo call a tool, write its name and arguments like this:\n"
        f"{example}\nYou get its result between <tool_response> and </tool_response>."
    )


def _signature(function: Mapping[str, Any]) -> str:
    """`name(parameter: type, …) description`, with a line for each parameter that is described: a small model
    reads half as many tokens as of the schema."""
    schema: Mapping[str, Any] = function.get("parameters") or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = schema.get("required") or ()
    parameters = [
        f"{name}{'' if name in required else '?'}: {_type_text(each)}" for name, each in properties.items()
    ]
    head = f"{function['name']}({', '.join(parameters)}) {function.get('description') or ''}".rstrip()
    return "\n".join([head, *(f"  {name}: {text}" for name, text in _descriptions(properties))])


def _descriptions(properties: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, schema in properties.items():
        if isinstance(schema, Mapping) and schema.get("description"):
            yield name, str(schema["description"])


def _type_text(schema: Any) -> str:
    """The type of a parameter in a few words; its whole schema where that is more than a type."""
    if not isinstance(schema, Mapping):
        return "any"
    if "enum" in schema:
        return "|".join(map(_as_json, schema["enum"]))
    if options := schema.get("anyOf"):
        return "|".join(dict.fromkeys(map(_type_text, options)))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type_text(schema.get('items'))}"
    if isinstance(kind, str) and not _NESTING & schema.keys():
        return kind
    return _as_json({name: value for name, value in schema.items() if name not in _FOR_SHOW})


def _example_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The required arguments of a function, or all where none is required, with values of their types."""
    schema: Mapping[str, Any] = function.get("parameters") or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    names: Iterable[str] = schema.get("required") or properties
    return {name: _example_value(properties.get(name) or {}) for name in names}


def _example_value(schema: Mapping[str, Any]) -> Any:
    choices = schema.get("enum")
    return choices[0] if choices else _EXAMPLES.get(str(schema.get("type")), _PLACEHOLDER)


def _with_calls_as_text(message: Message) -> Message:
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if not calls:
        return message
    parts = [text_of(message.get("content"))]
    parts += [_call_text(call["function"]["name"], call["function"].get("arguments")) for call in calls]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(part for part in parts if part)}


def _call_text(name: str, arguments: Any) -> str:
    values = arguments if isinstance(arguments, str) and arguments else _as_json(arguments or {})
    return f'<tool_call>\n{{"name": {_as_json(name)}, "arguments": {values}}}\n</tool_call>'


def _add_to_user(messages: list[Message], text: str, *, is_new: bool) -> None:
    if is_new:
        messages.append({"role": "user", "content": text})
    else:
        messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n{text}"}


def _with_description(messages: list[Message], description: str, *, takes_system: bool) -> list[Message]:
    first = messages[0] if messages else {}
    if takes_system and first.get("role") in SYSTEM_ROLES:
        text = text_of(first.get("content"))
        return [{**first, "content": f"{text}\n\n{description}" if text else description}, *messages[1:]]
    if takes_system:
        return [{"role": "system", "content": description}, *messages]
    place = next((n for n, message in enumerate(messages) if message.get("role") == "user"), None)
    if place is None:
        return [{"role": "user", "content": description}, *messages]
    asked = messages[place]
    content = asked.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": f"{description}\n\n"}, *content]
    else:
        content = f"{description}\n\n{content or ''}"
    return [*messages[:place], {**asked, "content": content}, *messages[place + 1 :]]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
