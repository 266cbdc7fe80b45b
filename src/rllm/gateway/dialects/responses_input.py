"""The items and tools of a Responses request, made into chat messages and chat tools.

    [reasoning, message, function_call, function_call, function_call_output, …] ──► [assistant, tool, …]
    {"type": "namespace", "name": "mcp__files", "tools": [{"name": "read"}]}     ──► function mcp__files__read

One answer of ours is several items, and comes back as several items: they are put together to the assistant
message that they were. Items without a chat form (hosted tools, compaction) stand as a message whose one
content part is the item, so that an upstream of the same protocol gets them and an engine that reads text
alone refuses them by type.
"""

from dataclasses import dataclass, field
from typing import Any

from rllm.errors import RequestRefused
from rllm.gateway.dialects.openai_fields import Fields, refusal
from rllm.types.messages import Message
from rllm.types.wire import ToolChoice, ToolMode

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_OF_PART = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Content parts that are text, and the key that holds it."""
_DEFAULT_NAMESPACE = "functions"
"""The namespace that plain functions are in, so its name is not part of theirs."""


def input_messages(fields: Fields) -> list[Message]:
    """`instructions` and `input` as one conversation."""
    conversation = _Conversation()
    if instructions := fields.text("instructions"):
        conversation.say({"role": "system", "content": instructions})
    value = fields.raw("input")
    if value is None or value == []:
        raise fields.refusal("input", "send text, or a list with at least one item")
    if isinstance(value, str):
        conversation.say({"role": "user", "content": value})
        return conversation.messages
    for item in fields.each("input"):
        conversation.add(item)
    return conversation.whole_messages()


@dataclass(slots=True)
class _Conversation:
    messages: list[Message] = field(default_factory=list[Message])
    turn: Message | None = None
    """The assistant message that the last items belong to."""

    def add(self, item: Fields) -> None:
        kind = item.text("type") or "message"
        match kind:
            case "message":
                self._add_message(item)
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                self._add_call(item)
            case "function_call_output":
                content = _content(item, "output")
                self.say({"role": "tool", "content": content or "", "tool_call_id": item.name("call_id")})
            case "item_reference":
                raise item.refusal(
                    "type", "this server keeps no items. Send the item itself", "unsupported_parameter"
                )
            case "text":
                raise item.refusal("type", "a text stands in a message item here")
            case _:
                role = "user" if kind.endswith("_output") else "assistant"
                self.say({"role": role, "content": [item.body]})

    def say(self, message: Message) -> None:
        self.turn = None
        self.messages.append(message)

    def whole_messages(self) -> list[Message]:
        for message in self.messages:
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
        return self.messages

    def _add_message(self, item: Fields) -> None:
        role = item.raw("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise item.refusal("role", "choose user, assistant, system or developer")
        content = _content(item, "content")
        if role != "assistant":
            if content is None:
                raise item.refusal("content", "it must be text or a list of parts")
            self.say({"role": _ROLES[role], "content": content})
            return
        turn = self.turn
        if turn is None or (turn["content"] is not None and "tool_calls" not in turn):
            turn = self._begin_turn()
        if isinstance(content, list):
            turn["content"] = _as_parts(turn["content"]) + content
        elif isinstance(turn["content"], list):
            turn["content"] = turn["content"] + _as_parts(content)
        else:  # what the model wrote after a call belongs to the same answer
            turn["content"] = ((turn["content"] or "") + (content or "")) or _nothing(turn)

    def _add_reasoning(self, item: Fields) -> None:
        """Kept where it is text: an encrypted thought says nothing to this model."""
        texts = _texts(item, "content") or _texts(item, "summary")
        if not texts:
            return
        turn = self.turn
        # A model thinks before it writes, so a thought behind text or calls begins the next answer.
        if turn is None or turn["content"] is not None or "tool_calls" in turn:
            turn = self._begin_turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(texts)

    def _add_call(self, item: Fields) -> None:
        turn = self.turn or self._begin_turn()
        turn["content"] = turn["content"] or None
        call = {
            "id": item.name("call_id"),
            "type": "function",
            "function": {
                "name": flat_name(item.text("namespace") or "", item.name("name")),
                "arguments": item.text("arguments") or "",
            },
        }
        turn.setdefault("tool_calls", []).append(call)

    def _begin_turn(self) -> Message:
        self.turn = {"role": "assistant", "content": None}
        self.messages.append(self.turn)
        return self.turn


def _nothing(turn: Message) -> str | None:
    """No text, in the shape of `Choice.message`."""
    return None if "tool_calls" in turn else ""


def _as_parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _texts(item: Fields, name: str) -> list[str]:
    return [text for part in item.each(name) if (text := part.text("text"))]


def _content(item: Fields, name: str) -> str | list[dict[str, Any]] | None:
    value = item.raw(name)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise item.refusal(name, "it must be text or a list of parts")
    parts = [_part(part, f"{item.param(name)}[{place}]") for place, part in enumerate(value)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    part = Fields(value, where)
    kind = part.name("type")
    if key := _TEXT_OF_PART.get(kind):
        text = part.text(key)
        if text is None:
            raise part.refusal(key, f"a part of type {kind} holds its text there")
        return {"type": "text", "text": text}
    if kind == "input_image" and isinstance(url := part.raw("image_url"), str):
        image = {"url": url} | ({"detail": detail} if (detail := part.text("detail")) else {})
        return {"type": "image_url", "image_url": image}
    if kind == "input_file":
        keys = ("file_data", "file_id", "filename")
        return {"type": "file", "file": {key: part.body[key] for key in keys if part.raw(key) is not None}}
    return part.body


# ---- tools -------------------------------------------------------------------------------------------------


def flat_name(namespace: str, name: str) -> str:
    """The model's name for a tool of a namespace: both names in one, as chat templates know no namespaces."""
    if not namespace or namespace == _DEFAULT_NAMESPACE:
        return name
    return namespace + name if namespace.endswith("_") or name.startswith("_") else f"{namespace}__{name}"


def chat_tools(fields: Fields) -> list[dict[str, Any]]:
    """The functions in chat form. Hosted and custom tools run elsewhere or write no JSON: the model is not
    offered them, which `tool_choice` auto allows."""
    tools: list[dict[str, Any]] = []
    namespace_of: dict[str, str] = {}
    for entry, namespace in _functions(fields):
        name = flat_name(namespace, entry.name("name"))
        if namespace_of.setdefault(name, namespace) != namespace:
            raise entry.refusal("name", f"with its namespace it is {name!r}, and another tool has that name")
        function: dict[str, Any] = {
            "name": name,
            "description": entry.text("description") or "",
            "parameters": entry.mapping("parameters") or {"type": "object", "properties": {}},
        }
        if entry.raw("strict") is not None:
            function["strict"] = entry.flag("strict", False)
        tools.append({"type": "function", "function": function})
    return tools


def namespaces(body: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Flat name ──► (namespace, name), of tools in a namespace. Clients find the tool of a call by both."""
    return {
        flat_name(namespace, entry.name("name")): (namespace, entry.name("name"))
        for entry, namespace in _functions(Fields(body))
        if namespace
    }


def _functions(fields: Fields) -> list[tuple[Fields, str]]:
    functions: list[tuple[Fields, str]] = []
    for tool in fields.each("tools"):
        kind = tool.name("type")
        if kind == "function":
            functions.append((tool, ""))
        elif kind == "namespace":
            namespace = tool.name("name")
            functions += [
                (inner, namespace) for inner in tool.each("tools") if inner.name("type") == "function"
            ]
    return functions


def chosen_tools(fields: Fields, tools: list[dict[str, Any]]) -> tuple[ToolChoice, list[dict[str, Any]]]:
    """`tool_choice`, and the tools that it leaves."""
    value = fields.raw("tool_choice")
    if value is None:
        return ToolChoice(), tools
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise fields.refusal("tool_choice", "choose none, auto, required or one function")
        return ToolChoice(mode=ToolMode(value)), tools
    choice = fields.inside("tool_choice")
    kind = choice.name("type")
    if kind == "allowed_tools":
        return _allowed_tools(choice, tools)
    if kind != "function":
        raise choice.refusal("type", "the model is offered function tools alone. Choose auto or one of those")
    return ToolChoice(mode=ToolMode.NAMED, name=_offered_name(choice, tools)), tools


def _allowed_tools(choice: Fields, tools: list[dict[str, Any]]) -> tuple[ToolChoice, list[dict[str, Any]]]:
    mode = choice.raw("mode")
    if mode not in ("auto", "required"):
        raise choice.refusal("mode", "choose auto or required")
    functions = [entry for entry in choice.each("tools") if entry.name("type") == "function"]
    names = {_offered_name(entry, tools) for entry in functions}
    return ToolChoice(mode=ToolMode(mode)), [tool for tool in tools if tool["function"]["name"] in names]


def _offered_name(choice: Fields, tools: list[dict[str, Any]]) -> str:
    holder = choice if choice.raw("function") is None else choice.inside("function")
    name = flat_name(holder.text("namespace") or "", holder.name("name"))
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise refusal(
            holder.param("name"), name, f"the functions among `tools` are {', '.join(names[:20]) or 'none'}"
        )
    return name


def require_stateless(fields: Fields) -> None:
    """Raises RequestRefused for what rests on more than earlier responses."""
    if fields.raw("conversation") is not None:
        raise fields.refusal(
            "conversation",
            "this server keeps responses and no conversations. Send `previous_response_id`, or all of it",
            "unsupported_parameter",
        )
    if fields.raw("prompt") is not None:
        raise fields.refusal(
            "prompt", "this server keeps no prompts. Send it as `input`", "unsupported_parameter"
        )
    if fields.flag("background", False):
        raise RequestRefused(
            "`background` is true; this server answers while it is waited for. Wait, or stream the answer.",
            param="background",
            code="unsupported_parameter",
        )
